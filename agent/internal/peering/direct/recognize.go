package direct

import (
	corev1 "k8s.io/api/core/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// RecognizeGuest returns the consumer that a pod runs for. It is known by the
// namespace: this cluster's agent creates it for one consumer, whose token is
// valid in it alone and cannot change the namespace itself.
func RecognizeGuest(pod *corev1.Pod, namespaceLabels func(namespace string) map[string]string) (consumer string, ok bool) {
	labels := namespaceLabels(pod.Namespace)
	consumer = labels[broker.LabelGuestsOf]
	if labels[broker.LabelManagedBy] != broker.ManagedBySpillway || consumer == "" || pod.Namespace != broker.GuestNamespace(consumer) {
		return "", false
	}
	return consumer, true
}
