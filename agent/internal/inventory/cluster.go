package inventory

import corev1 "k8s.io/api/core/v1"

// Recognizer distinguishes what the drivers created from the cluster's own nodes
// and pods.
type Recognizer struct {
	Guest GuestRecognizer
	// VirtualNode reports whether a node is a driver's virtual node. Nodes with
	// Spillway's own labels are virtual in any case.
	VirtualNode func(*corev1.Node) bool
	// Placeholder returns the consumer that a pod holds a place for; nil if there are none.
	// Placeholders count as the hold, which the broker charges: not as pods.
	Placeholder func(pod *corev1.Pod) (consumer string, ok bool)
	// DropsSelection is whether guests lose the node selector and node affinity of their
	// pods, and so may run on any node whose taints they tolerate.
	DropsSelection bool
}

// PlaceholderFor returns the consumer that a pod holds a place for.
func (r Recognizer) PlaceholderFor(pod *corev1.Pod) (consumer string, ok bool) {
	if r.Placeholder == nil {
		return "", false
	}
	return r.Placeholder(pod)
}
