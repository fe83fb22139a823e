package demand

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// arch and os are what virtual nodes offer.
const (
	virtualNodeArch = "amd64"
	virtualNodeOS   = "linux"
)

// Admissible says whether capacity may be asked for on behalf of a pod. Where it
// may not, reason is a clause that completes "the pod cannot overflow: …"; it is
// empty for pods that nobody waits to see overflow (bound, ending, gated or
// opted out), which need no event.
func Admissible(pod *corev1.Pod) (ok bool, reason string) {
	spec := &pod.Spec
	if spec.NodeName != "" || pod.DeletionTimestamp != nil || len(spec.SchedulingGates) > 0 ||
		pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed ||
		pod.Labels[broker.LabelOverflow] == broker.OverflowDisabled {
		return false, ""
	}
	if controller := metav1.GetControllerOfNoCopy(pod); controller != nil {
		switch controller.Kind {
		case "DaemonSet":
			return false, "it belongs to a DaemonSet, whose pods are one for each node of this cluster"
		case "Node":
			return false, "it is a static pod of one node"
		}
	}
	if _, mirror := pod.Annotations[corev1.MirrorPodAnnotationKey]; mirror {
		return false, "it is the mirror of a static pod"
	}
	for _, v := range spec.Volumes {
		switch {
		case v.HostPath != nil:
			return false, fmt.Sprintf("volume %q is a directory of a node of this cluster (hostPath)", v.Name)
		case v.PersistentVolumeClaim != nil || v.Ephemeral != nil:
			return false, fmt.Sprintf("volume %q is a claim that only this cluster can mount", v.Name)
		}
	}
	if len(spec.ResourceClaims) > 0 {
		return false, "it uses resource claims, which only this cluster can allocate"
	}
	if spec.HostNetwork {
		return false, "it uses the network of its node"
	}
	if spec.HostPID || spec.HostIPC {
		return false, "it uses the processes of its node (hostPID, hostIPC)"
	}
	for _, c := range slices.Concat(spec.InitContainers, spec.Containers) {
		if s := c.SecurityContext; s != nil && s.Privileged != nil && *s.Privileged {
			return false, fmt.Sprintf("container %q is privileged, which no other cluster allows a guest", c.Name)
		}
		for _, port := range c.Ports {
			if port.HostPort != 0 {
				return false, fmt.Sprintf("container %q takes port %d of its node", c.Name, port.HostPort)
			}
		}
	}
	for _, c := range spec.TopologySpreadConstraints {
		if c.WhenUnsatisfiable == corev1.DoNotSchedule {
			return false, fmt.Sprintf("it must spread over %q (topologySpreadConstraints with DoNotSchedule), and a virtual node is one host; ScheduleAnyway can overflow", c.TopologyKey)
		}
	}
	if a := spec.Affinity; a != nil {
		if a.PodAffinity != nil && len(a.PodAffinity.RequiredDuringSchedulingIgnoredDuringExecution) > 0 {
			return false, "it requires affinity to other pods, which cannot be judged on a virtual node; preferred affinity can overflow"
		}
		if a.PodAntiAffinity != nil && len(a.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution) > 0 {
			return false, "it requires anti-affinity to other pods, which cannot be judged on a virtual node; preferred anti-affinity can overflow"
		}
	}
	if spec.OS != nil && string(spec.OS.Name) != virtualNodeOS {
		return false, fmt.Sprintf("it is for %s, and only %s pods can overflow", spec.OS.Name, virtualNodeOS)
	}
	return nodeChoice(pod)
}

// nodeChoice judges the node selector and the required node affinity.
func nodeChoice(pod *corev1.Pod) (ok bool, reason string) {
	for key, only := range map[string]string{corev1.LabelArchStable: virtualNodeArch, corev1.LabelOSStable: virtualNodeOS} {
		if value, set := pod.Spec.NodeSelector[key]; set && value != only {
			return false, fmt.Sprintf("its node selector asks for %s=%s, and only %s can overflow", key, value, only)
		}
	}
	if _, pinned := pod.Spec.NodeSelector[corev1.LabelHostname]; pinned {
		return false, "its node selector names one node of this cluster"
	}
	affinity := pod.Spec.Affinity
	if affinity == nil || affinity.NodeAffinity == nil || affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return true, ""
	}
	// The terms are alternatives: one that can be met elsewhere is enough.
	for _, term := range affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
		clash := termClash(term)
		if clash == "" {
			return true, ""
		}
		reason = clash
	}
	return false, reason
}

func termClash(term corev1.NodeSelectorTerm) string {
	for _, f := range term.MatchFields {
		if f.Operator == corev1.NodeSelectorOpIn {
			return "its node affinity names nodes of this cluster"
		}
	}
	for _, e := range term.MatchExpressions {
		if e.Operator != corev1.NodeSelectorOpIn {
			continue
		}
		switch e.Key {
		case corev1.LabelHostname:
			return "its node affinity names nodes of this cluster"
		case corev1.LabelArchStable:
			if !slices.Contains(e.Values, virtualNodeArch) {
				return fmt.Sprintf("its node affinity asks for %s %v, and only %s can overflow", e.Key, e.Values, virtualNodeArch)
			}
		case corev1.LabelOSStable:
			if !slices.Contains(e.Values, virtualNodeOS) {
				return fmt.Sprintf("its node affinity asks for %s %v, and only %s can overflow", e.Key, e.Values, virtualNodeOS)
			}
		}
	}
	return ""
}
