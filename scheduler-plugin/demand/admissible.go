package demand

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/version"
	kubeversion "k8s.io/component-base/version"
	"k8s.io/component-helpers/nodedeclaredfeatures"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/guest"
)

// virtualNodeLabels are the architecture and operating system of virtual nodes.
var virtualNodeLabels = map[string]string{corev1.LabelArchStable: guest.Arch, corev1.LabelOSStable: guest.OS}

// newest is the version of the build. It decides which features nodes still have to declare.
var newest = version.MustParseGeneric(kubeversion.DefaultKubeBinaryVersion)

// Admissible reports whether a pod can overflow. If not, reason is a clause that
// completes "the pod cannot overflow: …"; it is empty for pods that need no event
// (bound, terminating, gated or opted out).
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
			return false, "it is managed by a DaemonSet, which runs one pod on each node of this cluster"
		case "Node":
			return false, "it is a static pod"
		}
	}
	if _, mirror := pod.Annotations[corev1.MirrorPodAnnotationKey]; mirror {
		return false, "it is the mirror pod of a static pod"
	}
	if reason := guest.Refused(spec); reason != "" {
		return false, reason
	}
	for _, v := range spec.Volumes {
		switch {
		case v.PersistentVolumeClaim != nil || v.Ephemeral != nil:
			return false, fmt.Sprintf("volume %q is a PersistentVolumeClaim, which only this cluster can mount", v.Name)
		case certified(v.Projected):
			return false, fmt.Sprintf("volume %q projects a ClusterTrustBundle or pod certificate, which only this cluster issues", v.Name)
		case !portable(v.VolumeSource):
			return false, fmt.Sprintf("volume %q is storage that only this cluster can mount", v.Name)
		}
	}
	if len(spec.ResourceClaims) > 0 {
		return false, "it uses ResourceClaims, which only this cluster can allocate"
	}
	for _, c := range spec.TopologySpreadConstraints {
		if c.WhenUnsatisfiable == corev1.DoNotSchedule {
			return false, fmt.Sprintf("its topologySpreadConstraint on %q is DoNotSchedule, and a virtual node is one host; use ScheduleAnyway", c.TopologyKey)
		}
	}
	if a := spec.Affinity; a != nil {
		if a.PodAffinity != nil && len(a.PodAffinity.RequiredDuringSchedulingIgnoredDuringExecution) > 0 {
			return false, "it has required pod affinity, which cannot be evaluated in another cluster; use preferred pod affinity"
		}
		if a.PodAntiAffinity != nil && len(a.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution) > 0 {
			return false, "it has required pod anti-affinity, which cannot be evaluated in another cluster; use preferred pod anti-affinity"
		}
	}
	if want := virtualNodeLabels[corev1.LabelOSStable]; spec.OS != nil && string(spec.OS.Name) != want {
		return false, fmt.Sprintf("its operating system is %s, and only %s pods can overflow", spec.OS.Name, want)
	}
	if features := declared(spec); len(features) > 0 {
		return false, fmt.Sprintf("it needs %s, which nodes must declare and virtual nodes do not", strings.Join(features, ", "))
	}
	return nodeSelection(pod)
}

// declared returns the features that the scheduler requires the pod's node to declare.
func declared(spec *corev1.PodSpec) []string {
	features, err := nodedeclaredfeatures.DefaultFramework.InferForPodScheduling(&nodedeclaredfeatures.PodInfo{Spec: spec}, newest)
	if err != nil || features.IsEmpty() {
		return nil // an error says that there is no version
	}
	names, _ := nodedeclaredfeatures.DefaultFramework.Unmap(features)
	return names
}

// PodResources returns why a pod cannot overflow where guests have no pod-level resources, as
// Admissible does; empty if the pod has none either.
func PodResources(pod *corev1.Pod) (reason string) {
	if r := pod.Spec.Resources; r == nil || len(r.Requests)+len(r.Limits) == 0 {
		return ""
	}
	return "it has pod-level resources (spec.resources), which are not carried to other clusters; set the resources of its containers instead"
}

// portable reports whether every cluster can provide a volume: what Kubernetes
// itself makes on the pod's node.
func portable(v corev1.VolumeSource) bool {
	return v.EmptyDir != nil || v.ConfigMap != nil || v.Secret != nil || v.Projected != nil || v.DownwardAPI != nil || v.Image != nil ||
		v == corev1.VolumeSource{} // the API server defaults it to an emptyDir
}

// certified reports whether a projected volume, which may be nil, has certificates of this
// cluster. Unlike tokens, which most pods have and few use, only pods that need them have them.
func certified(p *corev1.ProjectedVolumeSource) bool {
	return p != nil && slices.ContainsFunc(p.Sources, func(s corev1.VolumeProjection) bool { return s.ClusterTrustBundle != nil || s.PodCertificate != nil })
}

// Steerable reports whether Spillway's scheduler may take over a new pod: it names no
// other scheduler, is not bound, has not opted out, and is not a DaemonSet's.
func Steerable(pod *corev1.Pod) bool {
	switch pod.Spec.SchedulerName {
	case "", corev1.DefaultSchedulerName, broker.SchedulerName:
	default:
		return false
	}
	if pod.Spec.NodeName != "" || pod.Labels[broker.LabelOverflow] == broker.OverflowDisabled {
		return false
	}
	controller := metav1.GetControllerOfNoCopy(pod)
	return controller == nil || controller.Kind != "DaemonSet"
}

// nodeSelection evaluates the node selector and the required node affinity.
func nodeSelection(pod *corev1.Pod) (ok bool, reason string) {
	for key, want := range virtualNodeLabels {
		if value, set := pod.Spec.NodeSelector[key]; set && value != want {
			return false, fmt.Sprintf("its nodeSelector requires %s=%s, and only %s can overflow", key, value, want)
		}
	}
	if _, pinned := pod.Spec.NodeSelector[corev1.LabelHostname]; pinned {
		return false, "its nodeSelector selects a node of this cluster by name"
	}
	affinity := pod.Spec.Affinity
	if affinity == nil || affinity.NodeAffinity == nil || affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return true, ""
	}
	// The terms are alternatives: one that another cluster can meet is enough.
	for _, term := range affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
		if reason = unmetTerm(term); reason == "" {
			return true, ""
		}
	}
	return false, reason
}

// unmetTerm returns why no virtual node can match a term; empty if one can.
func unmetTerm(term corev1.NodeSelectorTerm) string {
	for _, f := range term.MatchFields {
		if f.Operator == corev1.NodeSelectorOpIn {
			return "its node affinity selects nodes of this cluster by name"
		}
	}
	for _, e := range term.MatchExpressions {
		if e.Key == corev1.LabelHostname && e.Operator == corev1.NodeSelectorOpExists {
			return "its node affinity requires label " + e.Key + ", which no virtual node has"
		}
		if e.Operator != corev1.NodeSelectorOpIn {
			continue
		}
		switch e.Key {
		case corev1.LabelHostname:
			return "its node affinity selects nodes of this cluster by name"
		case corev1.LabelArchStable, corev1.LabelOSStable:
			if want := virtualNodeLabels[e.Key]; !slices.Contains(e.Values, want) {
				return fmt.Sprintf("its node affinity requires %s in %v, and only %s can overflow", e.Key, e.Values, want)
			}
		}
	}
	return ""
}
