package inventory

import (
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/charge"
)

// GuestRecognizer returns the consumer that a pod runs for; ok is false for the
// cluster's own pods. namespaceLabels returns the labels of a namespace. A driver
// implements it by what only this cluster's own components can write: whatever
// the consumer writes on its pods proves nothing.
type GuestRecognizer func(pod *corev1.Pod, namespaceLabels func(namespace string) map[string]string) (consumer string, ok bool)

// AnyOf recognizes the guests that one of several recognizers does.
func AnyOf(recognizers ...GuestRecognizer) GuestRecognizer {
	return func(pod *corev1.Pod, namespaceLabels func(string) map[string]string) (consumer string, ok bool) {
		for _, recognize := range recognizers {
			if consumer, ok := recognize(pod, namespaceLabels); ok {
				return consumer, true
			}
		}
		return "", false
	}
}

// observedHolds is what guests use, by consumer.
func observedHolds(used map[string]corev1.ResourceList, guests map[string]int32) []broker.ObservedHold {
	var out []broker.ObservedHold
	for _, consumer := range slices.Sorted(maps.Keys(used)) {
		out = append(out, broker.ObservedHold{Requester: consumer, Used: broker.FromList(used[consumer]), Pods: guests[consumer]})
	}
	return out
}

// Guests are the guests of one consumer that have not finished.
type Guests struct {
	// Placed are those on a node whose capacity is offered.
	Placed []charge.Guest
	// Active is what all of them request, one by one.
	Active []corev1.ResourceList
}

// Places are the guests of one consumer that have not finished, and its placeholders.
// The pods must not be changed. Requests are those of the guests, one by one.
type Places struct {
	Guests, Placeholders []*corev1.Pod
	Requests             []corev1.ResourceList
}

// Guest returns the guest Guests[i].
func (p Places) Guest(i int) charge.Guest {
	return charge.Guest{Requests: p.Requests[i], Label: p.Guests[i].Labels[broker.LabelHold]}
}

// Runs reports whether the pods that are bound to a node (nil for none) run there.
func Runs(n *corev1.Node) bool { return n != nil && ready(n) }

// waits reports whether a pod waits for a node.
func waits(pod *corev1.Pod) bool {
	return pod.Spec.NodeName == "" && pod.DeletionTimestamp == nil && !Finished(pod) && len(pod.Spec.SchedulingGates) == 0
}

// claimOf is a pending pod as the capacity that it needs.
func claimOf(pod *corev1.Pod) broker.PodSet {
	set := broker.PodSet{
		Count: 1, Requests: broker.FromList(Requests(pod)), NodeSelector: pod.Spec.NodeSelector, Tolerations: pod.Spec.Tolerations,
	}
	if affinity := pod.Spec.Affinity; affinity != nil && affinity.NodeAffinity != nil {
		set.NodeAffinity = affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution
	}
	return set
}
