package fake

import (
	"context"

	corev1 "k8s.io/api/core/v1"

	"github.com/spillway-dev/spillway/agent/internal/peering"
)

// ReasonRefused is the status reason by which a test marks a pod as rejected.
const ReasonRefused = "Refused"

// RefusedReason implements peering.Driver.
func (d *Driver) RefusedReason(pod *corev1.Pod) string {
	if pod.Status.Reason == ReasonRefused {
		return ReasonRefused
	}
	return ""
}

// Carry implements peering.Driver. A guest needs nothing. There is a call for each
// ConfigMap from which a container takes its environment, whose message is the name.
func (d *Driver) Carry(_ context.Context, pod *corev1.Pod) (peering.Progress, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, c := range pod.Spec.Containers {
		for _, from := range c.EnvFrom {
			d.calls = append(d.calls, Call{Method: "Carry", Message: []byte(from.ConfigMapRef.Name)})
		}
	}
	return peering.Done("Carried", "nothing to do"), nil
}
