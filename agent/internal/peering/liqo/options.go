package liqo

import (
	"fmt"
	"maps"
	"sync"

	authv1beta1 "github.com/liqotech/liqo/apis/authentication/v1beta1"
	liqov1beta1 "github.com/liqotech/liqo/apis/core/v1beta1"
	offloadingv1beta1 "github.com/liqotech/liqo/apis/offloading/v1beta1"
	"github.com/liqotech/liqo/pkg/consts"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// AnnotationSession on a tenant namespace is the session of the peering in
// which this cluster is the consumer, AnnotationProviderSession of the one in
// which it is the provider. The two directions share the namespace.
const (
	AnnotationSession         = broker.Group + "/liqo-session"
	AnnotationProviderSession = broker.Group + "/liqo-provider-session"
)

// Options of both sides. Liqo must be installed with the same cluster ID. The Client's scheme
// comes from AddToScheme.
type Options struct {
	session.Options

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
	// Webhook is whether the manager's webhook server serves the webhook of this side.
	Webhook bool

	// prepared is when a tenant namespace last got its objects, by UID.
	prepared *sync.Map
}

// Installed returns an error that says what to do in a cluster without Liqo's types.
func Installed(mapper meta.RESTMapper) error {
	for _, kind := range []schema.GroupKind{
		liqov1beta1.GroupVersion.WithKind("ForeignCluster").GroupKind(), authv1beta1.GroupVersion.WithKind("Tenant").GroupKind(), offloadingv1beta1.SchemeGroupVersion.WithKind("VirtualNode").GroupKind(),
	} {
		if _, err := mapper.RESTMapping(kind); meta.IsNoMatchError(err) {
			return fmt.Errorf("driver liqo needs Liqo 1.2 in this cluster, which has no %s: install Liqo first, or set --driver=direct (value driver of the chart), which needs no other software", kind)
		} else if err != nil {
			return fmt.Errorf("looking for Liqo's types: %w", err)
		}
	}
	return nil
}

// Complete checks the options and sets defaults.
func (o *Options) Complete() error {
	if err := o.Options.Complete(); err != nil {
		return fmt.Errorf("liqo: %w", err)
	}
	o.prepared = &sync.Map{}
	return nil
}

// AddToScheme adds every type that either side reads or writes.
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

// TenantNamespace is the namespace for a peer. Liqo's approver of serving
// certificates accepts no other name.
func TenantNamespace(peer string) string { return "liqo-tenant-" + peer }

// SliceName is the one ResourceSlice of a provider, and the name of the VirtualNode
// and the Node.
func SliceName(provider string) string { return broker.VirtualNodeName(provider) }

// ManagedLabels are the labels of an object that Spillway makes for a peer.
func ManagedLabels(peer string, more ...map[string]string) map[string]string {
	labels := map[string]string{consts.RemoteClusterID: peer, broker.LabelManagedBy: broker.ManagedBySpillway}
	for _, m := range more {
		maps.Copy(labels, m)
	}
	return labels
}
