package hold

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Answer says whether something fits, with the figures.
type Answer struct {
	Fits    bool
	Message string
}

// Fit checks that a wanted capacity fits into slots besides what is promised to
// others and not in use yet (promised: pod sets without the guests that run
// already, and divisible totals less what they use). The slots are consumed.
//
// It packs largest first, each pod into the fullest node that takes it. That is
// how a scheduler that fills nodes would place them; where it finds no room,
// there may still be a cleverer packing, and the answer is no all the same.
func Fit(slots []inventory.Slot, promised []broker.HeldCapacity, wanted broker.HeldCapacity) Answer {
	var sets []broker.PodSet
	var totals corev1.ResourceList
	for _, p := range promised {
		if len(p.PodSets) > 0 {
			sets = append(sets, p.PodSets...)
		} else {
			totals = broker.AddTo(totals, p.Totals.List())
		}
	}
	sortLargestFirst(sets)
	for _, set := range sets {
		place(slots, set)
	}
	own := slices.Clone(wanted.PodSets)
	sortLargestFirst(own)
	for _, set := range own {
		if placed := place(slots, set); placed < set.Count {
			return Answer{Message: fmt.Sprintf("%d of %d pods of %s fit; %s", placed, set.Count, set.Requests, biggest(slots, set))}
		}
	}
	if len(wanted.PodSets) == 0 {
		totals = broker.AddTo(totals, wanted.Totals.List())
	}
	if len(totals) > 0 {
		free := corev1.ResourceList{}
		for _, slot := range slots {
			if slot.Pods > 0 && tolerates(slot.Node, nil) {
				free = broker.AddTo(free, slot.Free)
			}
		}
		if missing := lacking(free, totals); len(missing) > 0 {
			return Answer{Message: fmt.Sprintf("%s of divisible totals would be promised, %s is free", broker.FromList(totals), broker.FromList(pick(free, totals)))}
		}
	}
	return Answer{Fits: true, Message: fmt.Sprintf("%s fits this cluster's nodes now", describe(wanted))}
}

// place puts as many pods of a set into slots as fit, and returns how many.
func place(slots []inventory.Slot, set broker.PodSet) int32 {
	requests := set.Requests.List()
	selector := affinityOf(set)
	var candidates []int
	for i := range slots {
		if slots[i].Pods > 0 && matches(slots[i].Node, set, selector) {
			candidates = append(candidates, i)
		}
	}
	// The fullest first, so that large rooms stay whole.
	slices.SortStableFunc(candidates, func(a, b int) int { return compareLists(slots[a].Free, slots[b].Free) })
	var placed int32
	for _, i := range candidates {
		n := min(capacityFor(slots[i], requests), set.Count-placed)
		if n <= 0 {
			continue
		}
		for name, amount := range broker.Times(requests, n) {
			free := slots[i].Free[name]
			free.Sub(amount)
			slots[i].Free[name] = free
		}
		slots[i].Pods -= n
		placed += n
	}
	return placed
}

// capacityFor is how many pods with these requests a slot takes.
func capacityFor(slot inventory.Slot, requests corev1.ResourceList) int32 {
	n := slot.Pods
	for name, amount := range requests {
		free := slot.Free[name]
		n = min(n, times(free, amount, n))
	}
	return n
}

// times is how often amount goes into free, at most limit.
func times(free, amount resource.Quantity, limit int32) int32 {
	if amount.Sign() <= 0 {
		return limit
	}
	if free.Cmp(amount) < 0 {
		return 0
	}
	guess := int32(min(free.AsApproximateFloat64()/amount.AsApproximateFloat64()+1, float64(limit)))
	for ; guess > 0; guess-- {
		all := amount.DeepCopy()
		all.Mul(int64(guess))
		if all.Cmp(free) <= 0 {
			break
		}
	}
	return guess
}

func affinityOf(set broker.PodSet) nodeaffinity.RequiredNodeAffinity {
	pod := &corev1.Pod{Spec: corev1.PodSpec{NodeSelector: set.NodeSelector}}
	if set.NodeAffinity != nil {
		pod.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: set.NodeAffinity}}
	}
	return nodeaffinity.GetRequiredNodeAffinity(pod)
}

func matches(node *corev1.Node, set broker.PodSet, selector nodeaffinity.RequiredNodeAffinity) bool {
	ok, err := selector.Match(node)
	return err == nil && ok && tolerates(node, set.Tolerations)
}

func tolerates(node *corev1.Node, tolerations []corev1.Toleration) bool {
	for _, taint := range node.Spec.Taints {
		if taint.Effect == corev1.TaintEffectPreferNoSchedule {
			continue
		}
		if !slices.ContainsFunc(tolerations, func(t corev1.Toleration) bool { return tolerated(t, taint) }) {
			return false
		}
	}
	return true
}

// tolerated knows Equal and Exists; the numeric operators are alpha and off.
func tolerated(t corev1.Toleration, taint corev1.Taint) bool {
	if t.Effect != "" && t.Effect != taint.Effect {
		return false
	}
	switch t.Operator {
	case corev1.TolerationOpExists:
		return t.Key == "" || t.Key == taint.Key
	case "", corev1.TolerationOpEqual:
		return t.Key == taint.Key && t.Value == taint.Value
	}
	return false
}

