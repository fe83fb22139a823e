package inventory

import (
	"cmp"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	podresource "k8s.io/component-helpers/resource"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// node is an eligible node and what is free on it.
type node struct {
	*corev1.Node
	// free is allocatable less what pods (guests included) request and less this
	// node's part of the headroom. It is never negative.
	free corev1.ResourceList
	// freePods is how many more pods the node may run.
	freePods int32
}

// boundPod is a pod that uses one of the eligible nodes.
type boundPod struct {
	*corev1.Pod
	requests corev1.ResourceList
}

// Slots are the eligible nodes, sorted by name, each a slot of its own with the
// name of the node class that it is advertised in.
func (c *Cluster) Slots(headroom corev1.ResourceList) []capacity.Slot {
	nodes, _ := c.nodes(headroom)
	var slots []capacity.Slot
	for _, class := range classify(nodes) {
		for _, n := range class.nodes {
			slots = append(slots, capacity.Slot{
				Class: &broker.NodeClass{Name: class.Name, Labels: n.Labels, Taints: n.Spec.Taints, Arch: class.Arch},
				Node:  n.Name, Nodes: 1, Free: capacity.Floor(n.free), Pods: int64(n.freePods),
			})
		}
	}
	slices.SortFunc(slots, func(a, b capacity.Slot) int { return cmp.Compare(a.Node, b.Node) })
	return slots
}

// nodes are the eligible nodes, sorted by name, and the pods bound to them. The
// headroom is taken from the nodes with most free capacity, so that no shape
// contains it; from nodes with a NoSchedule or NoExecute taint only if the others
// do not have it.
func (c *Cluster) nodes(headroom corev1.ResourceList) (nodes []node, pods []boundPod) {
	for _, n := range c.Nodes {
		if c.Recognizer.Eligible(n) {
			nodes = append(nodes, node{Node: n, free: corev1.ResourceList{}, freePods: int32(n.Status.Allocatable.Pods().Value())})
		}
	}
	slices.SortFunc(nodes, func(a, b node) int { return cmp.Compare(a.Name, b.Name) })
	index := map[string]int{}
	for i, n := range nodes {
		index[n.Name] = i
		for name, amount := range n.Status.Allocatable {
			if name != corev1.ResourcePods {
				n.free[name] = amount.DeepCopy()
			}
		}
	}
	for _, pod := range c.Pods {
		i, ok := index[pod.Spec.NodeName]
		if !ok || Finished(pod) {
			continue
		}
		requests := Requests(pod)
		pods = append(pods, boundPod{pod, requests})
		nodes[i].freePods--
		for name, amount := range requests {
			free := nodes[i].free[name]
			free.Sub(amount)
			nodes[i].free[name] = free
		}
	}
	for i := range nodes {
		nodes[i].freePods = max(nodes[i].freePods, 0)
		for name, free := range nodes[i].free {
			if free.Sign() < 0 {
				nodes[i].free[name] = resource.Quantity{Format: free.Format}
			}
		}
	}
	for name, amount := range headroom {
		keepBack(nodes, name, amount.DeepCopy())
	}
	return nodes, pods
}

// keepBack takes an amount of one resource from the nodes with most of it.
func keepBack(nodes []node, name corev1.ResourceName, amount resource.Quantity) {
	tainted := func(n node) int {
		if slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Effect != corev1.TaintEffectPreferNoSchedule }) {
			return 1
		}
		return 0
	}
	order := slices.SortedStableFunc(slices.Values(nodes), func(a, b node) int {
		x, y := a.free[name], b.free[name]
		return cmp.Or(cmp.Compare(tainted(a), tainted(b)), y.Cmp(x))
	})
	for _, n := range order {
		free, ok := n.free[name]
		if !ok || amount.Sign() <= 0 {
			continue
		}
		part := free.DeepCopy()
		if part.Cmp(amount) > 0 {
			part = amount.DeepCopy()
		}
		free.Sub(part)
		amount.Sub(part)
		n.free[name] = free
	}
}

// Eligible reports whether the capacity of a node is offered: the node is Ready,
// uncordoned, not being deleted, and not virtual.
func (r Recognizer) Eligible(n *corev1.Node) bool {
	virtual := n.Labels[broker.LabelNodeType] == broker.NodeTypeVirtual || n.Labels[broker.LabelProvider] != "" ||
		r.VirtualNode != nil && r.VirtualNode(n)
	return !virtual && !n.Spec.Unschedulable && n.DeletionTimestamp == nil && ready(n)
}

func ready(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

// Finished reports whether a pod has ended and uses nothing of its node.
func Finished(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// Requests is what a pod uses of its node, as the scheduler counts it: while a resize
// is in progress, the larger of what is requested, allocated and in use.
func Requests(pod *corev1.Pod) corev1.ResourceList {
	return podresource.PodRequests(pod, podresource.PodResourcesOptions{UseStatusResources: true})
}
