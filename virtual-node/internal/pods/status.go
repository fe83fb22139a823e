package pods

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// Reasons of a pod's status and Events.
const (
	// reasonConfigMissing is a kubelet's reason for a container that waits for a
	// ConfigMap or Secret.
	reasonConfigMissing    = "CreateContainerConfigError"
	reasonGuestDiffers     = "GuestDiffers"
	reasonGuestLost        = "GuestLost"
	reasonGuestRefused     = "GuestRefused"
	reasonWaitingForConfig = "WaitingForConfiguration"
	reasonSecretNotCopied  = "SecretNotCopied"
)

// exitCodeUnknown is the exit code of a container whose own is not known: that of
// a container that was killed.
const exitCodeUnknown = 137

// isTerminal reports whether a pod has finished.
func isTerminal(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// isRunning reports whether a container of a pod runs, or is not known not to.
func isRunning(status corev1.PodStatus) bool {
	return slices.ContainsFunc(status.ContainerStatuses, func(c corev1.ContainerStatus) bool {
		return c.State.Terminated == nil && c.State.Waiting == nil
	})
}

// waitingStatus returns the status of a pod that has no guest yet.
func waitingStatus(pod *corev1.Pod, reason, message string) corev1.PodStatus {
	status := *pod.Status.DeepCopy()
	status.Phase, status.Reason, status.Message = corev1.PodPending, reason, message
	waiting := func(containers []corev1.Container) []corev1.ContainerStatus {
		var out []corev1.ContainerStatus
		for _, c := range containers {
			out = append(out, corev1.ContainerStatus{Name: c.Name, Image: c.Image,
				State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: message}}})
		}
		return out
	}
	status.ContainerStatuses, status.InitContainerStatuses = waiting(pod.Spec.Containers), waiting(pod.Spec.InitContainers)
	return status
}

// terminatedStatus returns the status of a pod whose guest no longer exists: all
// containers are terminated. The phase is not changed.
func terminatedStatus(pod *corev1.Pod, reason, message string, now metav1.Time) corev1.PodStatus {
	status := *pod.Status.DeepCopy()
	status.Reason, status.Message = reason, message
	for _, containers := range [][]corev1.ContainerStatus{status.ContainerStatuses, status.InitContainerStatuses} {
		for i := range containers {
			c := &containers[i]
			c.Ready, c.Started = false, ptr.To(false)
			if c.State.Terminated != nil {
				continue
			}
			terminated := &corev1.ContainerStateTerminated{ExitCode: exitCodeUnknown, Reason: reason, Message: message, FinishedAt: now, ContainerID: c.ContainerID}
			if c.State.Running != nil {
				terminated.StartedAt = c.State.Running.StartedAt
			}
			c.State = corev1.ContainerState{Terminated: terminated}
		}
	}
	for i := range status.Conditions {
		switch c := &status.Conditions[i]; c.Type {
		case corev1.PodReady, corev1.ContainersReady:
			if c.Status != corev1.ConditionFalse {
				c.Status, c.Reason, c.LastTransitionTime = corev1.ConditionFalse, reason, now
			}
		}
	}
	return status
}

// setCondition replaces the condition of the same type, and keeps its transition
// time if the status is the same.
func setCondition(conditions []corev1.PodCondition, c corev1.PodCondition) []corev1.PodCondition {
	for i := range conditions {
		if conditions[i].Type == c.Type {
			if conditions[i].Status == c.Status {
				c.LastTransitionTime = conditions[i].LastTransitionTime
			}
			conditions[i] = c
			return conditions
		}
	}
	return append(conditions, c)
}
