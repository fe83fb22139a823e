package guest

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// mirrored are the conditions that are the guest's to say.
var mirrored = []corev1.PodConditionType{
	corev1.PodReady, corev1.ContainersReady, corev1.PodInitialized, corev1.PodReadyToStartContainers,
	corev1.DisruptionTarget,
}

// Status is what a home pod's status is to be, given its guest. PodScheduled is
// home's own: that the guest waits for a node there is said in words, since
// everybody at home would take it for a pod that still looks for one here.
func Status(home, guest *corev1.Pod) corev1.PodStatus {
	from := guest.Status.DeepCopy()
	status := *home.Status.DeepCopy()
	status.Phase, status.Reason, status.Message = from.Phase, from.Reason, from.Message
	status.StartTime, status.QOSClass = from.StartTime, from.QOSClass
	status.PodIP, status.PodIPs, status.HostIP, status.HostIPs = from.PodIP, from.PodIPs, from.HostIP, from.HostIPs
	status.ContainerStatuses, status.InitContainerStatuses = from.ContainerStatuses, from.InitContainerStatuses
	if home.Status.QOSClass != "" {
		status.QOSClass = home.Status.QOSClass // it cannot change
	}
	var conditions []corev1.PodCondition
	for _, c := range home.Status.Conditions {
		if !slices.Contains(mirrored, c.Type) || c.Type == corev1.DisruptionTarget && !has(from.Conditions, c.Type) {
			conditions = append(conditions, c)
		}
	}
	for _, c := range from.Conditions {
		switch {
		case slices.Contains(mirrored, c.Type):
			c.ObservedGeneration = 0 // of another object
			conditions = append(conditions, c)
		case c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && status.Message == "":
			status.Message = fmt.Sprintf("it waits for a node at the provider: %s", c.Message)
		}
	}
	status.Conditions = conditions
	if status.Phase == "" {
		status.Phase = corev1.PodPending
	}
	return status
}

func has(conditions []corev1.PodCondition, kind corev1.PodConditionType) bool {
	return slices.ContainsFunc(conditions, func(c corev1.PodCondition) bool { return c.Type == kind })
}
