package liqo

import (
	"fmt"
	"maps"
	"regexp"
	"sync"
	"time"

	"github.com/go-logr/logr"
	authv1beta1 "github.com/liqotech/liqo/apis/authentication/v1beta1"
	liqov1beta1 "github.com/liqotech/liqo/apis/core/v1beta1"
	offloadingv1beta1 "github.com/liqotech/liqo/apis/offloading/v1beta1"
	"github.com/liqotech/liqo/pkg/consts"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

const (
	// driverName is what a peer with another driver is told.
	driverName = "liqo"

	// annotationSession on a tenant namespace is the session of the peering in
	// which this cluster consumes, annotationLentSession of the one in which it
	// lends. The two directions share the namespace.
	annotationSession     = broker.Group + "/liqo-session"
	annotationLentSession = broker.Group + "/liqo-lent-session"

	// replicatorFinalizer is held by Liqo's crd-replicator on what it copies to
	// the provider, replicatorSecretFinalizer on the kubeconfig it does so with.
	replicatorFinalizer       = "crdreplicator.liqo.io/resource"
	replicatorSecretFinalizer = "crdreplicator.liqo.io/operator"

	// labelWebhookSkip on an object keeps Liqo's webhooks from changing it.
	labelWebhookSkip = "liqo.io/webhook-skip"
	// labelOrigin on a ShadowPod is the consumer it came from.
	labelOrigin = "offloading.liqo.io/origin"

	// maxClusterID keeps the names made of it valid labels and common names.
	maxClusterID = 40
	// kubeletPort is where Liqo's virtual kubelet serves logs and exec, to
	// whoever reaches it.
	kubeletPort = 10250
)

var clusterIDPattern = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`)

// Options of a Driver and of a Provider. Client and ClusterID are required, and
// for a Driver the Messenger.
type Options struct {
	// Client reads and writes at the API server itself, not through a cache: a
	// step is done when it is so, and Secrets of all namespaces are no business
	// of this program's memory. Its scheme comes from AddToScheme.
	Client client.Client
	// ClusterID of this cluster; Liqo here must be installed with the same one.
	ClusterID string
	// Messenger carries requests to providers.
	Messenger peering.Messenger
	// LiqoNamespace is where Liqo is installed; "liqo" if empty.
	LiqoNamespace string
	// PodCIDRs of this cluster. Where given, a NetworkPolicy keeps pods away from
	// the virtual kubelets, which ask nobody who they are.
	PodCIDRs []string
	// TenantRole names a ClusterRole that is bound to ServiceAccount in each
	// tenant namespace, so that nobody need grant this program the Secrets of all
	// namespaces. Empty: its permissions come from elsewhere.
	TenantRole     string
	ServiceAccount types.NamespacedName
	// Enqueue is told that something of the link to or from a cluster has changed,
	// and that the next call may get further. It must not block.
	Enqueue func(clusterID string)
	Clock   clock.PassiveClock
	Log     logr.Logger

	// ResendAfter is how long an answer is waited for; 3s if zero.
	ResendAfter time.Duration
	// StuckAfter is how long an object's deletion may wait for crd-replicator
	// before its finalizer is taken away; 1m if zero.
	StuckAfter time.Duration
	// UnreachableAfter is how long a teardown waits for a provider that does not
	// answer before it goes on without it; 3m if zero.
	UnreachableAfter time.Duration

	// furnished tenant namespaces, by UID.
	furnished *sync.Map
}

func (o *Options) complete() error {
	if o.Client == nil {
		return fmt.Errorf("liqo: a client is needed")
	}
	if err := validateClusterID(o.ClusterID); err != nil {
		return fmt.Errorf("liqo: this cluster: %w", err)
	}
	if o.LiqoNamespace == "" {
		o.LiqoNamespace = "liqo"
	}
	if o.Enqueue == nil {
		o.Enqueue = func(string) {}
	}
	o.furnished = &sync.Map{}
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	for value, standard := range map[*time.Duration]time.Duration{
		&o.ResendAfter: 3 * time.Second, &o.StuckAfter: time.Minute, &o.UnreachableAfter: 3 * time.Minute,
	} {
		if *value == 0 {
			*value = standard
		}
	}
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

// validateClusterID keeps a cluster's name from becoming something else: it
// ends in names of objects, and as a user's and a group's name at the provider.
func validateClusterID(id string) error {
	if len(id) > maxClusterID || !clusterIDPattern.MatchString(id) {
		return fmt.Errorf("cluster ID %q is not a lower-case DNS label of at most %d characters", id, maxClusterID)
	}
	return nil
}

// tenantNamespace is the namespace for all that concerns a peer. Liqo's approver
// of serving certificates accepts no other name.
func tenantNamespace(peer string) string { return "liqo-tenant-" + peer }

// sliceName is the one ResourceSlice of a provider, and with it the name of the
// VirtualNode and the Node.
func sliceName(provider string) string { return broker.VirtualNodeName(provider) }

func controlPlaneIdentity(provider string) string { return "controlplane-" + provider }

func sliceIdentity(provider string) string { return "resourceslice-" + sliceName(provider) }

// ours are the labels of an object that concerns a peer and that we made.
func ours(peer string, more ...map[string]string) map[string]string {
	labels := map[string]string{consts.RemoteClusterID: peer, broker.LabelManagedBy: broker.ManagedBySpillway}
	for _, m := range more {
		maps.Copy(labels, m)
	}
	return labels
}

func isOurs(object metav1.Object) bool {
	return object.GetLabels()[broker.LabelManagedBy] == broker.ManagedBySpillway
}
