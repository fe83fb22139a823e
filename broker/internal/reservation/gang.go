package reservation

import (
	"slices"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// leastPods is the number of pods below which the capacity is of no use; 0 if any number
// is.
func (in snapshot) leastPods() int32 {
	return min(in.reservation.Spec.MinAvailable, in.requested().Pods())
}

// lacks is the number of pods that it needs besides those that its status shows as
// allocated, before any of them may be used.
func (in snapshot) lacks() int32 {
	if inUse(in.reservation) {
		return 0
	}
	least := in.leastPods()
	for _, a := range in.reservation.Status.Allocations {
		least -= broker.HeldCapacity{PodSets: a.PodSets}.Pods()
	}
	return max(least, 0)
}

// inUse reports whether a virtual node provides any of the capacity, so that pods may run
// on it, or whether a provider has withdrawn a part, of which pods may have to leave: the
// virtual node is not ready before they have.
func inUse(r *broker.Reservation) bool {
	return len(r.Status.Withdrawals) > 0 || slices.ContainsFunc(r.Status.Allocations, func(a broker.Allocation) bool { return a.VirtualNodeReady })
}

// allOrNothing takes back a plan that leaves the Reservation with fewer pods than it
// needs at least, and releases what it holds: two Reservations that hold a part each
// would block each other. What pods may run on already is kept, also at a provider that the
// consumer cannot connect to.
func (p *plan) allOrNothing(in snapshot, holds []clusterHold) {
	least := in.leastPods()
	var have int32
	for _, h := range holds {
		have += in.reliable(h).Pods()
	}
	for _, c := range p.grow {
		have += c.capacity.Pods()
	}
	if least == 0 || have >= least || inUse(in.reservation) {
		return
	}
	if slices.ContainsFunc(holds, func(h clusterHold) bool {
		_, unreachable := in.cutOffAt(h)
		return unreachable && in.guestsRunAt(h.cluster)
	}) {
		p.grow, p.missing = nil, in.requested()
		return
	}
	p.grow, p.shrink, p.missing = nil, nil, in.requested()
	for _, h := range holds {
		if !h.Promised.Empty() {
			p.shrink = append(p.shrink, change{h.cluster, broker.HeldCapacity{}})
		}
	}
}

// usable reports whether pods may use what the providers have granted: not before they
// have granted as much as the Reservation needs at least.
func (in snapshot) usable() bool {
	least := in.leastPods()
	if least == 0 || inUse(in.reservation) {
		return true
	}
	var granted int32
	for _, h := range in.holds() {
		if h.Granted != nil {
			granted += h.Granted.Pods()
		}
	}
	return granted >= least
}
