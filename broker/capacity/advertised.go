package capacity

import (
	"slices"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// ClassesOf are the node classes of an advertisement. One without any that says what is available,
// such as one made by hand, is that of a single node.
func ClassesOf(spec *broker.ClusterAdvertisementSpec) []broker.NodeClass {
	if len(spec.NodeClasses) > 0 || spec.Resources.Available == nil {
		return spec.NodeClasses
	}
	return []broker.NodeClass{{
		Name:        "all",
		FreeShapes:  []broker.FreeShape{{Nodes: 1, Free: *spec.Resources.Available, Pods: broker.PodsOfTotal}},
		LargestNode: &spec.Resources.Allocatable,
	}}
}

// PricedByClass reports whether some of a cluster's nodes have prices of their own.
func PricedByClass(spec *broker.ClusterAdvertisementSpec) bool {
	return slices.ContainsFunc(spec.NodeClasses, func(c broker.NodeClass) bool { return c.Cost != nil })
}

// MayRun reports whether the nodes of a class can run pods of a set while no others are there.
func MayRun(class *broker.NodeClass, set *broker.PodSet) bool {
	s := newShape(nil, set)
	return (class.LargestNode == nil || s.request.FitsIn(ceilOf(class.LargestNode)) > 0) && s.mismatch(newNodeClass(0, class, "")) == ""
}
