// Package guest says what of a pod's placement its guest carries to a provider. What
// is judged before a grant and what runs afterwards are the same, because both sides
// use these functions: the packer of the broker and of the provider, and the programs
// that create guests.
package guest

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

const (
	// Arch and OS are the architecture and operating system of virtual nodes, and so of
	// all guests.
	Arch, OS = "amd64", "linux"
	// PriorityClass is the PriorityClass of guests at a provider. They preempt no pod.
	PriorityClass = "spillway-guest"
	// AnnotationEvict tells the provider's cluster autoscaler whether it may evict a pod to
	// remove its node. A consumer has no say in that.
	AnnotationEvict = "cluster-autoscaler.kubernetes.io/safe-to-evict"
)

// forbiddenTaints are those of nodes that run no guest: the chart's policies for
// guests refuse a toleration of them.
var forbiddenTaints = []string{
	broker.TaintOverflow, "virtual-kubelet.io/provider",
	"node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master", corev1.TaintNodeUnschedulable,
	// Kubernetes adds these to every pod, for its own nodes.
	corev1.TaintNodeNotReady, corev1.TaintNodeUnreachable,
}

// Tolerations returns the tolerations of a pod that its guest carries: those of its
// author, without the ones that no provider admits. Everything from the toleration
// of broker.TaintOverflow on was appended for the virtual node.
func Tolerations(all []corev1.Toleration) []corev1.Toleration {
	if i := slices.IndexFunc(all, func(t corev1.Toleration) bool { return t.Key == broker.TaintOverflow }); i >= 0 {
		all = all[:i]
	}
	var carried []corev1.Toleration
	for _, t := range all {
		if t.Key != "" && !slices.Contains(forbiddenTaints, t.Key) {
			carried = append(carried, *t.DeepCopy())
		}
	}
	return carried
}

// NodeAffinity returns the required node affinity of the guest of a pod with a required
// node affinity of its own, or nil. The guest runs on nodes of its architecture and
// operating system, and on no virtual node: it is not lent to a third cluster.
func NodeAffinity(own *corev1.NodeSelector) *corev1.NodeSelector {
	in := func(key string, operator corev1.NodeSelectorOperator, value string) corev1.NodeSelectorRequirement {
		return corev1.NodeSelectorRequirement{Key: key, Operator: operator, Values: []string{value}}
	}
	always := []corev1.NodeSelectorRequirement{
		in(corev1.LabelOSStable, corev1.NodeSelectorOpIn, OS),
		in(corev1.LabelArchStable, corev1.NodeSelectorOpIn, Arch),
		in(broker.LabelNodeType, corev1.NodeSelectorOpNotIn, broker.NodeTypeVirtual),
	}
	if own == nil {
		return &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: always}}}
	}
	carried := own.DeepCopy()
	for i := range carried.NodeSelectorTerms {
		// A term without requirements matches no node. With requirements it would.
		if term := &carried.NodeSelectorTerms[i]; len(term.MatchExpressions)+len(term.MatchFields) > 0 {
			term.MatchExpressions = append(term.MatchExpressions, always...)
		}
	}
	return carried
}

// Controller returns the owner of all guests of a namespace: the namespace itself,
// which exists as long as they may. With a controller a guest does not keep its node
// from being drained.
func Controller(namespace *corev1.Namespace) metav1.OwnerReference {
	controller := true
	return metav1.OwnerReference{APIVersion: "v1", Kind: "Namespace", Name: namespace.Name, UID: namespace.UID, Controller: &controller}
}
