package translate

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/guest"
)

// mirroredConditions are the conditions that are taken from the guest.
var mirroredConditions = []corev1.PodConditionType{
	corev1.PodReady, corev1.ContainersReady, corev1.PodInitialized, corev1.PodReadyToStartContainers,
	corev1.DisruptionTarget, broker.PodMustLeave,
}

// Status returns the status of an overflowed pod, given its guest. The condition
// PodScheduled stays the pod's own: copied from a guest that waits for a node, it
// would mark a bound pod as unscheduled. The wait is reported in the message.
//
// The provider is not trusted: of the guest's status, only what is listed here is taken, each
// text shortened and each list as long as the pod's own at most. A pod that is too large for
// the API server could not be updated any more. Addresses count only in the networks of the
// provider's pods.
func Status(pod, of *corev1.Pod, networks ...netip.Prefix) corev1.PodStatus {
	from := &of.Status
	status := *pod.Status.DeepCopy()
	status.Phase, status.Reason, status.Message = phase(from.Phase), text(from.Reason), text(from.Message)
	status.StartTime = startTime(pod, from.StartTime)
	status.PodIP, status.PodIPs = guest.Addresses(from.PodIP, from.PodIPs, networks)
	// That of the provider's node means nothing here.
	status.HostIP, status.HostIPs = "", nil
	status.ContainerStatuses = containerStatuses(from.ContainerStatuses, pod.Spec.Containers)
	status.InitContainerStatuses = containerStatuses(from.InitContainerStatuses, pod.Spec.InitContainers)
	if status.QOSClass == "" { // immutable once set
		status.QOSClass = qosClass(from.QOSClass)
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
		case slices.Contains(mirroredConditions, c.Type) && hasCondition(conditions, c.Type):
			// A provider that repeats a condition does not make the pod's status grow.
		case slices.Contains(mirroredConditions, c.Type):
			c = conditionOf(c)
			if c.Type == corev1.PodReady {
				c = withReadinessGates(pod, c)
			}
			conditions = append(conditions, c)
		case c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && status.Message == "":
			status.Message = fmt.Sprintf("waiting for a node in %s: %s", providerOf(pod), text(c.Message))
		}
	}
	status.Conditions = conditions
	return status
}

// maxText is the longest text that is taken from a provider: that of a container's
// termination message.
const maxText = 4096

func text(from string) string {
	if len(from) > maxText {
		from = from[:maxText]
	}
	return strings.ToValidUTF8(from, "")
}

// phase is Pending for a guest without a status, and Unknown where it is none of Kubernetes'.
func phase(from corev1.PodPhase) corev1.PodPhase {
	switch from {
	case corev1.PodPending, corev1.PodRunning, corev1.PodSucceeded, corev1.PodFailed:
		return from
	case "":
		return corev1.PodPending
	}
	return corev1.PodUnknown
}

func qosClass(from corev1.PodQOSClass) corev1.PodQOSClass {
	switch from {
	case corev1.PodQOSGuaranteed, corev1.PodQOSBurstable, corev1.PodQOSBestEffort:
		return from
	}
	return ""
}

// at is a time that every client can read: JSON has years of four digits, and a list that has
// another one is read by none.
func at(from metav1.Time) metav1.Time {
	if year := from.UTC().Year(); year < 1 || year > 9999 {
		return metav1.Time{}
	}
	return from
}

// startTime is when a guest has started, nil if it has not.
func startTime(pod *corev1.Pod, from *metav1.Time) *metav1.Time {
	if from == nil {
		return nil
	}
	started := at(*from)
	if started.IsZero() {
		started = pod.CreationTimestamp
	}
	return &started
}

// conditionOf is one of the guest without the generation, which is the guest's.
func conditionOf(from corev1.PodCondition) corev1.PodCondition {
	out := corev1.PodCondition{
		Type: from.Type, Status: corev1.ConditionUnknown, Reason: text(from.Reason), Message: text(from.Message),
		LastProbeTime: at(from.LastProbeTime), LastTransitionTime: at(from.LastTransitionTime),
	}
	if from.Status == corev1.ConditionTrue || from.Status == corev1.ConditionFalse {
		out.Status = from.Status
	}
	return out
}

// containerStatuses are those of the containers of the pod's spec: the provider's admission
// may have added containers to the guest. What they say of resources is not taken: the
// consumer's scheduler and quotas would count it instead of the spec, which guests follow.
func containerStatuses(from []corev1.ContainerStatus, containers []corev1.Container) (out []corev1.ContainerStatus) {
	seen := map[string]bool{}
	for i := range from {
		s := &from[i]
		if seen[s.Name] || !slices.ContainsFunc(containers, func(c corev1.Container) bool { return c.Name == s.Name }) {
			continue
		}
		seen[s.Name] = true
		out = append(out, corev1.ContainerStatus{
			Name: s.Name, State: state(s.State), LastTerminationState: state(s.LastTerminationState), Ready: s.Ready, RestartCount: max(s.RestartCount, 0),
			Image: text(s.Image), ImageID: text(s.ImageID), ContainerID: text(s.ContainerID), Started: s.Started,
		})
	}
	return out
}

func state(from corev1.ContainerState) (out corev1.ContainerState) {
	if w := from.Waiting; w != nil {
		out.Waiting = &corev1.ContainerStateWaiting{Reason: text(w.Reason), Message: text(w.Message)}
	}
	if r := from.Running; r != nil {
		out.Running = &corev1.ContainerStateRunning{StartedAt: at(r.StartedAt)}
	}
	if t := from.Terminated; t != nil {
		out.Terminated = &corev1.ContainerStateTerminated{
			ExitCode: t.ExitCode, Signal: t.Signal, Reason: text(t.Reason), Message: text(t.Message),
			StartedAt: at(t.StartedAt), FinishedAt: at(t.FinishedAt), ContainerID: text(t.ContainerID),
		}
	}
	return out
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
