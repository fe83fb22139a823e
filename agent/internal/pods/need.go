package pods

import (
	corev1 "k8s.io/api/core/v1"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/virtualnode"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// Need is what the pods of a Reservation need.
type Need struct {
	// Pending pods have no node and may overflow.
	Pending []*corev1.Pod
	// Bound is the number of pods on each provider's virtual node that have not
	// finished.
	Bound map[string]int32
}

// Pods is the number of pods that need capacity.
func (n Need) Pods() int32 {
	total := int32(len(n.Pending))
	for _, pods := range n.Bound {
		total += pods
	}
	return total
}

// needOf computes the need of a Reservation from the pods of its namespace.
// Pending pods count only if the namespace is opted in.
func needOf(pods []corev1.Pod, reservation *broker.Reservation, key demand.Key, resolve demand.Resolve, optedIn bool) Need {
	need := Need{Bound: map[string]int32{}}
	for i := range pods {
		pod := &pods[i]
		provider := virtualnode.ProviderOf(pod.Spec.NodeName)
		local := pod.Spec.NodeName != "" && provider == ""
		if local || inventory.Finished(pod) || virtualnode.RunsOnEveryNode(pod) || !belongsTo(pod, reservation, key, resolve) {
			continue
		}
		switch {
		case provider != "":
			need.Bound[provider]++
		case optedIn && mayOverflow(pod):
			need.Pending = append(need.Pending, pod)
		}
	}
	return need
}

// belongsTo reports whether a pod has the key of a Reservation. A pod whose owner
// is gone belongs to it by its hold label.
func belongsTo(pod *corev1.Pod, reservation *broker.Reservation, key demand.Key, resolve demand.Resolve) bool {
	owner, ok := demand.OwnerOf(pod, resolve)
	if !ok {
		return reservation.Status.ID != "" && pod.Labels[broker.LabelHold] == demand.HoldLabel(reservation.Status.ID)
	}
	if owner.UID != key.OwnerUID {
		return false
	}
	shape, _ := demand.ShapeOf(pod)
	return shape == key.Shape
}

// mayOverflow reports whether a pod without a node may get a virtual one.
func mayOverflow(pod *corev1.Pod) bool {
	return pod.DeletionTimestamp == nil && len(pod.Spec.SchedulingGates) == 0 && pod.Labels[broker.LabelOverflow] != broker.OverflowDisabled
}
