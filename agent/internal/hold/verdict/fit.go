package verdict

import (
	"maps"
	"slices"
	"sort"

	"k8s.io/apimachinery/pkg/types"

	"github.com/spillway-dev/spillway/agent/internal/instruction"
	"github.com/spillway-dev/spillway/agent/internal/placeholder"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/charge"
)

// Loss is what remains of a hold of which a part no longer fits the nodes, and why.
type Loss struct {
	held broker.HeldCapacity
	why  *capacity.Rejection
}

// Losses returns the holds of which a part no longer fits the nodes. Guests on nodes
// whose capacity is offered keep their places; those on a cordoned node need another one,
// because the administrator empties it. The oldest holds keep their place. Only holds that are decided count: the
// others are about to be.
func Losses(in Input) map[types.UID]*Loss {
	standing := in.holds(func(string) bool { return true })
	if len(standing) == 0 {
		return nil
	}
	sortByAge(standing)
	now := in.Nodes()
	unused := unusedOf(standing, now)
	var all []broker.HeldCapacity
	for _, of := range standing {
		all = append(all, unused[of.UID])
	}
	if fitTogether(reserved(now, nil), all) || fitInAnotherOrder(now, all) {
		return nil
	}
	out := map[types.UID]*Loss{}
	packer := reserved(now, nil)
	for _, of := range standing {
		left := unused[of.UID]
		// What fits of it is placed, also if not all does.
		fits, rejection := packer.Pack(left, nil)
		if len(left.PodSets) == 0 {
			if rejection != nil {
				fits = partOf(left, packer)
			}
			packer.Reserve(nil, capacity.Ceil(fits.Totals.List()))
		}
		if rejection != nil && settled(of) {
			why := &capacity.Rejection{Reason: ReasonCapacityLost, Message: rejection.Message}
			out[of.UID] = &Loss{capacity.Sub(*instruction.Held(of), capacity.Sub(left, fits)), why}
		}
	}
	return out
}

// Fits reports whether the pods of all sets fit beside what all other consumers are promised.
func (in Input) Fits(sets []broker.PodSet) bool {
	now := in.Nodes()
	others := in.holds(func(consumer string) bool { return consumer != in.Consumer })
	return placeAll(reserved(now, slices.Collect(maps.Values(unusedOf(others, now)))), sets)
}

// holds are the instructions of some consumers for which anything is held.
func (in Input) holds(of func(consumer string) bool) []*broker.ProviderInstruction {
	return slices.DeleteFunc(slices.Clone(in.Instructions), func(i *broker.ProviderInstruction) bool {
		return instruction.Held(i) == nil || !of(i.Spec.RequesterClusterID)
	})
}

// maxOrders is the number of orders in which holds are packed before one of them is
// given up.
const maxOrders = 16

// fitInAnotherOrder reports whether all capacities, oldest first, fit if one of the
// newest is packed last, as it was when it was accepted. A packer does not find every
// packing: what it once accepted must not be lost while the nodes are the same.
func fitInAnotherOrder(now Nodes, all []broker.HeldCapacity) bool {
	for last := len(all) - 1; last >= max(0, len(all)-maxOrders); last-- {
		packer := reserved(now, nil)
		others := slices.Concat(all[:last], all[last+1:])
		if fitTogether(packer, others) && place(packer, all[last]) == nil {
			return true
		}
	}
	return false
}

// unusedOf returns the part of each hold that needs a place: no guest uses it, or one
// that is to leave its node.
func unusedOf(standing []*broker.ProviderInstruction, now Nodes) map[types.UID]broker.HeldCapacity {
	byConsumer := map[string][]*broker.ProviderInstruction{}
	for _, of := range standing {
		byConsumer[of.Spec.RequesterClusterID] = append(byConsumer[of.Spec.RequesterClusterID], of)
	}
	out := map[types.UID]broker.HeldCapacity{}
	for consumer, own := range byConsumer {
		var promises []charge.Promise
		for _, of := range own {
			promises = append(promises, charge.PromiseOf(of, *instruction.Held(of)))
		}
		for i, left := range charge.Unused(promises, now.Guests[consumer].Placed) {
			out[own[i].UID] = left
		}
	}
	return out
}

// fitTogether reports whether all capacities fit beside what is reserved.
func fitTogether(packer *capacity.Packer, all []broker.HeldCapacity) bool {
	var sets []broker.PodSet
	total := capacity.Vector{}
	for _, held := range all {
		if sets = append(sets, held.PodSets...); len(held.PodSets) == 0 {
			total.Add(capacity.Ceil(held.Totals.List()), 1)
		}
	}
	return placeAll(packer, sets) && place(packer, broker.HeldCapacity{Totals: broker.FromList(total.List())}) == nil
}

// placeAll reports whether the pods of all sets fit, and places them, the largest first.
func placeAll(packer *capacity.Packer, sets []broker.PodSet) bool {
	return !slices.ContainsFunc(capacity.Decreasing(sets), func(set broker.PodSet) bool {
		return packer.Place(set, int64(set.Count)) < int64(set.Count)
	})
}

// partOf is as much of a divisible total as fits, resource by resource: whole milli-cores,
// bytes and devices. Where one of them is used up, the others serve no pod, and nothing fits.
func partOf(total broker.HeldCapacity, packer *capacity.Packer) broker.HeldCapacity {
	out := capacity.Vector{}
	for name, amount := range capacity.Floor(total.Totals.List()) {
		unit := placeholder.Unit(name)
		units := sort.Search(int(amount/unit), func(less int) bool {
			one := capacity.Vector{name: int64(less+1) * unit}
			_, rejection := packer.Pack(broker.HeldCapacity{Totals: broker.FromList(one.List())}, nil)
			return rejection != nil
		})
		if units == 0 && amount >= unit {
			return broker.HeldCapacity{}
		}
		out[name] = int64(units) * unit
	}
	return broker.HeldCapacity{Totals: broker.FromList(out.List())}
}

// reserved returns a packer of the nodes on which what is promised, and the pods that
// wait for a node, have their place.
func reserved(n Nodes, promised []broker.HeldCapacity) *capacity.Packer {
	sets, total := slices.Clone(n.Pending), capacity.Vector{}
	for _, p := range promised {
		if sets = append(sets, p.PodSets...); len(p.PodSets) == 0 {
			total.Add(capacity.Ceil(p.Totals.List()), 1)
		}
	}
	packer := capacity.NewPacker(n.Slots)
	packer.Reserve(sets, total)
	return packer
}

// place takes a capacity from what is free, or returns why it does not fit: then the
// packer must not be used any more.
func place(packer *capacity.Packer, wanted broker.HeldCapacity) *capacity.Rejection {
	_, rejection := packer.Pack(wanted, nil)
	switch {
	case rejection != nil:
		// A hold is accepted completely or not at all.
		rejection.Reason = ReasonInsufficientCapacity
	case len(wanted.PodSets) == 0:
		packer.Reserve(nil, capacity.Ceil(wanted.Totals.List()))
	}
	return rejection
}

// Covers reports whether a is at least as much as b: then b needs no capacity in
// addition to a.
func Covers(a, b broker.HeldCapacity) bool {
	if len(b.PodSets) == 0 || len(a.PodSets) == 0 {
		return len(a.PodSets) == len(b.PodSets) && capacity.Ceil(b.Totals.List()).FitsIn(capacity.Ceil(a.Totals.List())) > 0 || b.Empty()
	}
	return capacity.Sub(b, a).Empty()
}
