package reservation

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/types"
	clientgoevents "k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/events"
	"github.com/spillway-dev/spillway/broker/internal/answers"
	"github.com/spillway-dev/spillway/broker/internal/lease"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
	"github.com/spillway-dev/spillway/broker/internal/queue"
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
	// Workers is the number of concurrent reconciles of each controller. Default 128:
	// a reconcile waits for the API server most of its time, and those that wait for
	// the same ledger share its write.
	Workers int
	// Specs are shared with the cache whose events are reported. Defaults to own ones.
	Specs *Specs
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

	store     *store
	committer *committer

	// book, answers and queue are what this process remembers; see recall and note.
	book    *lease.Book
	answers *answers.Memory
	queue   *queue.Queue
	// conflicts count how often a write of an object failed in a row.
	conflicts workqueue.TypedRateLimiter[string]
	// figures limits the writes of statuses that differ in figures only.
	figures *rate.Limiter
	// reports are what counts of what clusters report about holds.
	reports  *reports
	takeover takeover

	mu sync.Mutex
	// priceChanges are the prices that events have reported, by the name of the
	// Reservation and the cluster.
	priceChanges map[string]map[string]string
	// receivedAt is when each cluster was last heard: an advertisement or a beat.
	receivedAt map[string]time.Time
	// latest is the highest sequence of the advertisements of each cluster that were
	// received, including those that were not written.
	latest map[string]int64
	// impossible are the Reservations to try again when the clusters change, lastImpossible
	// the last one that was.
	impossible     map[string]bool
	lastImpossible string
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

// NewWithClients returns a Reconciler without a manager. In place of the controllers of
// SetupWithManager, its caller reports every event of the watches to AdvertisementChanged
// and ReservationChanged, and calls Reconcile and ReconcileAdvertisement.
func NewWithClients(clients Clients, options Options) *Reconciler {
	if options.Clock == nil {
		options.Clock = clock.RealClock{}
	}
	known := newStore(options.Clock)
	key := func(name string) client.ObjectKey { return client.ObjectKey{Namespace: options.Namespace, Name: name} }
	if options.Workers == 0 {
		options.Workers = 128
	}
	if options.Specs == nil {
		options.Specs = &Specs{}
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
		store:       known,
		committer:   newCommitter(clients, known, options.Specs, key, options.Clock),
		book:        lease.NewBook(),
		answers:     answers.New(),
		queue:       queue.New(),
		conflicts:   workqueue.NewTypedItemExponentialFailureRateLimiter[string](conflictRetryAfter, maxConflictRetryAfter),
		figures:     rate.NewLimiter(rate.Every(figuresEvery), figuresBurst),
		reports:     newReports(options.Clock),

		priceChanges: map[string]map[string]string{},
		receivedAt:   map[string]time.Time{},
		latest:       map[string]int64{},
		impossible:   map[string]bool{},
	}
}

// SetupWithManager adds the controllers for Reservations, ClusterAdvertisements and
// ClusterRegistrations.
func (r *Reconciler) SetupWithManager(mgr manager.Manager) error {
	audit := mgr.GetLogger().WithName("audit")
	inNamespace := predicate.NewPredicateFuncs(func(o client.Object) bool { return o.GetNamespace() == r.namespace })
	options := controller.Options{MaxConcurrentReconciles: r.workers}
	enqueueUnplaced := handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []reconcile.Request {
		return r.requests(slices.Concat(r.reports.take(), r.retriable(nil)))
	})
	err := ctrl.NewControllerManagedBy(mgr).
		Named("reservations").
		Watches(&broker.Reservation{}, onEvents(func(_ context.Context, before, after *broker.Reservation, enqueue func(...string)) {
			r.ReservationChanged(before, after)
			if after != nil {
				enqueue(after.Name)
			}
		})).
		Watches(&broker.ClusterAdvertisement{}, onEvents(func(_ context.Context, before, after *broker.ClusterAdvertisement, enqueue func(...string)) {
			r.auditHolds(audit, before, after)
			enqueue(r.AdvertisementChanged(before, after)...)
		})).
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
		Watches(&broker.ClusterAdvertisement{}, onEvents(func(_ context.Context, before, after *broker.ClusterAdvertisement, enqueue func(...string)) {
			// The events of another controller may come later.
			r.noteAdvertisement(before, after)
			if after != nil {
				enqueue(after.Name)
			}
		})).
		Watches(&broker.Reservation{}, onEvents(func(_ context.Context, before, after *broker.Reservation, enqueue func(...string)) {
			enqueue(r.ReservationChanged(before, after)...)
		})).
		Watches(&broker.BrokerConfig{}, handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []reconcile.Request {
			var names []string
			for _, ad := range r.store.allAdvertisements() {
				names = append(names, ad.Name)
			}
			return r.requests(names)
		})).
		WithEventFilter(inNamespace).
		WithOptions(options).
		Complete(byName(r.ReconcileAdvertisement))
	if err != nil {
		return fmt.Errorf("adding the advertisement controller: %w", err)
	}
	err = ctrl.NewControllerManagedBy(mgr).
		Named("registrations").
		For(&broker.ClusterRegistration{}).
		// An object may be created after the registration of its cluster is gone.
		Watches(&broker.ClusterAdvertisement{}, onEvents(func(_ context.Context, before, after *broker.ClusterAdvertisement, enqueue func(...string)) {
			if before == nil && isOfCluster(after) {
				enqueue(after.Name)
			}
		})).
		Watches(&broker.Reservation{}, onEvents(func(_ context.Context, before, after *broker.Reservation, enqueue func(...string)) {
			if before == nil && createdForCluster(after) {
				enqueue(after.Spec.RequesterID)
			}
		})).
		WithEventFilter(inNamespace).
		Complete(byName(r.ReconcileRegistration))
	if err != nil {
		return fmt.Errorf("adding the registration controller: %w", err)
	}
	return nil
}

