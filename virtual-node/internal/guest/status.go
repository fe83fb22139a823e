package guest

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
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
	status.ContainerStatuses = ofHome(from.ContainerStatuses, home.Spec.Containers)
	status.InitContainerStatuses = ofHome(from.InitContainerStatuses, home.Spec.InitContainers)
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
			if c.Type == corev1.PodReady {
				c = gated(home, c)
			}
			conditions = append(conditions, c)
		case c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && status.Message == "":
			status.Message = fmt.Sprintf("waits for a node in %s: %s", provider(home), c.Message)
		}
	}
	status.Conditions = conditions
	if status.Phase == "" {
		status.Phase = corev1.PodPending
	}
	return status
}

// gated is the guest's readiness with home's readiness gates counted in: the
// guest knows nothing of them.
func gated(home *corev1.Pod, ready corev1.PodCondition) corev1.PodCondition {
	var closed []string
	changed := ready.LastTransitionTime
	for _, gate := range home.Spec.ReadinessGates {
		is := corev1.PodCondition{Status: "missing"}
		for _, c := range home.Status.Conditions {
			if c.Type == gate.ConditionType {
				is = c
			}
		}
		if is.Status != corev1.ConditionTrue {
			closed = append(closed, fmt.Sprintf("readiness gate %q is %s, not True", gate.ConditionType, is.Status))
		}
		if changed.Before(&is.LastTransitionTime) {
			changed = is.LastTransitionTime
		}
	}
	if ready.Status != corev1.ConditionTrue || len(home.Spec.ReadinessGates) == 0 {
		return ready
	}
	ready.LastTransitionTime = changed
	if len(closed) > 0 {
		ready.Status, ready.Reason, ready.Message = corev1.ConditionFalse, "ReadinessGatesNotReady", strings.Join(closed, "; ")
	}
	return ready
}

// ofHome leaves out containers that only the guest has: what the provider's own
// admission added.
func ofHome(statuses []corev1.ContainerStatus, containers []corev1.Container) []corev1.ContainerStatus {
	return slices.DeleteFunc(statuses, func(s corev1.ContainerStatus) bool {
		return !slices.ContainsFunc(containers, func(c corev1.Container) bool { return c.Name == s.Name })
	})
}

// provider is the cluster whose virtual node the pod is bound to.
func provider(home *corev1.Pod) string {
	if id, ok := strings.CutPrefix(home.Spec.NodeName, broker.VirtualNodePrefix); ok && id != "" {
		return id
	}
	return "the provider"
}

func has(conditions []corev1.PodCondition, kind corev1.PodConditionType) bool {
	return slices.ContainsFunc(conditions, func(c corev1.PodCondition) bool { return c.Type == kind })
}
