package translate

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// mirroredConditions are the conditions that are taken from the guest.
var mirroredConditions = []corev1.PodConditionType{
	corev1.PodReady, corev1.ContainersReady, corev1.PodInitialized, corev1.PodReadyToStartContainers,
	corev1.DisruptionTarget,
}

// Status returns the status of an overflowed pod, given its guest. The condition
// PodScheduled stays the pod's own: copied from a guest that waits for a node, it
// would mark a bound pod as unscheduled. The wait is reported in the message.
func Status(pod, guest *corev1.Pod) corev1.PodStatus {
	from := guest.Status.DeepCopy()
	status := *pod.Status.DeepCopy()
	status.Phase, status.Reason, status.Message = from.Phase, from.Reason, from.Message
	status.StartTime = from.StartTime
	status.PodIP, status.PodIPs, status.HostIP, status.HostIPs = from.PodIP, from.PodIPs, from.HostIP, from.HostIPs
	status.ContainerStatuses = specifiedOnly(from.ContainerStatuses, pod.Spec.Containers)
	status.InitContainerStatuses = specifiedOnly(from.InitContainerStatuses, pod.Spec.InitContainers)
	if status.QOSClass == "" { // immutable once set
		status.QOSClass = from.QOSClass
	}
	var conditions []corev1.PodCondition
	for _, c := range pod.Status.Conditions {
		// The consumer, too, may announce a disruption.
		if !slices.Contains(mirroredConditions, c.Type) || c.Type == corev1.DisruptionTarget && !hasCondition(from.Conditions, c.Type) {
			conditions = append(conditions, c)
		}
	}
	for _, c := range from.Conditions {
		switch {
		case slices.Contains(mirroredConditions, c.Type):
			c.ObservedGeneration = 0 // the guest's, not the pod's
			if c.Type == corev1.PodReady {
				c = withReadinessGates(pod, c)
			}
			conditions = append(conditions, c)
		case c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && status.Message == "":
			status.Message = fmt.Sprintf("waiting for a node in %s: %s", providerOf(pod), c.Message)
		}
	}
	status.Conditions = conditions
	if status.Phase == "" {
		status.Phase = corev1.PodPending
	}
	return status
}

// withReadinessGates returns the guest's condition Ready combined with the
// readiness gates of the pod, which guests do not have.
func withReadinessGates(pod *corev1.Pod, ready corev1.PodCondition) corev1.PodCondition {
	if ready.Status != corev1.ConditionTrue {
		return ready
	}
	var notReady []string
	for _, gate := range pod.Spec.ReadinessGates {
		state := corev1.PodCondition{Status: "missing"}
		for _, c := range pod.Status.Conditions {
			if c.Type == gate.ConditionType {
				state = c
			}
		}
		if state.Status != corev1.ConditionTrue {
			notReady = append(notReady, fmt.Sprintf("readiness gate %q is %s, not True", gate.ConditionType, state.Status))
		}
		if ready.LastTransitionTime.Before(&state.LastTransitionTime) {
			ready.LastTransitionTime = state.LastTransitionTime
		}
	}
	if len(notReady) > 0 {
		ready.Status, ready.Reason, ready.Message = corev1.ConditionFalse, "ReadinessGatesNotReady", strings.Join(notReady, "; ")
	}
	return ready
}

// specifiedOnly drops the statuses of containers that are not in the pod's spec:
// the provider's admission may have added containers to the guest.
func specifiedOnly(statuses []corev1.ContainerStatus, containers []corev1.Container) []corev1.ContainerStatus {
	return slices.DeleteFunc(statuses, func(s corev1.ContainerStatus) bool {
		return !slices.ContainsFunc(containers, func(c corev1.Container) bool { return c.Name == s.Name })
	})
}

// providerOf returns the provider whose virtual node the pod is bound to.
func providerOf(pod *corev1.Pod) string {
	if id, ok := strings.CutPrefix(pod.Spec.NodeName, broker.VirtualNodePrefix); ok && id != "" {
		return id
	}
	return "the provider"
}

func hasCondition(conditions []corev1.PodCondition, kind corev1.PodConditionType) bool {
	return slices.ContainsFunc(conditions, func(c corev1.PodCondition) bool { return c.Type == kind })
}