// byName adapts a function that reconciles the object of one name.
func byName(f func(ctx context.Context, name string) (ctrl.Result, error)) reconcile.Func {
	return func(ctx context.Context, request ctrl.Request) (ctrl.Result, error) { return f(ctx, request.Name) }
}

// requests are those for the objects of these names.
func (r *Reconciler) requests(names []string) []reconcile.Request {
	requests := make([]reconcile.Request, len(names))
	for i, name := range names {
		requests[i].NamespacedName = types.NamespacedName{Namespace: r.namespace, Name: name}
	}
	return requests
}

// onEvents calls a function with the versions before and after each event, nil for none.
func onEvents[T client.Object](changed func(ctx context.Context, before, after T, enqueue func(names ...string))) handler.EventHandler {
	type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]
	handle := func(ctx context.Context, before, after T, namespace string, q queue) {
		changed(ctx, before, after, func(names ...string) {
			for _, name := range names {
				q.Add(reconcile.Request{NamespacedName: types.NamespacedName{Namespace: namespace, Name: name}})
			}
		})
	}
	var none T
	return handler.Funcs{
		CreateFunc: func(ctx context.Context, e event.CreateEvent, q queue) {
			handle(ctx, none, e.Object.(T), e.Object.GetNamespace(), q)
		},
		UpdateFunc: func(ctx context.Context, e event.UpdateEvent, q queue) {
			handle(ctx, e.ObjectOld.(T), e.ObjectNew.(T), e.ObjectNew.GetNamespace(), q)
		},
		DeleteFunc: func(ctx context.Context, e event.DeleteEvent, q queue) {
			handle(ctx, e.Object.(T), none, e.Object.GetNamespace(), q)
		},
	}
}

// AdvertisementChanged takes note of an event of the watch: the versions before and
// after it, nil for none. It returns the Reservations to reconcile: those whose holds
// changed, and those that what clusters report about holds concerns, if that counts now
// (reports). If capacity may have appeared, the first of the queue that could use it are
// among them. The objects are not changed any more.
func (r *Reconciler) AdvertisementChanged(before, after *broker.ClusterAdvertisement) (reservations []string) {
	var old, now broker.ClusterAdvertisementStatus
	if before != nil {
		old = before.Status
	}
	if after != nil {
		now = after.Status
	}
	r.noteAdvertisement(before, after)
	changed := append(changedHolds(old.Holds, now.Holds, old.Active != now.Active), r.reports.take()...)
	readvertised := before == nil || after == nil || before.Generation != after.Generation
	if readvertised || old.Active != now.Active || grew(old.Available, now.Available) {
		changed = append(changed, r.retriable(after)...)
	}
	if readvertised {
		// They are tried again after a while in any case.
		changed = append(changed, r.reports.allow(cmp.Or(after, before).Name, r.impossibleNames)...)
	}
	return changed
}

// noteAdvertisement takes note of an event of the watch, of which another controller reconciles
// the Reservations.
func (r *Reconciler) noteAdvertisement(before, after *broker.ClusterAdvertisement) {
	if after != nil {
		r.store.putAdvertisement(after)
	} else {
		r.store.removeAdvertisement(before)
		r.committer.specs.forget(before)
		r.forgetCluster(before.Name)
	}
	r.followReports(cmp.Or(after, before).Name)
}

// changedHolds are the names of the Reservations whose holds differ between before and
// after; of all if all is set: those of an inactive cluster do not count.
func changedHolds(before, after []broker.Hold, all bool) []string {
	var names []string
	for _, c := range holdChanges(before, after) {
		names = append(names, cmp.Or(c.now, c.was).ReservationName)
	}
	if all {
		for i := range after {
			names = append(names, after[i].ReservationName)
		}
	}
	return names
}

// holdChange is a hold before and after a change, nil for none.
type holdChange struct{ was, now *broker.Hold }

// holdChanges are the holds that differ.
func holdChanges(before, after []broker.Hold) (changes []holdChange) {
	old := make(map[types.UID]*broker.Hold, len(before))
	for i := range before {
		old[before[i].ReservationUID] = &before[i]
	}
	for i := range after {
		was := old[after[i].ReservationUID]
		delete(old, after[i].ReservationUID)
		if was == nil || !ledger.SameVersion(was, &after[i]) {
			changes = append(changes, holdChange{was, &after[i]})
		}
	}
	for i := range before {
		if old[before[i].ReservationUID] != nil {
			changes = append(changes, holdChange{was: &before[i]})
		}
	}
	return changes
}

func sameHold(a, b *broker.Hold) bool {
	return ledger.SameVersion(a, b) && apiequality.Semantic.DeepEqual(a, b)
}

// grew reports whether there is more of any resource.
func grew(before, after broker.ResourceQuantities) bool {
	had := before.List()
	for name, amount := range after.List() {
		if have := had[name]; amount.Cmp(have) > 0 {
			return true
		}
	}
	return false
}

// ReservationChanged takes note of an event of the watch: the versions before and after
// it, nil for none. It returns the advertisements to reconcile: those that hold capacity
// for a deleted Reservation. The Reservation itself is to be reconciled, too. The objects
// are not changed any more.
func (r *Reconciler) ReservationChanged(before, after *broker.Reservation) (advertisements []string) {
	if after != nil {
		r.store.putReservation(after)
		return nil
	}
	r.store.removeReservation(before)
	r.forget(before.Name)
	return r.store.holdersOf(before.Name)
}
