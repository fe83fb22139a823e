package plan

import (
	"slices"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// leastPods is the number of pods below which the capacity is of no use; 0 if any number
// is.
func (in Input) leastPods() int32 {
	return min(in.Reservation.Spec.MinAvailable, in.Requested().Pods())
}

// lacks is the number of pods that it needs besides those that its status shows as
// allocated, before any of them may be used.
func (in Input) lacks() int32 {
	if inUse(in.Reservation) {
		return 0
	}
	least := in.leastPods()
	for _, a := range in.Reservation.Status.Allocations {
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

// allOrNothing is the plan, or one that places nothing if it leaves the Reservation with fewer pods than it
// needs at least, and releases what it holds: two Reservations that hold a part each
// would block each other. What pods may run on already is kept, also at a provider that the
// consumer cannot connect to.
func (p Plan) allOrNothing(in Input, holds []Hold) Plan {
	least := in.leastPods()
	var have int32
	for _, h := range holds {
		have += in.reliable(h).Pods()
	}
	for _, c := range p.Grow {
		have += c.Capacity.Pods()
	}
	if least == 0 || have >= least || inUse(in.Reservation) {
		return p
	}
	if slices.ContainsFunc(holds, func(h Hold) bool {
		_, unreachable := in.cutOffAt(h)
		return unreachable && in.guestsRunAt(h.Cluster)
	}) {
		p.Grow, p.Missing = nil, in.Requested()
		return p
	}
	p.Grow, p.Shrink, p.Missing = nil, nil, in.Requested()
	for _, h := range holds {
		if !h.Promised.Empty() {
			p.Shrink = append(p.Shrink, Change{h.Cluster, broker.HeldCapacity{}})
		}
	}
	return p
}

// usable reports whether pods may use what the providers have granted: not before they
// have granted as much as the Reservation needs at least.
func (in Input) usable() bool {
	least := in.leastPods()
	if least == 0 || inUse(in.Reservation) {
		return true
	}
	var granted int32
	for _, h := range in.Holds() {
		if h.Granted != nil {
			granted += h.Granted.Pods()
		}
	}
	return granted >= least
}
