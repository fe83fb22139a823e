package hold

import (
	"slices"
	"sort"

	"k8s.io/apimachinery/pkg/types"

	"github.com/spillway-dev/spillway/agent/internal/hold/usage"
	"github.com/spillway-dev/spillway/agent/internal/placeholder"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// loss is what remains of a hold of which a part no longer fits the nodes, and why.
type loss struct {
	held broker.HeldCapacity
	why  string
}

// losses returns the holds of which a part no longer fits the nodes. Guests on nodes
// whose capacity is offered keep their places; those on a cordoned node need another one,
// because the administrator empties it. The oldest holds keep their place. Only holds that are decided count: the
// others are about to be.
func losses(in input) map[types.UID]loss {
	var standing []*broker.ProviderInstruction
	for _, instruction := range in.instructions {
		if heldBy(instruction) != nil {
			standing = append(standing, instruction)
		}
	}
	if len(standing) == 0 {
		return nil
	}
	sortByAge(standing)
	now := in.nodes()
	unused := unusedOf(standing, now)
	var all []broker.HeldCapacity
	for _, instruction := range standing {
		all = append(all, unused[instruction.UID])
	}
	if fitTogether(reserved(now, nil), all) || fitInAnotherOrder(now, all) {
		return nil
	}
	out := map[types.UID]loss{}
	packer := reserved(now, nil)
	for _, instruction := range standing {
		left := unused[instruction.UID]
		// What fits of it is placed, also if not all does.
		fits, rejection := packer.Pack(left, nil)
		if len(left.PodSets) == 0 {
			if rejection != nil {
				fits = partOf(left, packer)
			}
			packer.Reserve(nil, capacity.Ceil(fits.Totals.List()))
		}
		if rejection != nil && settled(instruction) {
			out[instruction.UID] = loss{held: capacity.Sub(*heldBy(instruction), capacity.Sub(left, fits)), why: rejection.Message}
		}
	}
	return out
}

// maxOrders is the number of orders in which holds are packed before one of them is
// given up.
const maxOrders = 16

// fitInAnotherOrder reports whether all capacities, oldest first, fit if one of the
// newest is packed last, as it was when it was accepted. A packer does not find every
// packing: what it once accepted must not be lost while the nodes are the same.
func fitInAnotherOrder(now nodes, all []broker.HeldCapacity) bool {
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
func unusedOf(standing []*broker.ProviderInstruction, now nodes) map[types.UID]broker.HeldCapacity {
	byConsumer := map[string][]*broker.ProviderInstruction{}
	for _, instruction := range standing {
		consumer := instruction.Spec.RequesterClusterID
		byConsumer[consumer] = append(byConsumer[consumer], instruction)
	}
	out := map[types.UID]broker.HeldCapacity{}
	for consumer, own := range byConsumer {
		var promises []usage.Promise
		for _, instruction := range own {
			promises = append(promises, usage.PromiseOf(instruction, *heldBy(instruction)))
		}
		for i, left := range usage.Unused(promises, now.guests[consumer].Placed) {
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
