package pods

import corev1 "k8s.io/api/core/v1"

// Reasons of the events on pods that are bound to a virtual node.
const (
	// reasonNotStarted: the provider has not started the pod, and it cannot be
	// evicted.
	reasonNotStarted = "PodNotStarted"
	// reasonEvicted: the provider has not started the pod, which was evicted.
	reasonEvicted = "EvictedFromVirtualNode"
	// reasonForceDeleted: the pod was deleted, and the provider is unreachable.
	reasonForceDeleted = "ForceDeleted"
)

// reportNotStarted records why a pod that is not started stays on the virtual node.
// The recorder counts repetitions in one event.
func (r *Reconciler) reportNotStarted(pod *corev1.Pod, provider, cause, next string) {
	r.recorder.Eventf(pod, nil, corev1.EventTypeWarning, reasonNotStarted, "Evict",
		"Pod is waiting on the virtual node for provider %s: %s. %s", provider, cause, next)
}

func (r *Reconciler) reportEvicted(pod *corev1.Pod, provider, cause string) {
	r.recorder.Eventf(pod, nil, corev1.EventTypeWarning, reasonEvicted, "Evict",
		"Evicted from the virtual node for provider %s: %s. Its replacement is scheduled again.", provider, cause)
}

func (r *Reconciler) reportForceDeleted(pod *corev1.Pod, provider string) {
	r.recorder.Eventf(pod, nil, corev1.EventTypeWarning, reasonForceDeleted, "Delete",
		"Force-deleted: provider %s has been unreachable for more than %s and may still run the pod.", provider, r.ProviderLostAfter)
}
