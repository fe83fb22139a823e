package networks

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

const (
	// ConfigMap in the agent's namespace has the networks at key Key, separated by spaces.
	// Policy spillway-pod-addresses reads it.
	ConfigMap, Key = "spillway-own-networks", "networks"

	// apiServer is the EndpointSlice of the API server, in namespace default.
	apiServer = "kubernetes"
	// interval at which the networks of Services are read again.
	interval = time.Minute
)

// Options of a Reconciler; all but Configured, PodNetworks and Self are required.
type Options struct {
	// Live reads and writes without a cache, Nodes may have one.
	Live  client.Client
	Nodes client.Reader
	// Namespace of the ConfigMap.
	Namespace string
	// Configured are CIDRs that are the cluster's own whatever it shows.
	Configured []string
	// PodNetworks returns the CIDRs of this cluster's pods that another program was configured
	// with. Those count that contain the network of a node's pods: in others, pods of other
	// clusters may have addresses, too. Nil: there is no such program.
	PodNetworks func(context.Context) ([]string, error)
	// Self are the addresses of this agent's pod, to warn if the cluster shows no network with
	// them; none if nil.
	Self []netip.Addr
}

// Reconciler keeps the networks of this cluster.
type Reconciler struct {
	Options
	own atomic.Pointer[[]netip.Prefix]
	// podNetworks is what PodNetworks returned last.
	podNetworks []netip.Prefix
	// warned are the addresses that were in no network when it last looked.
	warned []netip.Addr
}

// New returns a Reconciler that knows no network yet.
func New(o Options) *Reconciler { return &Reconciler{Options: o} }

// Own returns the networks of this cluster, nil while they are unknown.
func (r *Reconciler) Own() []netip.Prefix { return ptr.Deref(r.own.Load(), nil) }

// SetupWithManager reconciles when nodes change. Every replica does, because each may answer
// the webhook that needs the networks.
func (r *Reconciler) SetupWithManager(mgr ctrl.Manager) error {
	all := handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []reconcile.Request {
		return []reconcile.Request{{NamespacedName: types.NamespacedName{Name: ConfigMap}}}
	})
	return ctrl.NewControllerManagedBy(mgr).Named("own-networks").
		Watches(&corev1.Node{}, all, builder.WithPredicates(predicate.Funcs{UpdateFunc: changed})).
		WithOptions(controller.Options{NeedLeaderElection: ptr.To(false)}).
		Complete(r)
}

// changed reports whether the networks of a node have changed.
func changed(e event.UpdateEvent) bool {
	before, ok := e.ObjectOld.(*corev1.Node)
	after, isNode := e.ObjectNew.(*corev1.Node)
	return !ok || !isNode || !slices.Equal(before.Spec.PodCIDRs, after.Spec.PodCIDRs) || !slices.Equal(before.Status.Addresses, after.Status.Addresses)
}

// Reconcile reads the networks and writes them to the ConfigMap.
func (r *Reconciler) Reconcile(ctx context.Context, _ reconcile.Request) (reconcile.Result, error) {
	// An error keeps only these from being up to date.
	var errPods error
	if r.PodNetworks != nil {
		var cidrs []string
		if cidrs, errPods = r.PodNetworks(ctx); errPods == nil {
			r.podNetworks = Parse(cidrs...)
		}
	}
	own, err := r.read(ctx)
	if err != nil {
		return reconcile.Result{}, errors.Join(err, errPods)
	}
	r.own.Store(&own)
	unknown := outside(own, r.Self)
	if len(unknown) > 0 && !slices.Equal(unknown, r.warned) {
		ctrl.LoggerFrom(ctx).Info("The agent's address is in no known network of this cluster: set ownNetworks to the networks of its pods, or providers may report their addresses as those of guests", "addresses", unknown)
	}
	r.warned = unknown
	if err := errors.Join(errPods, r.publish(ctx, strings.Join(Texts(own), " "))); err != nil {
		return reconcile.Result{}, err
	}
	return reconcile.Result{RequeueAfter: interval}, nil
}

// read returns the networks as the cluster shows them.
func (r *Reconciler) read(ctx context.Context) ([]netip.Prefix, error) {
	var nodes corev1.NodeList
	if err := r.Nodes.List(ctx, &nodes); err != nil {
		return nil, fmt.Errorf("listing nodes: %w", err)
	}
	own := slices.Concat(ofNodes(nodes.Items), Parse(r.Configured...), containing(OfPods(nodes.Items), r.podNetworks))
	var services networkingv1.ServiceCIDRList
	if err := r.Live.List(ctx, &services); err != nil {
		return nil, fmt.Errorf("listing ServiceCIDRs: %w", err)
	}
	for i := range services.Items {
		own = append(own, Parse(services.Items[i].Spec.CIDRs...)...)
	}
	// The API server may run on none of the nodes.
	var slice discoveryv1.EndpointSlice
	if err := r.Live.Get(ctx, client.ObjectKey{Namespace: metav1.NamespaceDefault, Name: apiServer}, &slice); client.IgnoreNotFound(err) != nil {
		return nil, fmt.Errorf("reading the addresses of the API server: %w", err)
	}
	for i := range slice.Endpoints {
		own = append(own, Parse(slice.Endpoints[i].Addresses...)...)
	}
	return merge(own), nil
}

// publish writes the networks to the ConfigMap if they have changed.
func (r *Reconciler) publish(ctx context.Context, text string) error {
	stored := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: r.Namespace, Name: ConfigMap}}
	err := r.Live.Get(ctx, client.ObjectKeyFromObject(stored), stored)
	switch {
	case apierrors.IsNotFound(err):
		stored.Data = map[string]string{Key: text}
		err = r.Live.Create(ctx, stored)
	case err == nil && stored.Data[Key] != text:
		before := stored.DeepCopy()
		if stored.Data == nil {
			stored.Data = map[string]string{}
		}
		stored.Data[Key] = text
		err = r.Live.Patch(ctx, stored, client.MergeFrom(before))
	}
	if err != nil {
		return fmt.Errorf("writing this cluster's networks to ConfigMap %s/%s: %w", r.Namespace, ConfigMap, err)
	}
	return nil
}