// Unused is what of a consumer's promises its guests do not use yet, promise by
// promise. A guest stands for a promised pod with the same requests, or else for
// the smallest that is at least as large; one that matches none uses up the
// divisible totals, as far as they go.
func Unused(held []broker.HeldCapacity, guests []corev1.ResourceList) []broker.HeldCapacity {
	type place struct {
		promise, set int
		requests     corev1.ResourceList
	}
	out := make([]broker.HeldCapacity, len(held))
	var places []place
	for i, h := range held {
		out[i] = *h.DeepCopy()
		for j, set := range h.PodSets {
			places = append(places, place{i, j, set.Requests.List()})
		}
	}
	slices.SortStableFunc(places, func(a, b place) int { return compareLists(a.requests, b.requests) })
	var rest []corev1.ResourceList
	take := func(guest corev1.ResourceList, fits func(place) bool) bool {
		for _, p := range places {
			set := &out[p.promise].PodSets[p.set]
			if set.Count > 0 && fits(p) {
				set.Count--
				return true
			}
		}
		return false
	}
	for _, guest := range guests {
		if !take(guest, func(p place) bool { return compareLists(p.requests, guest) == 0 }) {
			rest = append(rest, guest)
		}
	}
	var loose corev1.ResourceList
	for _, guest := range rest {
		if !take(guest, func(p place) bool { return len(lacking(p.requests, guest)) == 0 }) {
			loose = broker.AddTo(loose, guest)
		}
	}
	for i := range out {
		if len(held[i].PodSets) > 0 {
			var totals corev1.ResourceList
			for _, set := range out[i].PodSets {
				totals = broker.AddTo(totals, broker.Times(set.Requests.List(), set.Count))
			}
			out[i].Totals = broker.FromList(totals)
			continue
		}
		totals := out[i].Totals.List()
		for name, amount := range totals {
			part := loose[name]
			if part.Cmp(amount) > 0 {
				part = amount
			}
			amount.Sub(part)
			totals[name] = amount
			left := loose[name]
			left.Sub(part)
			if loose != nil {
				loose[name] = left
			}
		}
		out[i].Totals = broker.FromList(totals)
	}
	return out
}

// Covers reports whether a asks for at least all that b does: then b needs no
// room that a has not got already.
func Covers(a, b broker.HeldCapacity) bool {
	if len(b.PodSets) == 0 || len(a.PodSets) == 0 {
		return len(a.PodSets) == len(b.PodSets) && len(lacking(a.Totals.List(), b.Totals.List())) == 0 || b.Empty()
	}
	for _, set := range b.PodSets {
		if set.Count > 0 && !slices.ContainsFunc(a.PodSets, func(has broker.PodSet) bool {
			return has.Name == set.Name && has.Count >= set.Count && compareLists(has.Requests.List(), set.Requests.List()) == 0
		}) {
			return false
		}
	}
	return true
}

// lacking is what of need is not in have.
func lacking(have, need corev1.ResourceList) corev1.ResourceList {
	missing := corev1.ResourceList{}
	for name, amount := range need {
		got := have[name]
		if got.Cmp(amount) < 0 {
			amount := amount.DeepCopy()
			amount.Sub(got)
			missing[name] = amount
		}
	}
	return missing
}

func pick(from, names corev1.ResourceList) corev1.ResourceList {
	out := corev1.ResourceList{}
	for name := range names {
		out[name] = from[name]
	}
	return out
}

func sortLargestFirst(sets []broker.PodSet) {
	slices.SortStableFunc(sets, func(a, b broker.PodSet) int { return compareLists(b.Requests.List(), a.Requests.List()) })
}

// compareLists orders amounts by GPU, then CPU, then memory, then all others by
// name: what is scarce decides first.
func compareLists(a, b corev1.ResourceList) int {
	first := []corev1.ResourceName{broker.ResourceGPU, corev1.ResourceCPU, corev1.ResourceMemory}
	for _, name := range first {
		x, y := a[name], b[name]
		if c := x.Cmp(y); c != 0 {
			return c
		}
	}
	names := map[corev1.ResourceName]bool{}
	for name := range a {
		names[name] = true
	}
	for name := range b {
		names[name] = true
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		x, y := a[name], b[name]
		if c := x.Cmp(y); c != 0 && name != corev1.ResourcePods {
			return c
		}
	}
	return 0
}

// biggest describes the largest rooms that a pod of the set could go to.
func biggest(slots []inventory.Slot, set broker.PodSet) string {
	selector := affinityOf(set)
	var room corev1.ResourceList
	var n int
	for _, slot := range slots {
		if !matches(slot.Node, set, selector) {
			continue
		}
		n++
		if room == nil || compareLists(slot.Free, room) > 0 {
			room = slot.Free
		}
	}
	if n == 0 {
		return fmt.Sprintf("none of %d nodes matches their node selector, affinity and tolerations", len(slots))
	}
	return fmt.Sprintf("the largest room left on %d nodes is %s", n, broker.FromList(pick(room, set.Requests.List())))
}

func describe(c broker.HeldCapacity) string {
	if len(c.PodSets) == 0 {
		return c.Totals.String()
	}
	var words []string
	for _, set := range c.PodSets {
		words = append(words, fmt.Sprintf("%d pods of %s", set.Count, set.Requests))
	}
	return cmp.Or(strings.Join(words, " and "), "nothing")
}
