package advertisement

import (
	"cmp"
	"fmt"
	"sync"
	"time"

	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/commit"
	"github.com/spillway-dev/spillway/broker/internal/settings"
	"github.com/spillway-dev/spillway/broker/internal/store"
	"github.com/spillway-dev/spillway/broker/internal/watch"
)

// Options of Clusters. All fields are required.
type Options struct {
	Committer *commit.Committer
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
	store     *store.Store
	conflicts commit.Conflicts
	// startedAt is the time of its first call: when this process became the leader. A
	// standby receives no advertisements.
	startedAt func() time.Time
}

// New returns Clusters of which none has been heard.
func New(options Options) *Clusters {
	return &Clusters{
		Options:   options,
		Reports:   newReports(options.Clock),
		Retry:     watch.NewSignal(options.Committer.Hub.Namespace),
		hub:       options.Committer.Hub,
		store:     options.Committer.Store,
		conflicts: commit.NewConflicts(),
		startedAt: sync.OnceValue(options.Clock.Now),
	}
}

// SetupWithManager adds the controllers for ClusterAdvertisements and ClusterRegistrations.
func (c *Clusters) SetupWithManager(mgr manager.Manager) error {
	inNamespace := watch.Namespace(c.hub.Namespace)
	err := ctrl.NewControllerManagedBy(mgr).
		Named("advertisements").
		Watches(&broker.ClusterAdvertisement{}, watch.Events(c.store, func(before, after *broker.ClusterAdvertisement, enqueue func(...string)) {
			c.Note(before, after)
			if after != nil {
				enqueue(after.Name)
			}
		})).
		Watches(&broker.Reservation{}, watch.Events(c.store, func(before, after *broker.Reservation, enqueue func(...string)) {
			if after == nil {
				enqueue(c.store.HoldersOf(before.Name)...)
			}
		})).
		Watches(&broker.BrokerConfig{}, watch.Events(c.store, func(_, _ *broker.BrokerConfig, enqueue func(...string)) {
			for _, ad := range c.store.Advertisements() {
				enqueue(ad.Name)
			}
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
		Watches(&broker.ClusterAdvertisement{}, watch.Events(c.store, func(before, after *broker.ClusterAdvertisement, enqueue func(...string)) {
			if before == nil && isOfCluster(after) {
				enqueue(after.Name)
			}
		})).
		Watches(&broker.Reservation{}, watch.Events(c.store, func(before, after *broker.Reservation, enqueue func(...string)) {
			if before == nil && createdForCluster(after) {
				enqueue(after.Spec.RequesterID)
			}
		})).
		WithEventFilter(inNamespace).
		Complete(watch.ByName(c.reconcileRegistration))
	if err != nil {
		return fmt.Errorf("adding the registration controller: %w", err)
	}
	return nil
}

// Note takes note of an event of the watch that the store has: the versions before and after it,
// nil for none.
func (c *Clusters) Note(before, after *broker.ClusterAdvertisement) {
	if after == nil {
		c.conflicts.Forget("advertisement/" + before.Name)
	}
	c.Follow(cmp.Or(after, before).Name)
}

// Activity reports whether a cluster is active, and whether its last advertisement is
// fresh. After a fail-over no cluster is fresh before its next advertisement, but all
// are active until the stale threshold.
func (c *Clusters) Activity(cluster string, config settings.Settings) (active, fresh bool) {
	at := c.store.Receipt(cluster).At
	received := !at.IsZero()
	if !received {
		at = c.startedAt()
	}
	age := c.Clock.Since(at)
	return age < config.StaleAfter, received && age <= config.FreshFor
}

// LastAdvertised is when this broker last received the cluster's advertisement, or else
// when it became the leader.
func (c *Clusters) LastAdvertised(cluster string) time.Time {
	if at := c.store.Receipt(cluster).At; !at.IsZero() {
		return at
	}
	return c.startedAt()
}
