package inventory

import (
	"cmp"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	quota "k8s.io/apiserver/pkg/quota/v1"
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
	// guests is what guests request on it.
	guests corev1.ResourceList
}

// usage is what the pods bound to one node use.
type usage struct {
	// local are the cluster's own pods.
	local share
	// guests by consumer.
	guests map[string]share
}

// share is a number of pods and what they request. Resources of which nothing is
// requested are left out.
type share struct {
	requests corev1.ResourceList
	pods     int32
}

// plus returns the share with one pod more, or one less where sign is negative.
func (s share) plus(requests corev1.ResourceList, sign int) share {
	sum := quota.Add
	if sign < 0 {
		sum = quota.Subtract
	}
	return share{quota.RemoveZeros(sum(s.requests, requests)), s.pods + int32(sign)}
}

// add adds a pod of a consumer, or of the cluster itself where it is empty; a negative
// sign removes it.
func (u *usage) add(consumer string, requests corev1.ResourceList, sign int) {
	if consumer == "" {
		u.local = u.local.plus(requests, sign)
		return
	}
	if u.guests == nil {
		u.guests = map[string]share{}
	}
	if u.guests[consumer] = u.guests[consumer].plus(requests, sign); u.guests[consumer].pods == 0 {
		delete(u.guests, consumer)
	}
}

// slots are the eligible nodes, sorted by name, each a slot of its own with the
// name of the node class that it is advertised in.
func slots(nodes []node) []capacity.Slot {
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

// freeNodes are eligible nodes with what is free, sorted by name. The headroom is taken
// from the nodes with most free capacity, so that no shape contains it; from nodes with
// a NoSchedule or NoExecute taint only if the others do not have it.
func freeNodes(eligible []*corev1.Node, used map[string]*usage, headroom corev1.ResourceList) []node {
	nodes := make([]node, 0, len(eligible))
	for _, n := range eligible {
		free := corev1.ResourceList{}
		pods := n.Status.Allocatable.Pods().Value()
		for name, amount := range n.Status.Allocatable {
			if name != corev1.ResourcePods {
				free[name] = amount.DeepCopy()
			}
		}
		u := used[n.Name]
		var guestRequests corev1.ResourceList
		take := func(s share) {
			pods -= int64(s.pods)
			for name, amount := range s.requests {
				left := free[name]
				left.Sub(amount)
				free[name] = left
			}
		}
		if u != nil {
			take(u.local)
			for _, guests := range u.guests {
				take(guests)
				guestRequests = broker.AddTo(guestRequests, guests.requests)
			}
		}
		for name, left := range free {
			if left.Sign() < 0 {
				free[name] = resource.Quantity{Format: left.Format}
			}
		}
		nodes = append(nodes, node{Node: n, free: free, freePods: int32(max(pods, 0)), guests: guestRequests})
	}
	slices.SortFunc(nodes, func(a, b node) int { return cmp.Compare(a.Name, b.Name) })
	for name, amount := range headroom {
		keepBack(nodes, name, amount.DeepCopy())
	}
	return nodes
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
// is in progress, the larger of what is requested, allocated and in use. It has no amounts of
// zero, as shapes have none: pods that name them are not of another kind.
func Requests(pod *corev1.Pod) corev1.ResourceList {
	return quota.RemoveZeros(podresource.PodRequests(pod, podresource.PodResourcesOptions{UseStatusResources: true, InPlacePodLevelResourcesVerticalScalingEnabled: true}))
}
