package liqo

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"sync"
	"time"

	authv1beta1 "github.com/liqotech/liqo/apis/authentication/v1beta1"
	liqov1beta1 "github.com/liqotech/liqo/apis/core/v1beta1"
	offloadingv1beta1 "github.com/liqotech/liqo/apis/offloading/v1beta1"
	"github.com/liqotech/liqo/pkg/consts"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/spillway-dev/spillway/agent/internal/peering/confine"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

const (
	// annotationSession on a tenant namespace is the session of the peering in
	// which this cluster is the consumer, annotationProviderSession of the one in
	// which it is the provider. The two directions share the namespace.
	annotationSession         = broker.Group + "/liqo-session"
	annotationProviderSession = broker.Group + "/liqo-provider-session"

	// replicatorFinalizer is set by Liqo's crd-replicator on objects that it copies
	// to the provider, replicatorSecretFinalizer on the kubeconfig it uses for that.
	replicatorFinalizer       = "crdreplicator.liqo.io/resource"
	replicatorSecretFinalizer = "crdreplicator.liqo.io/operator"

	// labelWebhookSkip on an object keeps Liqo's webhooks from changing it.
	labelWebhookSkip = "liqo.io/webhook-skip"
	// labelOrigin on a ShadowPod is the consumer's cluster ID.
	labelOrigin = "offloading.liqo.io/origin"

	// kubeletPort is where Liqo's virtual kubelet serves logs and exec, without
	// authentication.
	kubeletPort = 10250
)

// Options of a Driver and of a Provider. Liqo must be installed with the same
// cluster ID. The Client's scheme comes from AddToScheme.
type Options struct {
	session.Options

	// LiqoNamespace is where Liqo is installed; "liqo" if empty.
	LiqoNamespace string
	// PodCIDRs of this cluster: a NetworkPolicy keeps pods away from the virtual kubelets,
	// which do not authenticate clients. If empty, they are those of the nodes; without any,
	// only control plane nodes reach them.
	PodCIDRs []string
	// OpenKubelets leaves the virtual kubelets without that NetworkPolicy.
	OpenKubelets bool
	// TenantRole names a ClusterRole that is bound to ServiceAccount in each tenant
	// namespace, so that the agent needs no access to the Secrets of all
	// namespaces. Empty: its permissions come from elsewhere.
	TenantRole string
	// GuestsRole names a ClusterRole that is bound to ServiceAccount in each namespace that
	// Liqo creates for guests. Empty: its permissions come from elsewhere.
	GuestsRole string
	// NamespaceRole names a ClusterRole that is bound to ServiceAccount in each namespace
	// with overflowed pods that refer to ConfigMaps or Secrets, for marking these. Empty:
	// its permissions come from elsewhere, and marks of a former process stay.
	NamespaceRole string
	// ReflectAll lets Liqo copy all ConfigMaps and Secrets of a mapped namespace to the
	// provider, not only those that overflowed pods refer to.
	ReflectAll bool
	// ServiceAccountTokens lets Liqo give guests tokens of this cluster.
	ServiceAccountTokens bool
	// Networks that guests may exchange traffic with, besides the other guests of their
	// consumer and this cluster's DNS.
	Networks confine.Networks
	// PodSecurity is the Pod Security Standard that guests must comply with,
	// broker.PodSecurityRestricted if empty, or broker.PodSecurityBaseline.
	PodSecurity string
	// Webhook is whether the manager's webhook server serves GuestsPath and AddressesPath, and
	// HandOver whether guests wait there for the place of a placeholder.
	Webhook, HandOver bool
	// OwnNetworks returns the networks of this cluster, in which no provider's guest has an
	// address; nil while they are unknown. Required with Webhook.
	OwnNetworks func() []netip.Prefix
	// StuckAfter is how long the deletion of an object may wait for crd-replicator
	// before its finalizer is removed; 1m if zero.
	StuckAfter time.Duration

	// prepared is when a tenant namespace last got its objects, by UID.
	prepared *sync.Map
}

func (o *Options) complete() error {
	if err := o.Options.Complete(); err != nil {
		return fmt.Errorf("liqo: %w", err)
	}
	o.LiqoNamespace = cmp.Or(o.LiqoNamespace, "liqo")
	o.PodSecurity = cmp.Or(o.PodSecurity, broker.PodSecurityRestricted)
	o.StuckAfter = cmp.Or(o.StuckAfter, time.Minute)
	o.prepared = &sync.Map{}
	return nil
}

// AddToScheme adds every type that this package reads or writes.
func AddToScheme(scheme *runtime.Scheme) error {
	for _, add := range []func(*runtime.Scheme) error{
		corev1.AddToScheme, rbacv1.AddToScheme, networkingv1.AddToScheme, policyv1.AddToScheme,
		liqov1beta1.AddToScheme, authv1beta1.AddToScheme, offloadingv1beta1.AddToScheme,
	} {
		if err := add(scheme); err != nil {
			return fmt.Errorf("adding Liqo's types: %w", err)
		}
	}
	return nil
}

// tenantNamespace is the namespace for a peer. Liqo's approver of serving
// certificates accepts no other name.
func tenantNamespace(peer string) string { return "liqo-tenant-" + peer }

// sliceName is the one ResourceSlice of a provider, and the name of the VirtualNode
// and the Node.
func sliceName(provider string) string { return broker.VirtualNodeName(provider) }

func controlPlaneIdentity(provider string) string { return "controlplane-" + provider }

func sliceIdentity(provider string) string { return "resourceslice-" + sliceName(provider) }

// managedLabels are the labels of an object that Spillway makes for a peer.
func managedLabels(peer string, more ...map[string]string) map[string]string {
	labels := map[string]string{consts.RemoteClusterID: peer, broker.LabelManagedBy: broker.ManagedBySpillway}
	for _, m := range more {
		maps.Copy(labels, m)
	}
	return labels
}
