package fake

import corev1 "k8s.io/api/core/v1"

// ReasonRefused is the status reason by which a test marks a pod as rejected.
const ReasonRefused = "Refused"

// RefusedReason implements peering.Driver.
func (d *Driver) RefusedReason(pod *corev1.Pod) string {
	if pod.Status.Reason == ReasonRefused {
		return ReasonRefused
	}
	return ""
}
