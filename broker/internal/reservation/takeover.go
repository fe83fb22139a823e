package reservation

import (
	"context"
	"fmt"
	"sync"

	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// takeover is whether a new leader knows what the one before it has left.
type takeover struct {
	mu   sync.Mutex
	done bool
}

// takeOver takes all advertisements and Reservations from the cache, once, and queues what
// waits. Before that, no request is placed: it would be placed before earlier ones of which no
// event has been handled yet. The cache of a leader is complete.
func (r *Reconciler) takeOver(ctx context.Context) error {
	r.takeover.mu.Lock()
	defer r.takeover.mu.Unlock()
	if r.takeover.done {
		return nil
	}
	config, err := r.config(ctx)
	if err != nil {
		return err
	}
	// The objects are only read, as those of events.
	options := []client.ListOption{client.InNamespace(r.namespace), client.UnsafeDisableDeepCopy}
	var ads broker.ClusterAdvertisementList
	if err := r.client.List(ctx, &ads, options...); err != nil {
		return fmt.Errorf("listing the advertisements: %w", err)
	}
	var reservations broker.ReservationList
	if err := r.client.List(ctx, &reservations, options...); err != nil {
		return fmt.Errorf("listing the Reservations: %w", err)
	}
	for _, ad := range ads.Items {
		r.store.putAdvertisement(&ad)
		r.followReports(ad.Name)
	}
	for _, reservation := range reservations.Items {
		r.store.putReservation(&reservation)
	}
	r.queueAll(config)
	r.takeover.done = true
	return nil
}

// queueAll queues all known Reservations that wait.
func (r *Reconciler) queueAll(config config) {
	for _, reservation := range r.store.allReservations() {
		if meta.IsStatusConditionTrue(reservation.Status.Conditions, broker.ConditionQueued) {
			r.note(r.snapshotOf(reservation.DeepCopy(), config))
		}
	}
}
