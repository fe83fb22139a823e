package reservation

import (
	"slices"
	"time"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// noteUnreachable notes since when this process has known that a consumer reports providers
// as unreachable. It follows the store, which ignores events that come late.
func (r *Reconciler) noteUnreachable(consumer string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	// Read while no other event is noted, so that none notes what is older.
	var reported []string
	if ad := r.store.advertisement(consumer); ad != nil {
		reported = ad.Spec.Unreachable
	}
	before := r.unreachable[consumer]
	delete(r.unreachable, consumer)
	for _, provider := range reported {
		since, known := before[provider]
		if !known {
			since = r.clock.Now()
		}
		if r.unreachable[consumer] == nil {
			r.unreachable[consumer] = map[string]time.Time{}
		}
		r.unreachable[consumer][provider] = since
	}
}

// unreachableSince is since when an active consumer reports a provider as unreachable; zero
// if it does not.
func (r *Reconciler) unreachableSince(consumer, provider string, c config) time.Time {
	r.mu.Lock()
	since := r.unreachable[consumer][provider]
	r.mu.Unlock()
	if active, _ := r.activity(consumer, c); !active {
		return time.Time{}
	}
	return since
}

// heldWhereChanged are the names of a consumer's Reservations with a hold at a provider of
// which it reports another reachability than before.
func (r *Reconciler) heldWhereChanged(consumer string, before, after []string) (names []string) {
	for _, provider := range slices.Concat(before, after) {
		ad := r.store.advertisement(provider)
		if ad == nil || slices.Contains(before, provider) == slices.Contains(after, provider) {
			continue
		}
		for i := range ad.Status.Holds {
			if ad.Status.Holds[i].Requester == consumer {
				names = append(names, ad.Status.Holds[i].ReservationName)
			}
		}
	}
	return names
}

// unreachableOf are the providers that an advertisement reports; none for nil.
func unreachableOf(ad *broker.ClusterAdvertisement) []string {
	if ad == nil {
		return nil
	}
	return ad.Spec.Unreachable
}

// cutOffAt is when a hold ceases to count because its consumer cannot connect to the
// provider. Where guests of the consumer run, it may have lost sight of them for a moment
// only: they have as much time as the holds of a provider that is silent.
func (in snapshot) cutOffAt(h clusterHold) (at time.Time, unreachable bool) {
	since := in.unreachable[h.cluster]
	if since.IsZero() || virtualNodeReady(in.reservation, h.cluster) {
		return time.Time{}, false
	}
	if in.guestsRunAt(h.cluster) {
		since = since.Add(in.config.staleAfter)
	}
	return since, true
}

// guestsRunAt reports whether a provider says that guests of the consumer run there.
func (in snapshot) guestsRunAt(provider string) bool {
	ad := in.advertisement(provider)
	return ad != nil && slices.ContainsFunc(ad.Spec.ObservedHolds, func(o broker.ObservedHold) bool {
		return o.Requester == in.reservation.Spec.RequesterID && o.Pods > 0
	})
}

// counts reports whether the consumer can count on a hold: the provider is active, and not
// cut off from the consumer.
func (in snapshot) counts(h clusterHold) bool {
	at, unreachable := in.cutOffAt(h)
	return in.active[h.cluster] && (!unreachable || in.now.Before(at))
}
