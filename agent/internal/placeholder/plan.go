package placeholder

import (
	"cmp"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// maxChunks is the number of placeholders that a divisible total is held in, at most.
const maxChunks = 64

// Input of a plan for one consumer.
type Input struct {
	Holds []Hold
	// Pods are the consumer's placeholders that exist and are not being deleted.
	Pods []*corev1.Pod
	// Usable reports whether a node runs pods that are bound to it and takes new ones.
	Usable func(node string) bool
	// Expected is the number of guests that are nominated to a node and not bound yet:
	// there the placeholders that are too many are removed first.
	Expected map[string]int
	// Fits returns how many of the pods of a set fit what is free; nil for all.
	Fits    func(set broker.PodSet) int32
	Options Options
}

// Plan is what to change so that each hold has a placeholder for each pod that it is for
// and that no guest uses.
type Plan struct {
	Create, Remove []*corev1.Pod
	// States of the holds, by UID.
	States map[types.UID]State
}

// shape is a pod set of a hold: its count is the number of placeholders.
type shape struct {
	key string
	set broker.PodSet
}

// Make plans the placeholders of one consumer. There are never more of a shape than its
// hold's unused pods; what belongs to no hold is removed.
func Make(in Input) Plan {
	plan := Plan{States: map[types.UID]State{}}
	byShape := map[types.UID]map[string][]*corev1.Pod{}
	for _, pod := range in.Pods {
		hold := HoldOf(pod)
		if byShape[hold] == nil {
			byShape[hold] = map[string][]*corev1.Pod{}
		}
		byShape[hold][pod.Labels[broker.LabelShape]] = append(byShape[hold][pod.Labels[broker.LabelShape]], pod)
	}
	expected := maps.Clone(in.Expected)
	for _, h := range in.Holds {
		state := State{}
		for _, s := range in.shapes(h, byShape[h.UID]) {
			keep, remove := in.keep(byShape[h.UID][s.key], int(s.set.Count), expected)
			delete(byShape[h.UID], s.key)
			plan.Remove = append(plan.Remove, remove...)
			taken := map[string]bool{}
			for _, pod := range append(slices.Clone(keep), remove...) {
				taken[pod.Name] = true
			}
			for missing, ordinal := int(s.set.Count)-len(keep), 0; missing > 0; ordinal++ {
				if !taken[podName(h, s, ordinal)] {
					plan.Create = append(plan.Create, in.Options.pod(h, s, ordinal))
					missing--
				}
			}
			state.add(s, keep)
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

// keep splits the placeholders of one shape into at most count that are kept and those
// that are removed: on nodes that are not usable, ended, and too many. Of these, first those in
// the way of expected guests, then those without a place.
func (in Input) keep(pods []*corev1.Pod, count int, expected map[string]int) (keep, remove []*corev1.Pod) {
	for _, pod := range pods {
		node := pod.Spec.NodeName
		if node != "" && !in.Usable(node) || pod.Status.Phase == corev1.PodFailed || pod.Status.Phase == corev1.PodSucceeded {
			remove = append(remove, pod)
		} else {
			keep = append(keep, pod)
		}
	}
	slices.SortFunc(keep, func(a, b *corev1.Pod) int { return cmp.Compare(a.Name, b.Name) })
	inTheWay := func(pod *corev1.Pod) bool {
		node := pod.Spec.NodeName
		if node == "" || expected[node] == 0 {
			return false
		}
		expected[node]--
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

// shapes are the pod sets of a hold, each shape once, or the chunks of its divisible
// total.
func (in Input) shapes(h Hold, existing map[string][]*corev1.Pod) []shape {
	if len(h.Unused.PodSets) == 0 {
		return in.chunks(h, existing)
	}
	var out []shape
	for _, set := range h.Unused.PodSets {
		key := keyOf(set)
		if i := slices.IndexFunc(out, func(s shape) bool { return s.key == key }); i >= 0 {
			out[i].set.Count += set.Count
		} else {
			out = append(out, shape{key, set})
		}
	}
	return out
}

// chunks divides a total into equal placeholders that fit the nodes, as few as possible
// and together no more than the total. While placeholders exist, their size stays.
func (in Input) chunks(h Hold, existing map[string][]*corev1.Pod) []shape {
	total := h.Unused.Totals.List()
	if len(total) == 0 {
		return nil
	}
	for _, key := range slices.Sorted(maps.Keys(existing)) {
		set := broker.PodSet{Name: "total", Requests: broker.FromList(requestsOf(existing[key][0]))}
		set.Count = times(total, set.Requests.List())
		if set.Count > 0 && set.Count <= maxChunks {
			return []shape{{keyOf(set), set}}
		}
	}
	var last []shape
	for n := int32(1); n <= maxChunks; n *= 2 {
		set := broker.PodSet{Name: "total", Count: n, Requests: broker.FromList(divide(total, int64(n)))}
		if len(set.Requests.List()) < len(total) {
			// A device cannot be divided.
			break
		}
		last = []shape{{keyOf(set), set}}
		if in.Fits == nil || in.Fits(set) >= n {
			break
		}
	}
	return last
}

// divide returns an n-th of each amount, rounded down to whole milli-cores, bytes and
// devices.
func divide(total corev1.ResourceList, n int64) corev1.ResourceList {
	out := corev1.ResourceList{}
	for name, amount := range total {
		if name == corev1.ResourceCPU {
			out[name] = *resource.NewMilliQuantity(amount.MilliValue()/n, amount.Format)
		} else {
			out[name] = *resource.NewQuantity(amount.Value()/n, amount.Format)
		}
	}
	return out
}

// times returns how often a part is contained in a total; 0 if the part lacks one of the
// total's resources.
func times(total, part corev1.ResourceList) int32 {
	if len(part) < len(total) {
		return 0
	}
	return int32(min(capacity.Ceil(part).FitsIn(capacity.Floor(total)), maxChunks+1))
}
