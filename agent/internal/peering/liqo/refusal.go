package liqo

import corev1 "k8s.io/api/core/v1"

// reasonOffloadingBackOff is the status reason that Liqo's virtual kubelet gives
// a pod that it rejects.
const reasonOffloadingBackOff = "OffloadingBackOff"

// RefusedReason implements peering.Driver.
func (d *Driver) RefusedReason(pod *corev1.Pod) string {
	if pod.Status.Reason == reasonOffloadingBackOff {
		return reasonOffloadingBackOff
	}
	return ""
}
