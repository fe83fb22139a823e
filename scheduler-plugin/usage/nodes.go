package usage

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/klog/v2"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// ProviderOf returns the cluster whose capacity a node provides, by its label and name;
// empty for a node of this cluster, which may have such a name.
func ProviderOf(node *corev1.Node) string {
	if node == nil {
		return ""
	}
	if provider := node.Labels[broker.LabelProvider]; provider != "" && node.Name == broker.VirtualNodeName(provider) {
		return provider
	}
	return ""
}

// NodeAdmits reports whether a pod may run on a node of this cluster by its taints and
// labels.
func NodeAdmits(node *corev1.Node, pod *corev1.Pod) bool {
	if node.Spec.Unschedulable {
		return false
	}
	_, untolerated := corev1helpers.FindMatchingUntoleratedTaint(klog.Background(), node.Spec.Taints, pod.Spec.Tolerations,
		func(t *corev1.Taint) bool { return t.Effect != corev1.TaintEffectPreferNoSchedule }, false)
	if untolerated || OnlyFor(demand.AddedTolerations(pod.Spec.Tolerations), pod, node) != nil {
		return false
	}
	// An invalid selector is tried: the scheduler reports it.
	match, err := nodeaffinity.GetRequiredNodeAffinity(pod).Match(node)
	return match || err != nil
}

// ToleratesOverflow reports whether a pod tolerates the overflow taint of a node. Other
// taints may be removed before the pod is scheduled.
func ToleratesOverflow(pod *corev1.Pod, node *corev1.Node) bool {
	_, untolerated := corev1helpers.FindMatchingUntoleratedTaint(klog.Background(), node.Spec.Taints, pod.Spec.Tolerations,
		func(t *corev1.Taint) bool { return t.Key == broker.TaintOverflow }, false)
	return !untolerated
}

// OnlyFor returns the first taint of a node that a pod tolerates only by the added ones of
// its tolerations, or nil.
func OnlyFor(added []corev1.Toleration, pod *corev1.Pod, node *corev1.Node) *corev1.Taint {
	for i := range node.Spec.Taints {
		taint := &node.Spec.Taints[i]
		tolerates := func(t corev1.Toleration) bool { return t.ToleratesTaint(klog.Background(), taint, false) }
		if taint.Effect == corev1.TaintEffectPreferNoSchedule || !slices.ContainsFunc(added, tolerates) {
			continue
		}
		if !slices.ContainsFunc(pod.Spec.Tolerations, func(t corev1.Toleration) bool { return tolerates(t) && !slices.Contains(added, t) }) {
			return taint
		}
	}
	return nil
}
