package translate

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// mirroredConditions are the conditions that are taken from the guest.
var mirroredConditions = []corev1.PodConditionType{
	corev1.PodReady, corev1.ContainersReady, corev1.PodInitialized, corev1.PodReadyToStartContainers,
	corev1.DisruptionTarget, broker.PodMustLeave,
}

// Status returns the status of an overflowed pod, given its guest. The condition
// PodScheduled stays the pod's own: copied from a guest that waits for a node, it
// would mark a bound pod as unscheduled. The wait is reported in the message.
func Status(pod, guest *corev1.Pod) corev1.PodStatus {
	from := guest.Status.DeepCopy()
	status := *pod.Status.DeepCopy()
	bound(from)
	status.Phase, status.Reason, status.Message = from.Phase, from.Reason, from.Message
	status.StartTime = from.StartTime
	status.PodIP, status.PodIPs = addresses(from.PodIP, from.PodIPs, func(p corev1.PodIP) string { return p.IP }, func(ip string) corev1.PodIP { return corev1.PodIP{IP: ip} })
	status.HostIP, status.HostIPs = addresses(from.HostIP, from.HostIPs, func(h corev1.HostIP) string { return h.IP }, func(ip string) corev1.HostIP { return corev1.HostIP{IP: ip} })
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
		case slices.Contains(mirroredConditions, c.Type) && hasCondition(conditions, c.Type) && c.Type != corev1.DisruptionTarget:
			// A provider that repeats a condition does not make the pod's status grow.
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

// maxText is the longest reason or message that is taken from a provider: that of a
// container's termination message.
const maxText = 4096

// bound shortens the texts of a guest's status: its provider is not trusted, and a pod
// that is too large for the API server could not be updated any more.
func bound(status *corev1.PodStatus) {
	cut := func(texts ...*string) {
		for _, text := range texts {
			if len(*text) > maxText {
				*text = strings.ToValidUTF8((*text)[:maxText], "")
			}
		}
	}
	cut(&status.Reason, &status.Message)
	for i := range status.Conditions {
		cut(&status.Conditions[i].Reason, &status.Conditions[i].Message)
	}
	for _, containers := range [][]corev1.ContainerStatus{status.InitContainerStatuses, status.ContainerStatuses} {
		for i := range containers {
			cut(&containers[i].Image, &containers[i].ImageID, &containers[i].ContainerID)
			for _, state := range []*corev1.ContainerState{&containers[i].State, &containers[i].LastTerminationState} {
				if state.Waiting != nil {
					cut(&state.Waiting.Reason, &state.Waiting.Message)
				}
				if state.Terminated != nil {
					cut(&state.Terminated.Reason, &state.Terminated.Message)
				}
			}
		}
	}
}

// addresses returns the first address of each IP family that can be one of a pod or node.
// Services of the consumer send traffic to a pod's addresses: a provider cannot direct
// it to the consumer's own nodes by an address that means another host on each.
func addresses[T any](first string, all []T, text func(T) string, of func(string) T) (string, []T) {
	if len(all) == 0 && first != "" {
		all = []T{of(first)}
	}
	var out []T
	families := map[bool]bool{}
	for _, a := range all {
		ip, err := netip.ParseAddr(text(a))
		if err != nil || ip.Zone() != "" || ip.Is4In6() || !ip.IsGlobalUnicast() || families[ip.Is4()] {
			continue
		}
		families[ip.Is4()] = true
		out = append(out, of(ip.String()))
	}
	if len(out) == 0 {
		return "", nil
	}
	return text(out[0]), out
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
	seen := map[string]bool{}
	return slices.DeleteFunc(statuses, func(s corev1.ContainerStatus) bool {
		repeated := seen[s.Name]
		seen[s.Name] = true
		return repeated || !slices.ContainsFunc(containers, func(c corev1.Container) bool { return c.Name == s.Name })
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
