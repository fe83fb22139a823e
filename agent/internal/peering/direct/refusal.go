package direct

import corev1 "k8s.io/api/core/v1"

// RefusedReason implements peering.Driver. It is always empty: spillway-virtual-node
// retries a guest that the provider refuses, since capacity may appear there, and
// such a pod is evicted like any other that is not started in time.
func (d *Driver) RefusedReason(*corev1.Pod) string { return "" }
