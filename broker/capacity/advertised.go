package capacity

import broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"

// ClassesOf are the node classes of an advertisement. One without any, such as one made by hand,
// is that of a single node with all that the cluster has left.
func ClassesOf(spec *broker.ClusterAdvertisementSpec) []broker.NodeClass {
	if len(spec.NodeClasses) > 0 || len(spec.Resources.Allocatable.List()) == 0 {
		return spec.NodeClasses
	}
	free := broker.FromList(Subtract(spec.Resources.Allocatable.List(), spec.Resources.Allocated.List()))
	if spec.Resources.Available != nil {
		free = *spec.Resources.Available
	}
	return []broker.NodeClass{{
		Name:        "all",
		FreeShapes:  []broker.FreeShape{{Nodes: 1, Free: free, Pods: broker.PodsOfTotal}},
		LargestNode: &spec.Resources.Allocatable,
	}}
}
