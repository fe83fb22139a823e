package reservation

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	clientgoevents "k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/events"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
)

// Freshness reports when this broker process last received a cluster's advertisement,
// by the clock of Options. A restarted broker has received none.
type Freshness interface {
	ReceivedAt(cluster string) (at time.Time, received bool)
}

// Options of a Reconciler.
type Options struct {
	// Namespace of the broker's objects.
	Namespace string
	// Freshness of advertisements.
	Freshness Freshness
	// Clock defaults to the real one.
	Clock clock.WithTicker
	// Workers is the number of concurrent reconciles of each controller. Default 4.
	Workers int
}

// Reconciler places Reservations and keeps the ledger. Its methods are safe for
// concurrent use on every replica; only the controllers of SetupWithManager need
// leader election.
type Reconciler struct {
	client    client.Client
	live      client.Reader
	recorder  clientgoevents.EventRecorder
	namespace string
	freshness Freshness
	clock     clock.WithTicker
	workers   int
	// startedAt is the time of its first call: when this process became the leader. A
	// standby receives no advertisements.
	startedAt func() time.Time

	// becameFresh has an event for each advertisement that became fresh without a
	// change that a watch would see.
	becameFresh chan event.GenericEvent

	mu sync.Mutex
	// storedAt is when the advertisement of each cluster was last stored.
	storedAt map[string]time.Time
	// versions is what was stored then.
	versions map[string]version
}

// Clients are what a Reconciler reads and writes with.
type Clients struct {
	// Client writes to the API server. Its reads may lag behind.
	Client client.Client
	// Live reads from the API server.
	Live client.Reader
	// Recorder of events.
	Recorder clientgoevents.EventRecorder
}

// New returns a Reconciler that uses the manager's clients. Their cache must include
// the broker's namespace.
func New(mgr manager.Manager, options Options) *Reconciler {
	return NewWithClients(Clients{
		Client:   mgr.GetClient(),
		Live:     mgr.GetAPIReader(),
		Recorder: events.NewRecorder(mgr.GetEventRecorder("spillway-broker")),
	}, options)
}

// NewWithClients returns a Reconciler without a manager: its caller calls Reconcile and
// ReconcileAdvertisement when the controllers of SetupWithManager would.
func NewWithClients(clients Clients, options Options) *Reconciler {
	if options.Clock == nil {
		options.Clock = clock.RealClock{}
	}
	if options.Workers == 0 {
		options.Workers = 4
	}
	return &Reconciler{
		client:      clients.Client,
		live:        clients.Live,
		recorder:    clients.Recorder,
		namespace:   options.Namespace,
		freshness:   options.Freshness,
		clock:       options.Clock,
		workers:     options.Workers,
		startedAt:   sync.OnceValue(options.Clock.Now),
		becameFresh: make(chan event.GenericEvent, 1),
		storedAt:    map[string]time.Time{},
		versions:    map[string]version{},
	}
}

// SetupWithManager adds the controllers for Reservations and ClusterAdvertisements.
func (r *Reconciler) SetupWithManager(mgr manager.Manager) error {
	inNamespace := predicate.NewPredicateFuncs(func(o client.Object) bool { return o.GetNamespace() == r.namespace })
	options := controller.Options{MaxConcurrentReconciles: r.workers}
	enqueueUnplaced := handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, _ client.Object) []reconcile.Request {
		return r.unplaced(ctx)
	})
	err := ctrl.NewControllerManagedBy(mgr).
		Named("reservations").
		For(&broker.Reservation{}).
		Watches(&broker.ClusterAdvertisement{}, r.enqueueByAdvertisement()).
		Watches(&broker.BrokerConfig{}, enqueueUnplaced).
		WatchesRawSource(source.Channel(r.becameFresh, enqueueUnplaced)).
		WithEventFilter(inNamespace).
		WithOptions(options).
		Complete(byName(r.Reconcile))
	if err != nil {
		return fmt.Errorf("adding the reservation controller: %w", err)
	}
	err = ctrl.NewControllerManagedBy(mgr).
		Named("advertisements").
		For(&broker.ClusterAdvertisement{}).
		Watches(&broker.Reservation{}, handler.Funcs{DeleteFunc: r.enqueueHolders}).
		Watches(&broker.BrokerConfig{}, handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, _ client.Object) []reconcile.Request {
			return r.matchingAdvertisements(ctx, func(*broker.ClusterAdvertisement) bool { return true })
		})).
		WithEventFilter(inNamespace).
		WithOptions(options).
		Complete(byName(r.ReconcileAdvertisement))
	if err != nil {
		return fmt.Errorf("adding the advertisement controller: %w", err)
	}
	return nil
}

