package reservation

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"
	clientgoevents "k8s.io/client-go/tools/events"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/advertisement"
	"github.com/spillway-dev/spillway/broker/internal/answers"
	"github.com/spillway-dev/spillway/broker/internal/commit"
	"github.com/spillway-dev/spillway/broker/internal/lease"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
	"github.com/spillway-dev/spillway/broker/internal/queue"
	"github.com/spillway-dev/spillway/broker/internal/store"
	"github.com/spillway-dev/spillway/broker/internal/watch"
)

// figuresEvery is the time between writes of statuses that differ in figures only, of all
// Reservations together, after figuresBurst of them.
const (
	figuresEvery = time.Second
	figuresBurst = 5
)

// Reconciler places Reservations. Its methods are safe for concurrent use on every replica;
// only the controller of SetupWithManager needs leader election.
type Reconciler struct {
	hub       commit.Hub
	store     *store.Store
	committer *commit.Committer
	clusters  *advertisement.Clusters
	recorder  clientgoevents.EventRecorder
	clock     clock.PassiveClock
	// history is nil if none is kept.
	history History

	// book, answers and queue are what this process remembers; see recall and note.
	book      *lease.Book
	answers   *answers.Memory
	queue     *queue.Queue
	conflicts commit.Conflicts
	// placing are the consumers with a quota of whom a Reservation is being placed: two at once
	// could exceed it.
	placing sync.Map
	// figures limits the writes of statuses that differ in figures only.
	figures  *rate.Limiter
	takeover sync.Once

	mu sync.Mutex
	// priceChanges are the prices that events have reported, by the name of the
	// Reservation and the cluster.
	priceChanges map[string]map[string]string
	// impossible are the Reservations to try again when the clusters change.
	impossible map[string]bool
}

// History keeps what has ended.
type History interface {
	// Ended is called for a deleted Reservation of which nothing is held any more, and with when it
	// was first seen deleted. As long as it returns an error, the Reservation stays.
	Ended(ctx context.Context, reservation *broker.Reservation, deleted time.Time) error
}

// Keep sets where what ends is kept, before SetupWithManager.
func (r *Reconciler) Keep(history History) { r.history = history }

// New returns a Reconciler that places at these clusters.
func New(clusters *advertisement.Clusters, recorder clientgoevents.EventRecorder) *Reconciler {
	return &Reconciler{
		hub:       clusters.Committer.Hub,
		store:     clusters.Committer.Store,
		committer: clusters.Committer,
		clusters:  clusters,
		recorder:  recorder,
		clock:     clusters.Clock,
		book:      lease.NewBook(),
		answers:   answers.New(),
		queue:     queue.New(),
		conflicts: commit.NewConflicts(),
		figures:   rate.NewLimiter(rate.Every(figuresEvery), figuresBurst),

		priceChanges: map[string]map[string]string{},
		impossible:   map[string]bool{},
	}
}

// SetupWithManager adds the controller for Reservations.
func (r *Reconciler) SetupWithManager(mgr manager.Manager) error {
	audit := mgr.GetLogger().WithName("audit")
	unplaced := func() []string { return slices.Concat(r.clusters.Reports.Take(), r.retriable(nil)) }
	err := ctrl.NewControllerManagedBy(mgr).
		Named("reservations").
		Watches(&broker.Reservation{}, watch.Events(r.store, func(before, after *broker.Reservation, enqueue func(...string)) {
			if after != nil {
				enqueue(after.Name)
			} else {
				r.forget(before.Name)
			}
		})).
		Watches(&broker.ClusterAdvertisement{}, watch.Events(r.store, func(before, after *broker.ClusterAdvertisement, enqueue func(...string)) {
			commit.Audit(audit, r.store, before, after)
			enqueue(r.advertisementChanged(before, after)...)
		})).
		Watches(&broker.BrokerConfig{}, watch.Events(r.store, func(before, after *broker.BrokerConfig, enqueue func(...string)) {
			if before == nil || after == nil || before.Generation != after.Generation {
				// It may change when leases end and answers are due, too.
				enqueue(r.store.ReservationNames()...)
			}
		})).
		WatchesRawSource(source.Channel(r.clusters.Retry.C, handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []reconcile.Request {
			return watch.Requests(r.hub.Namespace, unplaced())
		}))).
		WithEventFilter(watch.Namespace(r.hub.Namespace)).
		WithOptions(controller.Options{MaxConcurrentReconciles: r.clusters.Workers}).
		Complete(watch.ByName(r.reconcile))
	if err != nil {
		return fmt.Errorf("adding the reservation controller: %w", err)
	}
	return nil
}

// advertisementChanged takes note of an event of the watch that the store has: the versions before and
// after it, nil for none. It returns the Reservations to reconcile: those whose holds
// changed, and those that what clusters report about holds concerns, if that counts now
// (advertisement.Reports). If capacity may have appeared, the first of the queue that could
// use it are among them.
func (r *Reconciler) advertisementChanged(before, after *broker.ClusterAdvertisement) (reservations []string) {
	var old, now broker.ClusterAdvertisementStatus
	if before != nil {
		old = before.Status
	}
	if after != nil {
		now = after.Status
	}
	r.clusters.Note(before, after)
	if after == nil {
		r.answers.Forget(before.Name)
		r.forgetSeries(before.Name)
	}
	changed := append(changedHolds(old.Holds, now.Holds, old.Active != now.Active), r.clusters.Reports.Take()...)
	readvertised := before == nil || after == nil || before.Generation != after.Generation
	if readvertised || old.Active != now.Active || capacity.Grew(old.Available, now.Available) {
		changed = append(changed, r.retriable(after)...)
	}
	if readvertised {
		// They are tried again after a while in any case.
		changed = append(changed, r.clusters.Reports.Allow(cmp.Or(after, before).Name, r.impossibleNames)...)
	}
	return changed
}

// changedHolds are the names of the Reservations whose holds differ between before and
// after; of all if all is set: those of an inactive cluster do not count.
func changedHolds(before, after []broker.Hold, all bool) []string {
	var names []string
	for _, c := range ledger.Changes(before, after) {
		names = append(names, cmp.Or(c.Now, c.Was).ReservationName)
	}
	if all {
		for i := range after {
			names = append(names, after[i].ReservationName)
		}
	}
	return names
}
