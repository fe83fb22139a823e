package plan

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
)

// fairWait is how much later a Reservation counts as queued whose consumer holds all of its quota.
// It is bounded, so that a consumer with a small share cannot pass the others for ever.
const fairWait = 10 * time.Minute

// held is what providers are charged with for the consumer, of the resources that its quota limits:
// also what they have not confirmed to be released. What the Reservation cannot count on is not: it
// is to be replaced.
func (in Input) held() capacity.Vector {
	held := capacity.Vector{}
	add := func(amount broker.ResourceQuantities, n int64) { held.Add(capacity.Ceil(amount.List()), n) }
	for _, ad := range in.Advertisements {
		for i := range ad.Status.Holds {
			if hold := &ad.Status.Holds[i]; hold.Requester == in.Reservation.Spec.RequesterID {
				add(ledger.Charged(*hold).Totals, 1)
			}
		}
	}
	for _, h := range in.Holds() {
		add(capacity.Sub(h.Promised, in.reliable(h)).Totals, -1)
	}
	maps.DeleteFunc(held, func(name corev1.ResourceName, _ int64) bool { return !in.limits(name) })
	return held
}

func (in Input) limits(name corev1.ResourceName) bool {
	_, limited := in.Settings.Capacity[name]
	return limited
}

// withinQuota is the part of a capacity that the consumer's quota leaves room for.
func (in Input) withinQuota(want broker.HeldCapacity) broker.HeldCapacity {
	if in.Settings.Capacity == nil {
		return want
	}
	left := in.Settings.Capacity.Minus(in.held(), 1)
	limited := func(request broker.ResourceQuantities) capacity.Vector {
		v := capacity.Ceil(request.List())
		maps.DeleteFunc(v, func(name corev1.ResourceName, _ int64) bool { return !in.limits(name) })
		return v
	}
	if len(want.PodSets) == 0 {
		if limited(want.Totals).FitsIn(left) == 0 {
			return broker.HeldCapacity{}
		}
		return want
	}
	sets := slices.Clone(want.PodSets)
	for i := range sets {
		request := limited(sets[i].Requests)
		sets[i].Count = int32(min(int64(sets[i].Count), request.FitsIn(left)))
		left = left.Minus(request, int64(sets[i].Count))
	}
	return capacity.OfPodSets(sets)
}

// handicap is how much later the Reservation counts as queued, by the share of its consumer's
// quota that is held.
func (in Input) handicap() time.Duration {
	if in.Settings.Capacity == nil {
		return 0
	}
	share, held := 0.0, in.held()
	for name, most := range in.Settings.Capacity {
		if most > 0 {
			share = max(share, float64(held[name])/float64(most))
		}
	}
	return time.Duration(min(share, 1) * float64(fairWait))
}

// quotaMessage says how much of its quota the consumer has.
func (in Input) quotaMessage() string {
	held, most := in.held().List(), in.Settings.Capacity.List()
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(most)) {
		has, of := held[name], most[name]
		parts = append(parts, fmt.Sprintf("%s %s of %s", name, has.String(), of.String()))
	}
	return fmt.Sprintf("%s has %s (quotas.capacityPerCluster of the BrokerConfig).", in.Reservation.Spec.RequesterID, strings.Join(parts, ", "))
}
