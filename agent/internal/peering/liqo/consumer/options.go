package consumer

import (
	"cmp"
	"errors"
	"time"

	"github.com/spillway-dev/spillway/agent/internal/peering/liqo"
)

// Options of a Driver.
type Options struct {
	liqo.Options

	// LiqoNamespace is where Liqo is installed; "liqo" if empty.
	LiqoNamespace string
	// NamespaceRole names a ClusterRole that is bound to ServiceAccount in each namespace
	// with overflowed pods that refer to ConfigMaps or Secrets, for marking these. Empty:
	// its permissions come from elsewhere, and marks of a former process stay.
	NamespaceRole string
	// ReflectAll lets Liqo copy all ConfigMaps and Secrets of a mapped namespace to the
	// provider, not only those that overflowed pods refer to.
	ReflectAll bool
	// ServiceAccountTokens lets Liqo give guests tokens of this cluster.
	ServiceAccountTokens bool
	// ProviderNetworks are those in which guests have addresses. Nil: addressesPath is not served.
	ProviderNetworks *ProviderNetworks
	// StuckAfter is how long the deletion of an object may wait for crd-replicator
	// before its finalizer is removed; 1m if zero.
	StuckAfter time.Duration
}

func (o *Options) complete() error {
	if err := o.Complete(); err != nil {
		return err
	}
	if o.Messenger == nil {
		return errors.New("liqo: a messenger is required")
	}
	o.LiqoNamespace = cmp.Or(o.LiqoNamespace, "liqo")
	o.StuckAfter = cmp.Or(o.StuckAfter, time.Minute)
	return nil
}

const (
	// replicatorFinalizer is set by Liqo's crd-replicator on objects that it copies
	// to the provider, replicatorSecretFinalizer on the kubeconfig it uses for that.
	replicatorFinalizer       = "crdreplicator.liqo.io/resource"
	replicatorSecretFinalizer = "crdreplicator.liqo.io/operator"

	// labelWebhookSkip on an object keeps Liqo's webhooks from changing it.
	labelWebhookSkip = "liqo.io/webhook-skip"
)

func controlPlaneIdentity(provider string) string { return "controlplane-" + provider }

func sliceIdentity(provider string) string { return "resourceslice-" + liqo.SliceName(provider) }
