package reservation

import (
	"slices"
	"time"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// heldWhereChanged are the names of a consumer's Reservations with a hold at a provider of
// which it reports another reachability than before.
func (s *store) heldWhereChanged(consumer string, before, after []string) (names []string) {
	for _, provider := range slices.Concat(before, after) {
		ad := s.advertisement(provider)
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

// reportedUnreachable are the providers that the consumer has reported as unreachable, although
// its last advertisement does not: nothing is placed there as long as the earlier report counts.
func (in snapshot) reportedUnreachable() (providers []string) {
	now := unreachableOf(in.advertisement(in.reservation.Spec.RequesterID))
	for provider := range in.unreachable {
		if !slices.Contains(now, provider) {
			providers = append(providers, provider)
		}
	}
	return providers
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

// cannotUse reports whether the consumer has said that no pod can use a hold.
func (in snapshot) cannotUse(h clusterHold) bool {
	return !h.Promised.Empty() && h.Attempt <= in.unusable[h.cluster]
}

// counts reports whether the consumer can count on a hold: the provider is active, not cut off
// from the consumer, and pods of the consumer can use the hold.
func (in snapshot) counts(h clusterHold) bool {
	at, unreachable := in.cutOffAt(h)
	return in.active[h.cluster] && !in.cannotUse(h) && (!unreachable || in.now.Before(at))
}
