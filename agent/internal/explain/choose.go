package explain

import (
	"cmp"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// Choose returns the pod that one most wants to know about, nil of none: one that waits, then one that
// does not run on its virtual node, then any there.
func Choose(pods []corev1.Pod) *corev1.Pod {
	rank := func(pod *corev1.Pod) int {
		switch running := pod.Status.Phase == corev1.PodRunning; {
		case pod.DeletionTimestamp != nil, pod.Status.Phase == corev1.PodSucceeded, pod.Status.Phase == corev1.PodFailed:
			return 4
		case pod.Spec.NodeName == "":
			return 0
		case pod.Labels[broker.LabelHold] != "" && !running:
			return 1
		case pod.Labels[broker.LabelHold] != "":
			return 2
		}
		return 3
	}
	if len(pods) == 0 {
		return nil
	}
	best := slices.MinFunc(pods, func(a, b corev1.Pod) int { return cmp.Or(cmp.Compare(rank(&a), rank(&b)), cmp.Compare(a.Name, b.Name)) })
	return &best
}

// Latest returns the last event of each reason.
func Latest(events []corev1.Event) (all []Event) {
	at := func(e corev1.Event) metav1.Time {
		switch {
		case e.Series != nil:
			return metav1.Time{Time: e.Series.LastObservedTime.Time}
		case !e.LastTimestamp.IsZero():
			return e.LastTimestamp
		case !e.EventTime.IsZero():
			return metav1.Time{Time: e.EventTime.Time}
		}
		return e.CreationTimestamp
	}
	slices.SortStableFunc(events, func(a, b corev1.Event) int { return at(b).Compare(at(a).Time) })
	seen := map[string]bool{}
	for _, e := range events {
		if !seen[e.Reason] {
			seen[e.Reason] = true
			all = append(all, Event{Reason: e.Reason, Message: e.Message})
		}
	}
	return all
}

// Minimum returns how many pods a gang needs, by what describes it.
func Minimum(group *unstructured.Unstructured, gang demand.Gang) (n int64) {
	switch {
	case gang.API == demand.CoschedulingGangs:
		n, _, _ = unstructured.NestedInt64(group.Object, "spec", "minMember")
	case gang.Workload == "":
		n, _, _ = unstructured.NestedInt64(group.Object, "spec", "schedulingPolicy", "gang", "minCount")
	default:
		groups, _, _ := unstructured.NestedSlice(group.Object, "spec", "podGroups")
		for _, of := range groups {
			if of, ok := of.(map[string]any); ok && of["name"] == gang.PodGroup {
				n, _, _ = unstructured.NestedInt64(of, "policy", "gang", "minCount")
			}
		}
	}
	return n
}
