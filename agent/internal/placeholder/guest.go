package placeholder

import (
	"cmp"
	"slices"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	scheduling "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// HandOver is the place that a guest is to take: on Node, where Placeholders are removed
// for it.
type HandOver struct {
	Node         string
	Placeholders []*corev1.Pod
}

// PlaceFor returns the place of a guest with these requests among the placeholders of
// its consumer: before is what the holds need without the guest, after what they need
// with it, hold by hold. ok is false while no suitable placeholder has a place. within
// is whether the guest is within the holds: if not, no place is held for it.
// suits reports whether the guest may run on a node.
func PlaceFor(requests corev1.ResourceList, before, after []Hold, pods []*corev1.Pod, suits func(node string) bool) (place HandOver, within, ok bool) {
	uid, key, divisible, within := attributed(before, after)
	if !within {
		return place, false, false
	}
	var bound []*corev1.Pod
	for _, pod := range pods {
		if pod.Spec.NodeName != "" && suits(pod.Spec.NodeName) {
			bound = append(bound, pod)
		}
	}
	need := capacity.Ceil(requests)
	own := func(pod *corev1.Pod) bool {
		return HoldOf(pod) == uid && (divisible || pod.Labels[broker.LabelShape] == key)
	}
	rank := func(pod *corev1.Pod) int {
		if own(pod) {
			return 0
		}
		return 1
	}
	slices.SortFunc(bound, func(a, b *corev1.Pod) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)), capacity.Compare(capacity.Ceil(requestsOf(a)), capacity.Ceil(requestsOf(b))), cmp.Compare(a.Name, b.Name))
	})
	for _, pod := range bound {
		if need.FitsIn(capacity.Floor(requestsOf(pod))) > 0 {
			return HandOver{pod.Spec.NodeName, []*corev1.Pod{pod}}, true, true
		}
	}
	if divisible {
		place, ok = gathered(need, slices.DeleteFunc(bound, func(pod *corev1.Pod) bool { return !own(pod) }))
	}
	return place, true, ok
}

// gathered are chunks of one node that have room for a guest together.
func gathered(need capacity.Vector, chunks []*corev1.Pod) (best HandOver, ok bool) {
	sums, on := map[string]capacity.Vector{}, map[string][]*corev1.Pod{}
	for _, pod := range chunks {
		node := pod.Spec.NodeName
		if sums[node] == nil {
			sums[node] = capacity.Vector{}
		}
		if need.FitsIn(sums[node]) > 0 {
			continue
		}
		sums[node].Add(capacity.Floor(requestsOf(pod)), 1)
		on[node] = append(on[node], pod)
		if need.FitsIn(sums[node]) > 0 && (!ok || len(on[node]) < len(best.Placeholders)) {
			best, ok = HandOver{node, on[node]}, true
		}
	}
	return best, ok
}

// attributed is the hold, and the shape of it, that needs one pod less with the guest.
func attributed(before, after []Hold) (uid types.UID, key string, divisible, ok bool) {
	for i, h := range before {
		for j, set := range h.Unused.PodSets {
			if after[i].Unused.PodSets[j].Count < set.Count {
				return h.UID, keyOf(set), false, true
			}
		}
		if len(h.Unused.PodSets) == 0 && !capacity.Equal(h.Unused, after[i].Unused) {
			return h.UID, "", true, true
		}
	}
	return "", "", false, false
}

// RunsOn reports whether a node matches a pod's node selector and required node affinity,
// and the pod tolerates its taints.
func RunsOn(pod *corev1.Pod, node *corev1.Node) bool {
	if match, err := nodeaffinity.GetRequiredNodeAffinity(pod).Match(node); err != nil || !match {
		return false
	}
	_, untolerated := scheduling.FindMatchingUntoleratedTaint(logr.Discard(), node.Spec.Taints, pod.Spec.Tolerations, func(t *corev1.Taint) bool {
		return t.Effect == corev1.TaintEffectNoSchedule || t.Effect == corev1.TaintEffectNoExecute
	}, false)
	return !untolerated
}
