package hold

import (
	"slices"

	"github.com/spillway-dev/spillway/agent/internal/hold/usage"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// reserved returns a packer of the nodes on which what is promised, and the pods that
// wait for a node, have their place.
func reserved(n nodes, promised []broker.HeldCapacity) *capacity.Packer {
	sets, total := slices.Clone(n.pending), capacity.Vector{}
	for _, p := range promised {
		if sets = append(sets, p.PodSets...); len(p.PodSets) == 0 {
			total.Add(capacity.Ceil(p.Totals.List()), 1)
		}
	}
	packer := capacity.NewPacker(n.slots)
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
		return len(a.PodSets) == len(b.PodSets) && usage.Covers(a.Totals.List(), b.Totals.List()) || b.Empty()
	}
	return capacity.Sub(b, a).Empty()
}
