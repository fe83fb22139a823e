package plan

import (
	"slices"
	"time"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// reportedUnreachable are the providers that the consumer has reported as unreachable, although
// its last advertisement does not: nothing is placed there as long as the earlier report counts.
func (in Input) reportedUnreachable() (providers []string) {
	var now []string
	if ad := in.Advertisement(in.Reservation.Spec.RequesterID); ad != nil {
		now = ad.Spec.Unreachable
	}
	for provider := range in.Unreachable {
		if !slices.Contains(now, provider) {
			providers = append(providers, provider)
		}
	}
	return providers
}

// cutOffAt is when a hold ceases to count because its consumer cannot connect to the
// provider. Where guests of the consumer run, it may have lost sight of them for a moment
// only: they have as much time as the holds of a provider that is silent.
func (in Input) cutOffAt(h Hold) (at time.Time, unreachable bool) {
	since := in.Unreachable[h.Cluster]
	if since.IsZero() || virtualNodeReady(in.Reservation, h.Cluster) {
		return time.Time{}, false
	}
	if in.guestsRunAt(h.Cluster) {
		since = since.Add(in.Settings.StaleAfter)
	}
	return since, true
}

// guestsRunAt reports whether a provider says that guests of the consumer run there.
func (in Input) guestsRunAt(provider string) bool {
	ad := in.Advertisement(provider)
	return ad != nil && slices.ContainsFunc(ad.Spec.ObservedHolds, func(o broker.ObservedHold) bool {
		return o.Requester == in.Reservation.Spec.RequesterID && o.Pods > 0
	})
}

// cannotUse reports whether the consumer has said that no pod can use a hold.
func (in Input) cannotUse(h Hold) bool {
	return !h.Promised.Empty() && h.Attempt <= in.Unusable[h.Cluster]
}

// counts reports whether the consumer can count on a hold: the provider is active, not cut off
// from the consumer, and pods of the consumer can use the hold.
func (in Input) counts(h Hold) bool {
	at, unreachable := in.cutOffAt(h)
	return in.Active[h.Cluster] && !in.cannotUse(h) && (!unreachable || in.Now.Before(at))
}
