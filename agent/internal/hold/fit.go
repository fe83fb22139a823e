package hold

import (
	"slices"

	corev1 "k8s.io/api/core/v1"

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

// Unused is the part of a consumer's promises that its guests do not use yet,
// promise by promise. A guest uses a promised pod with the same requests, or else
// the smallest that is at least as large. Guests that match none use divisible
// totals, as far as they go.
func Unused(held []broker.HeldCapacity, guests []corev1.ResourceList) []broker.HeldCapacity {
	out := make([]broker.HeldCapacity, len(held))
	var sets []*broker.PodSet
	for i := range held {
		out[i] = *held[i].DeepCopy()
		for j := range out[i].PodSets {
			sets = append(sets, &out[i].PodSets[j])
		}
	}
	slices.SortStableFunc(sets, func(a, b *broker.PodSet) int { return compare(a.Requests.List(), b.Requests.List()) })
	// use counts a guest in the first set that matches.
	use := func(matches func(requests corev1.ResourceList) bool) bool {
		i := slices.IndexFunc(sets, func(s *broker.PodSet) bool { return s.Count > 0 && matches(s.Requests.List()) })
		if i >= 0 {
			sets[i].Count--
		}
		return i >= 0
	}
	others := slices.DeleteFunc(slices.Clone(guests), func(guest corev1.ResourceList) bool {
		return use(func(requests corev1.ResourceList) bool { return compare(requests, guest) == 0 })
	})
	divisible := corev1.ResourceList{}
	for _, guest := range others {
		if !use(func(requests corev1.ResourceList) bool { return covers(requests, guest) }) {
			broker.AddTo(divisible, guest)
		}
	}
	for i := range out {
		if len(held[i].PodSets) > 0 {
			out[i].Totals = capacity.OfPodSets(out[i].PodSets).Totals
			continue
		}
		left := capacity.Subtract(held[i].Totals.List(), divisible)
		divisible = capacity.Subtract(divisible, held[i].Totals.List())
		out[i].Totals = broker.FromList(left)
	}
	return out
}

// Covers reports whether a is at least as much as b: then b needs no capacity in
// addition to a.
func Covers(a, b broker.HeldCapacity) bool {
	if len(b.PodSets) == 0 || len(a.PodSets) == 0 {
		return len(a.PodSets) == len(b.PodSets) && covers(a.Totals.List(), b.Totals.List()) || b.Empty()
	}
	return capacity.Sub(b, a).Empty()
}

func covers(a, b corev1.ResourceList) bool {
	for name, amount := range b {
		if have := a[name]; have.Cmp(amount) < 0 {
			return false
		}
	}
	return true
}

func compare(a, b corev1.ResourceList) int {
	return capacity.Compare(capacity.Ceil(a), capacity.Ceil(b))
}
