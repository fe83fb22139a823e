package direct

import (
	"context"

	corev1 "k8s.io/api/core/v1"

	"github.com/spillway-dev/spillway/agent/internal/peering"
)

// RefusedReason implements peering.Driver. It is always empty: spillway-virtual-node
// retries a guest that the provider refuses, since capacity may appear there, and
// such a pod is evicted like any other that is not started in time.
func (d *Driver) RefusedReason(*corev1.Pod) string { return "" }

// Carry implements peering.Driver: spillway-virtual-node copies what pods refer to.
func (*Driver) Carry(context.Context, *corev1.Pod) (peering.Progress, error) {
	return peering.Done("Carried", "nothing to do"), nil
}
