package advertisement

import (
	"cmp"
	"context"
	"fmt"
	"sync"
	"time"

	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/commit"
	"github.com/spillway-dev/spillway/broker/internal/settings"
	"github.com/spillway-dev/spillway/broker/internal/watch"
)

// Freshness reports when this broker process last received a cluster's advertisement,
// by the clock of Options. A restarted broker has received none.
type Freshness interface {
	ReceivedAt(cluster string) (at time.Time, received bool)
}

// Options of Clusters. All fields are required.
type Options struct {
	Committer *commit.Committer
	// Freshness of advertisements.
	Freshness Freshness
	Clock     clock.WithTicker
	// Workers is the number of concurrent reconciles.
	Workers int
}

// Clusters keeps the ClusterAdvertisements, and knows which clusters are active. Its methods
// are safe for concurrent use on every replica; only the controllers of SetupWithManager need
// leader election.
type Clusters struct {
	Options
	// Reports are what counts of what clusters report about holds.
	Reports *Reports
	// Retry has an event when Reservations that wait may be placed, although no watch sees a
	// change.
	Retry watch.Signal

	hub       commit.Hub
	store     *commit.Store
	conflicts commit.Conflicts
	// startedAt is the time of its first call: when this process became the leader. A
	// standby receives no advertisements.
	startedAt func() time.Time

	mu sync.Mutex
	// receivedAt is when each cluster was last heard: an advertisement or a beat.
	receivedAt map[string]time.Time
	// latest is the highest sequence of the advertisements of each cluster that were
	// received, including those that were not written.
	latest map[string]int64
}

// New returns Clusters of which none has been heard.
func New(options Options) *Clusters {
	return &Clusters{
		Options:    options,
		Reports:    newReports(options.Clock),
		Retry:      watch.NewSignal(options.Committer.Hub.Namespace),
		hub:        options.Committer.Hub,
		store:      options.Committer.Store,
		conflicts:  commit.NewConflicts(),
		startedAt:  sync.OnceValue(options.Clock.Now),
		receivedAt: map[string]time.Time{},
		latest:     map[string]int64{},
	}
}

// SetupWithManager adds the controllers for ClusterAdvertisements and ClusterRegistrations.
func (c *Clusters) SetupWithManager(mgr manager.Manager) error {
	inNamespace := watch.Namespace(c.hub.Namespace)
	err := ctrl.NewControllerManagedBy(mgr).
		Named("advertisements").
		Watches(&broker.ClusterAdvertisement{}, watch.Events(func(before, after *broker.ClusterAdvertisement, enqueue func(...string)) {
			// The events of another controller may come later.
			c.Note(before, after)
			if after != nil {
				enqueue(after.Name)
			}
		})).
		Watches(&broker.Reservation{}, watch.Events(func(before, after *broker.Reservation, enqueue func(...string)) {
			c.store.NoteReservation(before, after)
			if after == nil {
				enqueue(c.store.HoldersOf(before.Name)...)
			}
		})).
		Watches(&broker.BrokerConfig{}, handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []reconcile.Request {
			var names []string
			for _, ad := range c.store.Advertisements() {
				names = append(names, ad.Name)
			}
			return watch.Requests(c.hub.Namespace, names)
		})).
		WithEventFilter(inNamespace).
		WithOptions(controller.Options{MaxConcurrentReconciles: c.Workers}).
		Complete(watch.ByName(c.ReconcileAdvertisement))
	if err != nil {
		return fmt.Errorf("adding the advertisement controller: %w", err)
	}
	err = ctrl.NewControllerManagedBy(mgr).
		Named("registrations").
		For(&broker.ClusterRegistration{}).
		// An object may be created after the registration of its cluster is gone.
		Watches(&broker.ClusterAdvertisement{}, watch.Events(func(before, after *broker.ClusterAdvertisement, enqueue func(...string)) {
			if before == nil && isOfCluster(after) {
				enqueue(after.Name)
			}
		})).
		Watches(&broker.Reservation{}, watch.Events(func(before, after *broker.Reservation, enqueue func(...string)) {
			if before == nil && createdForCluster(after) {
				enqueue(after.Spec.RequesterID)
			}
		})).
		WithEventFilter(inNamespace).
		Complete(watch.ByName(c.ReconcileRegistration))
	if err != nil {
		return fmt.Errorf("adding the registration controller: %w", err)
	}
	return nil
}

// Note takes note of an event of the watch: the versions before and after it, nil for none. The
// objects are not changed any more.
func (c *Clusters) Note(before, after *broker.ClusterAdvertisement) {
	if after != nil {
		c.store.PutAdvertisement(after)
	} else {
		c.Committer.Store.RemoveAdvertisement(before)
		c.conflicts.Forget("advertisement/" + before.Name)
		c.mu.Lock()
		delete(c.latest, before.Name)
		delete(c.receivedAt, before.Name)
		c.mu.Unlock()
	}
	c.Follow(cmp.Or(after, before).Name)
}

// Activity reports whether a cluster is active, and whether its last advertisement is
// fresh. After a fail-over no cluster is fresh before its next advertisement, but all
// are active until the stale threshold.
func (c *Clusters) Activity(cluster string, config settings.Settings) (active, fresh bool) {
	age := c.Clock.Since(c.LastAdvertised(cluster))
	_, received := c.Freshness.ReceivedAt(cluster)
	return age < config.StaleAfter, received && age <= config.FreshFor
}

// LastAdvertised is when this broker last received the cluster's advertisement, or else
// when it became the leader.
func (c *Clusters) LastAdvertised(cluster string) time.Time {
	if at, received := c.Freshness.ReceivedAt(cluster); received {
		return at
	}
	return c.startedAt()
}
