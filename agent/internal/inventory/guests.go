package inventory

import (
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
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