// byName adapts a function that reconciles the object of one name.
func byName(f func(ctx context.Context, name string) (ctrl.Result, error)) reconcile.Func {
	return func(ctx context.Context, request ctrl.Request) (ctrl.Result, error) { return f(ctx, request.Name) }
}

// enqueueByAdvertisement enqueues the Reservations whose holds changed and, since
// capacity may have appeared, those that are not placed in full.
func (r *Reconciler) enqueueByAdvertisement() handler.EventHandler {
	type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]
	enqueue := func(ctx context.Context, q queue, holds []broker.Hold) {
		for _, hold := range holds {
			q.Add(reconcile.Request{NamespacedName: types.NamespacedName{Namespace: r.namespace, Name: hold.ReservationName}})
		}
		for _, request := range r.unplaced(ctx) {
			q.Add(request)
		}
	}
	return handler.Funcs{
		CreateFunc: func(ctx context.Context, e event.CreateEvent, q queue) {
			enqueue(ctx, q, e.Object.(*broker.ClusterAdvertisement).Status.Holds)
		},
		UpdateFunc: func(ctx context.Context, e event.UpdateEvent, q queue) {
			before, after := e.ObjectOld.(*broker.ClusterAdvertisement), e.ObjectNew.(*broker.ClusterAdvertisement)
			changed := changedHolds(before.Status.Holds, after.Status.Holds)
			activityChanged := before.Status.Active != after.Status.Active
			if activityChanged {
				// The holds of an inactive cluster do not count.
				changed = after.Status.Holds
			}
			if len(changed) > 0 || before.Generation != after.Generation || activityChanged {
				enqueue(ctx, q, changed)
			}
		},
		DeleteFunc: func(ctx context.Context, e event.DeleteEvent, q queue) {
			enqueue(ctx, q, e.Object.(*broker.ClusterAdvertisement).Status.Holds)
		},
	}
}

// changedHolds lists the holds that differ between before and after.
func changedHolds(before, after []broker.Hold) []broker.Hold {
	without := func(list, others []broker.Hold) []broker.Hold {
		return slices.DeleteFunc(slices.Clone(list), func(hold broker.Hold) bool {
			return slices.ContainsFunc(others, func(h broker.Hold) bool { return apiequality.Semantic.DeepEqual(h, hold) })
		})
	}
	return append(without(after, before), without(before, after)...)
}

// unplaced lists the Reservations that are not placed in full.
func (r *Reconciler) unplaced(ctx context.Context) []reconcile.Request {
	var list broker.ReservationList
	if err := r.client.List(ctx, &list, client.InNamespace(r.namespace)); err != nil {
		log.FromContext(ctx).Error(err, "Failed to list the Reservations to enqueue")
		return nil
	}
	var requests []reconcile.Request
	for i := range list.Items {
		status := &list.Items[i].Status
		if status.Phase == "" || meta.IsStatusConditionTrue(status.Conditions, broker.ConditionQueued) {
			requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&list.Items[i])})
		}
	}
	return requests
}

// enqueueHolders enqueues the advertisements that hold capacity for a deleted
// Reservation.
func (r *Reconciler) enqueueHolders(ctx context.Context, e event.DeleteEvent, q workqueue.TypedRateLimitingInterface[reconcile.Request]) {
	for _, request := range r.matchingAdvertisements(ctx, func(ad *broker.ClusterAdvertisement) bool {
		return ledger.Find(&ad.Status, e.Object.GetUID()) != nil
	}) {
		q.Add(request)
	}
}

func (r *Reconciler) matchingAdvertisements(ctx context.Context, match func(*broker.ClusterAdvertisement) bool) []reconcile.Request {
	var list broker.ClusterAdvertisementList
	if err := r.client.List(ctx, &list, client.InNamespace(r.namespace)); err != nil {
		log.FromContext(ctx).Error(err, "Failed to list the ClusterAdvertisements to enqueue")
		return nil
	}
	var requests []reconcile.Request
	for i := range list.Items {
		if match(&list.Items[i]) {
			requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&list.Items[i])})
		}
	}
	return requests
}
