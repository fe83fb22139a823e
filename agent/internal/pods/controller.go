package pods

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/virtualnode"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	spillwayevents "github.com/spillway-dev/spillway/broker/events"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// Options of a Reconciler. All fields are required.
type Options struct {
	// ReleaseGrace is how long capacity must have been unneeded before its release.
	ReleaseGrace time.Duration
	// StartTimeout is how long a pod may wait on a virtual node that rejects it, or
	// whose provider starts neither it nor, meanwhile, another pod.
	StartTimeout time.Duration
	// ProviderLostAfter is how long a provider must have been unreachable before
	// deleted pods there are force-deleted.
	ProviderLostAfter time.Duration
}

// retryDelay is the delay after a write conflict, and between two checks of a
// release in progress.
const retryDelay = time.Second

// Reconciler is both controllers.
type Reconciler struct {
	Options
	nodes    *virtualnode.Reconciler
	driver   peering.Driver
	client   client.Client
	recorder events.EventRecorder

	mu        sync.Mutex
	surpluses map[types.NamespacedName]*Surplus
	providers map[string]*providerState

	// moving is held while pods move because their capacity was withdrawn, moved is when
	// pods of each Reservation did last.
	moving sync.Mutex
	moved  map[types.UID]time.Time
}

// New returns a Reconciler for the pods on the virtual nodes that nodes keeps. It
// uses their clock.
func New(nodes *virtualnode.Reconciler, driver peering.Driver, options Options) *Reconciler {
	return &Reconciler{
		Options: options, nodes: nodes, driver: driver,
		surpluses: map[types.NamespacedName]*Surplus{}, providers: map[string]*providerState{}, moved: map[types.UID]time.Time{},
	}
}

// SetupWithManager adds both controllers. They use the pods that virtualnode tracks.
func (r *Reconciler) SetupWithManager(mgr ctrl.Manager) error {
	r.client, r.recorder = mgr.GetClient(), spillwayevents.NewRecorder(mgr.GetEventRecorder("spillway-agent"))
	byReservation := ctrl.NewControllerManagedBy(mgr).Named("reservation-pods").
		Watches(&broker.Reservation{}, &handler.EnqueueRequestForObject{}).
		Watches(&broker.ReservationInstruction{}, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
			spec := o.(*broker.ReservationInstruction).Spec
			if spec.FromHub() {
				return nil
			}
			return []reconcile.Request{{NamespacedName: types.NamespacedName{Namespace: spec.SourceNamespace, Name: spec.SourceName}}}
		})).
		WatchesRawSource(r.nodes.Candidates()).
		WatchesRawSource(source.Channel(r.nodes.CapacityChanges(), &handler.EnqueueRequestForObject{})).
		WithOptions(virtualnode.ControllerOptions)
	byProvider := ctrl.NewControllerManagedBy(mgr).Named("provider-pods").
		Watches(&corev1.Node{}, handler.EnqueueRequestsFromMapFunc(virtualnode.ProviderRequests), builder.WithPredicates(virtualnode.NodeChanged)).
		Watches(&broker.ReservationInstruction{}, handler.EnqueueRequestsFromMapFunc(providerOfWithdrawal), builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		WatchesRawSource(r.nodes.EachVersionOnNodes()).
		WithOptions(virtualnode.ControllerOptions)
	err := errors.Join(byReservation.Complete(reconcile.Func(r.reconcileReservation)), byProvider.Complete(reconcile.Func(r.reconcileProvider)))
	if err != nil {
		return fmt.Errorf("setting up the pod controllers: %w", err)
	}
	return nil
}

// providerOfWithdrawal maps an instruction to a request for its provider if that has
// withdrawn a part of the grant.
func providerOfWithdrawal(_ context.Context, o client.Object) []reconcile.Request {
	spec := &o.(*broker.ReservationInstruction).Spec
	if spec.Withdrawal == nil {
		return nil
	}
	return []reconcile.Request{{NamespacedName: types.NamespacedName{Name: spec.TargetClusterID}}}
}

// reconcileReservation admits the pods of one Reservation to virtual nodes, and
// releases capacity that they do not need.
func (r *Reconciler) reconcileReservation(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	reservation := &broker.Reservation{}
	err := r.client.Get(ctx, request.NamespacedName, reservation)
	if client.IgnoreNotFound(err) != nil {
		return reconcile.Result{}, err
	}
	if err != nil || reservation.DeletionTimestamp != nil {
		r.untrack(request.NamespacedName)
		return reconcile.Result{}, nil
	}
	key, ok := demand.KeyOfReservation(reservation)
	if !ok || reservation.Labels[broker.LabelRequester] != "" {
		// It serves no pods, or is the broker's own, in a hub that is also a consumer.
		return reconcile.Result{}, nil
	}
	need, err := r.nodes.Need(ctx, reservation, key)
	if err == nil {
		err = r.admit(ctx, reservation, need)
	}
	var requeueAfter time.Duration
	if err == nil && reservation.Labels[broker.LabelManagedBy] == broker.ManagedBySpillway && len(reservation.Spec.PodSets) > 0 {
		requeueAfter, err = r.release(ctx, reservation, need)
	}
	if apierrors.IsConflict(err) {
		requeueAfter, err = retryDelay, nil
	}
	return reconcile.Result{RequeueAfter: requeueAfter}, err
}
