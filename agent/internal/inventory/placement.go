package inventory

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// nodeOf returns the node that a pod uses, "" for none: the one that it is bound to, or for
// a pod of the cluster itself (consumer is empty) that waits, the only one that it may run
// on. Each pod of a DaemonSet is for one node, and comes with it.
func nodeOf(pod *corev1.Pod, consumer string) string {
	if pod.Spec.NodeName != "" || consumer != "" || !waits(pod) {
		return pod.Spec.NodeName
	}
	affinity := pod.Spec.Affinity
	if affinity == nil || affinity.NodeAffinity == nil || affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return ""
	}
	only := ""
	for _, term := range affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
		name := ""
		for _, field := range term.MatchFields {
			if field.Key == metav1.ObjectNameField && field.Operator == corev1.NodeSelectorOpIn && len(field.Values) == 1 {
				name = field.Values[0]
			}
		}
		if name == "" || only != "" && name != only {
			return ""
		}
		only = name
	}
	return only
}
