package placeholder

import (
	"cmp"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// Input of a plan for one consumer.
type Input struct {
	Holds []Hold
	// Pods are the consumer's placeholders that exist and are not being deleted, but for those
	// in Leaving: those that guests are about to take.
	Pods, Leaving []*corev1.Pod
	// Usable reports whether a node runs pods that are bound to it and takes new ones.
	Usable func(node string) bool
	// Expected is the number of guests that are nominated to a node and not bound yet:
	// there the placeholders that are too many are removed first.
	Expected map[string]int
	// Fits reports whether the pods of all sets fit what is free together; nil for always.
	Fits    func(sets []broker.PodSet) bool
	Options Options
}

// Plan is what to change so that each hold has a placeholder for each pod that it is for
// and that no guest uses.
type Plan struct {
	Create, Remove []*corev1.Pod
	// States of the holds, by UID.
	States map[types.UID]State
}

// shape is a pod set of a hold, or the equal parts of a divisible total: its count is the
// number of placeholders.
type shape struct {
	key string
	set broker.PodSet
	// size of a part, nil for a pod set.
	size capacity.Vector
}

// planned are the placeholders of one shape.
type planned struct {
	shape
	keep, remove []*corev1.Pod
}

// Make plans the placeholders of one consumer. There are never more of a shape than its
// hold's unused pods, nor of a divisible total than what is unused of it; what belongs to no
// hold is removed.
func Make(in Input) Plan {
	plan := Plan{States: map[types.UID]State{}}
	byShape := byShape(in.Pods)
	in.Expected = maps.Clone(in.Expected)
	for i, h := range in.Holds {
		state := State{}
		for _, p := range in.placeholders(i, byShape[h.UID]) {
			delete(byShape[h.UID], p.key)
			plan.Remove = append(plan.Remove, p.remove...)
			taken := map[string]bool{}
			for _, pod := range append(slices.Clone(p.keep), p.remove...) {
				taken[pod.Name] = true
			}
			for missing, ordinal := int(p.set.Count)-len(p.keep), 0; missing > 0; ordinal++ {
				if !taken[podName(h, p.shape, ordinal)] {
					plan.Create = append(plan.Create, in.Options.pod(h, p.shape, ordinal))
					missing--
				}
			}
			state.add(p.shape, p.keep)
		}
		plan.States[h.UID] = state
	}
	for _, hold := range slices.Sorted(maps.Keys(byShape)) {
		for _, key := range slices.Sorted(maps.Keys(byShape[hold])) {
			plan.Remove = append(plan.Remove, byShape[hold][key]...)
		}
	}
	return plan
}

// byShape are placeholders by the UID of their hold and their shape.
func byShape(pods []*corev1.Pod) map[types.UID]map[string][]*corev1.Pod {
	out := map[types.UID]map[string][]*corev1.Pod{}
	for _, pod := range pods {
		hold := HoldOf(pod)
		if out[hold] == nil {
			out[hold] = map[string][]*corev1.Pod{}
		}
		out[hold][pod.Labels[broker.LabelShape]] = append(out[hold][pod.Labels[broker.LabelShape]], pod)
	}
	return out
}

// placeholders are those of a hold, shape by shape.
func (in Input) placeholders(of int, existing map[string][]*corev1.Pod) (out []planned) {
	h := in.Holds[of]
	if len(h.Unused.PodSets) == 0 {
		return in.parts(of, existing)
	}
	for _, s := range shapes(h.Unused.PodSets) {
		keep, remove := in.keep(existing[s.key], int(s.set.Count))
		out = append(out, planned{s, keep, remove})
	}
	return out
}

// keep splits the placeholders of one shape into at most count that are kept and those
// that are removed: on nodes that are not usable, ended, and too many. Of these, first those in
// the way of expected guests, then those without a place.
func (in Input) keep(pods []*corev1.Pod, count int) (keep, remove []*corev1.Pod) {
	for _, pod := range pods {
		if in.holds(pod) {
			keep = append(keep, pod)
		} else {
			remove = append(remove, pod)
		}
	}
	slices.SortFunc(keep, func(a, b *corev1.Pod) int { return cmp.Compare(a.Name, b.Name) })
	inTheWay := func(pod *corev1.Pod) bool {
		node := pod.Spec.NodeName
		if node == "" || in.Expected[node] == 0 {
			return false
		}
		in.Expected[node]--
		return true
	}
	withoutPlace := func(pod *corev1.Pod) bool { return pod.Spec.NodeName == "" }
	for _, first := range []func(*corev1.Pod) bool{inTheWay, withoutPlace, func(*corev1.Pod) bool { return true }} {
		for i := len(keep) - 1; i >= 0 && len(keep) > count; i-- {
			if pod := keep[i]; first(pod) {
				keep = slices.Delete(keep, i, i+1)
				remove = append(remove, pod)
			}
		}
	}
	return keep, remove
}

// holds reports whether a placeholder keeps its place, or may get one.
func (in Input) holds(pod *corev1.Pod) bool {
	node := pod.Spec.NodeName
	return (node == "" || in.Usable(node)) && pod.Status.Phase != corev1.PodFailed && pod.Status.Phase != corev1.PodSucceeded
}

// shapes are pod sets, each shape once.
func shapes(sets []broker.PodSet) (out []shape) {
	for _, set := range sets {
		key := keyOf(set)
		if i := slices.IndexFunc(out, func(s shape) bool { return s.key == key }); i >= 0 {
			out[i].set.Count += set.Count
		} else {
			out = append(out, shape{key: key, set: set})
		}
	}
	return out
}
