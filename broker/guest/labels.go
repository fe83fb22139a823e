package guest

import (
	"slices"

	corev1 "k8s.io/api/core/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Selectable removes from node classes those labels by which no pod can select them from
// another cluster. One virtual node stands for all classes, so it has a label only if
// every class with that label has the same value. If guests do not carry their node
// selection (carried is false), every class must have it, because a guest may run on
// any of them. A pod that selects nodes by another label is refused before it is
// granted, instead of staying pending.
func Selectable(classes []broker.NodeClass, carried bool) {
	values, count, used := map[string]map[string]bool{}, map[string]int{}, 0
	for _, class := range classes {
		if !runsGuests(class) {
			continue
		}
		used++
		for key, value := range class.Labels {
			if values[key] == nil {
				values[key] = map[string]bool{}
			}
			values[key][value] = true
			count[key]++
		}
	}
	for i := range classes {
		labels := map[string]string{}
		for key, value := range classes[i].Labels {
			// The packer evaluates these two for every pod.
			always := key == corev1.LabelArchStable || key == corev1.LabelOSStable
			if always || len(values[key]) == 1 && (carried || count[key] == used) {
				labels[key] = value
			}
		}
		classes[i].Labels = labels
	}
}

// runsGuests reports whether guests can run on the nodes of a class, as far as taints are
// concerned.
func runsGuests(class broker.NodeClass) bool {
	return !slices.ContainsFunc(class.Taints, func(t corev1.Taint) bool {
		return t.Effect != corev1.TaintEffectPreferNoSchedule && slices.Contains(forbiddenTaints, t.Key)
	})
}

// NodeLabels returns the labels of node classes, as Selectable left them, by which pod
// sets select nodes: those that the virtual node needs for these pods. Labels by which they
// exclude nodes are not among them: guests carry the exclusion to the provider, and on a
// virtual node with such a label the pods could not be placed at all.
func NodeLabels(classes []broker.NodeClass, sets []broker.PodSet) map[string]string {
	selected := map[string]bool{}
	for _, set := range sets {
		for key := range set.NodeSelector {
			selected[key] = true
		}
		if set.NodeAffinity == nil {
			continue
		}
		for _, term := range set.NodeAffinity.NodeSelectorTerms {
			for _, requirement := range term.MatchExpressions {
				if requirement.Operator != corev1.NodeSelectorOpNotIn && requirement.Operator != corev1.NodeSelectorOpDoesNotExist {
					selected[requirement.Key] = true
				}
			}
		}
	}
	var labels map[string]string
	for _, class := range classes {
		for key := range selected {
			value, ok := class.Labels[key]
			if !ok || key == corev1.LabelArchStable || key == corev1.LabelOSStable || reserved(key) {
				continue
			}
			if labels == nil {
				labels = map[string]string{}
			}
			labels[key] = value
		}
	}
	return labels
}

// reserved reports whether a label of a virtual node is Spillway's own, or identifies the
// node.
func reserved(key string) bool {
	switch key {
	case broker.LabelNodeType, broker.LabelProvider, broker.LabelManagedBy, corev1.LabelHostname:
		return true
	}
	return false
}
