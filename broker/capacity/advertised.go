package capacity

import broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"

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
