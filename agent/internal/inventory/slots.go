package inventory

import (
	"cmp"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	podresource "k8s.io/component-helpers/resource"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// liqoNodeType is how Liqo labels its virtual nodes.
const liqoNodeType = "liqo.io/type"

// Slot is the room on one node.
type Slot struct {
	Node *corev1.Node
	// Free is allocatable less what pods (guests included) request and less this
	// node's part of the lender's headroom. Never negative.
	Free corev1.ResourceList
	// Pods is how many more pods the node takes.
	Pods int32
}

// Slots is the room on each node that may be lent, sorted by node name. Headroom
// is taken from the largest slots, so that no shape promises it; from nodes with
// a NoSchedule or NoExecute taint only if the others cannot give it.
func Slots(nodes []*corev1.Node, pods []*corev1.Pod, headroom corev1.ResourceList) []Slot {
	slots, _ := occupy(nodes, pods, headroom)
	return slots
}

// tenant is a pod that uses one of the slots.
type tenant struct {
	pod      *corev1.Pod
	requests corev1.ResourceList
}

// occupy is Slots, and the pods that take room there.
func occupy(nodes []*corev1.Node, pods []*corev1.Pod, headroom corev1.ResourceList) (slots []Slot, tenants []tenant) {
	index := map[string]int{}
	for _, node := range nodes {
		if Lendable(node) {
			slots = append(slots, Slot{Node: node})
		}
	}
	slices.SortFunc(slots, func(a, b Slot) int { return cmp.Compare(a.Node.Name, b.Node.Name) })
	for i := range slots {
		node := slots[i].Node
		index[node.Name] = i
		slots[i].Free = corev1.ResourceList{}
		for name, amount := range node.Status.Allocatable {
			if name != corev1.ResourcePods {
				slots[i].Free[name] = amount.DeepCopy()
			}
		}
		slots[i].Pods = int32(node.Status.Allocatable.Pods().Value())
	}
	for _, pod := range pods {
		i, ok := index[pod.Spec.NodeName]
		if !ok || Finished(pod) {
			continue
		}
		requests := Requests(pod)
		tenants = append(tenants, tenant{pod, requests})
		slots[i].Pods--
		for name, amount := range requests {
			free := slots[i].Free[name]
			free.Sub(amount)
			slots[i].Free[name] = free
		}
	}
	for i := range slots {
		slots[i].Pods = max(slots[i].Pods, 0)
		for name, free := range slots[i].Free {
			if free.Sign() < 0 {
				slots[i].Free[name] = resource.Quantity{Format: free.Format}
			}
		}
	}
	for name, keep := range headroom {
		keepBack(slots, name, keep.DeepCopy())
	}
	return slots, tenants
}

// keepBack takes an amount of one resource from the largest slots.
func keepBack(slots []Slot, name corev1.ResourceName, keep resource.Quantity) {
	order := make([]int, len(slots))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int {
		if ta, tb := repels(slots[a].Node), repels(slots[b].Node); ta != tb {
			if ta {
				return 1
			}
			return -1
		}
		fa, fb := slots[a].Free[name], slots[b].Free[name]
		return fb.Cmp(fa)
	})
	for _, i := range order {
		free, ok := slots[i].Free[name]
		if !ok || keep.Sign() <= 0 {
			continue
		}
		part := free.DeepCopy()
		if part.Cmp(keep) > 0 {
			part = keep.DeepCopy()
		}
		free.Sub(part)
		keep.Sub(part)
		slots[i].Free[name] = free
	}
}

func repels(node *corev1.Node) bool {
	return slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool { return t.Effect != corev1.TaintEffectPreferNoSchedule })
}

// Lendable reports whether a node may be lent: Ready, uncordoned, not going
// away, and real.
func Lendable(node *corev1.Node) bool {
	if node.Spec.Unschedulable || node.DeletionTimestamp != nil || Virtual(node) {
		return false
	}
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// Virtual reports whether a node only stands for capacity elsewhere.
func Virtual(node *corev1.Node) bool {
	return node.Labels[broker.LabelNodeType] == broker.NodeTypeVirtual ||
		node.Labels[liqoNodeType] == "virtual-node" ||
		node.Labels[broker.LabelProvider] != ""
}

// Finished reports whether a pod has ended and uses nothing of its node.
func Finished(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// Requests is what a pod takes of its node, as the scheduler counts it.
func Requests(pod *corev1.Pod) corev1.ResourceList {
	return podresource.PodRequests(pod, podresource.PodResourcesOptions{})
}
