package inventory

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"slices"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
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

// knownLabels are those that all guests and their namespaces have.
var knownLabels = labels.Set{broker.LabelManagedBy: broker.ManagedBySpillway}

// repelsGuests reports whether a bound pod has a required anti-affinity to every guest. An
// anti-affinity to pods of other labels may concern some of them: only the scheduler of the
// provider, which sees the labels, can tell.
func repelsGuests(pod *corev1.Pod) bool {
	if pod.Spec.NodeName == "" || pod.Spec.Affinity == nil || pod.Spec.Affinity.PodAntiAffinity == nil {
		return false
	}
	return slices.ContainsFunc(pod.Spec.Affinity.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution, func(t corev1.PodAffinityTerm) bool { return termRepels(&t) })
}

func termRepels(term *corev1.PodAffinityTerm) bool {
	matches := func(selector *metav1.LabelSelector) bool {
		parsed, err := metav1.LabelSelectorAsSelector(selector)
		return err == nil && parsed.Matches(knownLabels)
	}
	// Without a selector of namespaces it concerns pods of listed ones, or of its own.
	return term.NamespaceSelector != nil && matches(term.NamespaceSelector) && matches(term.LabelSelector)
}

// repels reports whether a pod on one node keeps guests off another, or the same.
func repels(pod *corev1.Pod, on, from *corev1.Node) bool {
	if on == nil || from == nil {
		return false
	}
	terms := pod.Spec.Affinity.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution
	for i := range terms {
		if !termRepels(&terms[i]) {
			continue
		}
		if value, labelled := on.Labels[terms[i].TopologyKey]; labelled && value == from.Labels[terms[i].TopologyKey] {
			return true
		}
	}
	return false
}
