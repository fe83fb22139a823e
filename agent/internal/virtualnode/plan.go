package virtualnode

import (
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/peering"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// Grant is one ReservationInstruction and its use.
type Grant struct {
	Instruction *broker.ReservationInstruction
	// Reservation is the local one that the instruction is for; nil once it is gone, and
	// for one that was created in the hub. It must not be changed.
	Reservation *broker.Reservation
	// Limit is the number of pods to keep capacity for while the rest of the
	// instruction is being released; negative for no limit.
	Limit int32
	// Bound are the pods on the virtual node that use the grant and have not
	// finished.
	Bound Pods
}

// Pods are some of the pods on a virtual node.
type Pods struct {
	Count int32
	// Requests is the sum of what they request.
	Requests corev1.ResourceList
	// Namespaces that they are in.
	Namespaces []string
	// list returns the pods themselves.
	list []func() []*corev1.Pod
}

// SumOf returns these pods.
func SumOf(pods ...*corev1.Pod) Pods {
	sum := Pods{Count: int32(len(pods)), list: []func() []*corev1.Pod{func() []*corev1.Pod { return pods }}}
	for _, pod := range pods {
		sum.Requests = broker.AddTo(sum.Requests, inventory.Requests(pod))
		sum.Namespaces = append(sum.Namespaces, pod.Namespace)
	}
	return sum
}

// add adds other pods.
func (p *Pods) add(other Pods) {
	p.Count += other.Count
	p.Requests = broker.AddTo(p.Requests, other.Requests)
	p.Namespaces = append(p.Namespaces, other.Namespaces...)
	p.list = append(p.list, other.list...)
}

// all returns the pods as they are now.
func (p Pods) all() (pods []*corev1.Pod) {
	for _, list := range p.list {
		pods = append(pods, list()...)
	}
	return pods
}

// names returns the pods' names as namespace/name, sorted.
func (p Pods) names() (names []string) {
	for _, pod := range p.all() {
		names = append(names, pod.Namespace+"/"+pod.Name)
	}
	slices.Sort(names)
	return names
}

// Releasing reports whether capacity is kept for bound pods only.
func (g Grant) Releasing() bool {
	if g.Instruction.Spec.FromHub() {
		return g.Instruction.Spec.Releasing
	}
	return g.Reservation == nil || g.Reservation.DeletionTimestamp != nil
}

// ByHand reports whether the grant is for a Reservation that was made by hand, in the hub
// or in this cluster, and not for the pods of one owner.
func (g Grant) ByHand() bool {
	if g.Instruction.Spec.FromHub() {
		return true
	}
	if g.Reservation == nil {
		return false
	}
	_, keyed := demand.KeyOfReservation(g.Reservation)
	return !keyed
}

// namespaces whose pods may use the grant; optedIn are all that may use one that names
// none.
func (g Grant) namespaces(optedIn []string) []string {
	switch spec := &g.Instruction.Spec; {
	case !spec.FromHub():
		return []string{spec.SourceNamespace}
	case spec.Releasing:
		return nil // those of the bound pods remain
	case len(spec.Namespaces) == 0:
		return optedIn
	default:
		return slices.DeleteFunc(slices.Clone(spec.Namespaces), func(name string) bool { return !slices.Contains(optedIn, name) })
	}
}

// unmapped is why no pod can use the grant on a virtual node that provides it, given why pods
// of namespaces cannot; nil if those of one of its namespaces can. If waiting may change it,
// that is what it says.
func (g Grant) unmapped(optedIn []string, why map[string]peering.Unmapped) (first *peering.Unmapped) {
	if g.Releasing() {
		return nil
	}
	for _, namespace := range g.namespaces(optedIn) {
		is, unmapped := why[namespace]
		if !unmapped {
			return nil
		}
		if first == nil || first.Final && !is.Final {
			first = &is
		}
	}
	return first
}

// cordoned is why no pod can use a grant while an administrator has cordoned the node; nil if
// pods use it, because they stay.
func (s *Snapshot) cordoned(g Grant) *peering.Unmapped {
	if !unschedulable(s) || g.Releasing() || g.Bound.Count > 0 {
		return nil
	}
	return &peering.Unmapped{Reason: "Cordoned", Final: true,
		Message: fmt.Sprintf("node %[1]s is cordoned in this cluster; kubectl uncordon %[1]s lets pods use it", s.Node.Name)}
}

// Use is what the bound pods use of the grant.
func (g Grant) Use() *broker.Use {
	used := &broker.Use{Count: g.Bound.Count, Resources: broker.FromList(g.Bound.Requests), Pods: g.Bound.names()}
	used.Pods = used.Pods[:min(len(used.Pods), broker.MaxUsePods)]
	return used
}

// Pods is the number of pods that the virtual node is to have capacity for;
// never below the bound ones.
func (g Grant) Pods() int32 {
	var pods int32
	switch granted := g.granted(); {
	case g.Releasing():
	case len(granted.PodSets) > 0:
		pods = granted.Pods()
		if g.Limit >= 0 {
			pods = min(pods, g.Limit)
		}
	case !granted.Empty():
		pods = peering.DefaultPodsOfTotal
	}
	return max(pods, g.Bound.Count)
}

func (g Grant) granted() broker.HeldCapacity {
	return broker.HeldCapacity{Totals: g.Instruction.Spec.RequestedResources, PodSets: g.Instruction.Spec.PodSets}
}

// resources is what Pods() pods need; never below what the bound pods request.
func (g Grant) resources() corev1.ResourceList {
	need := corev1.ResourceList{}
	switch granted := g.granted(); {
	case g.Releasing():
	case len(granted.PodSets) > 0:
		left := g.Pods()
		for _, set := range granted.PodSets {
			n := min(set.Count, left)
			left -= n
			need = broker.AddTo(need, broker.Times(set.Requests.List(), n))
		}
	default:
		need = granted.Totals.List()
	}
	return capacity.Larger(need, g.Bound.Requests)
}

// NodePlan is the capacity that the virtual node is to provide: every grant, and
// the other pods that run there. Finished pods need no capacity, but their
// namespaces stay mapped so that their logs can be read. Pods of DaemonSets take
// a pod slot each and no resources.
func NodePlan(s *Snapshot) peering.Capacity {
	var capacity peering.Capacity
	namespaces := map[string]bool{}
	addNamespaces := func(names []string) {
		for _, ns := range names {
			namespaces[ns] = true
		}
	}
	for _, g := range s.Grants {
		capacity.Resources = broker.AddTo(capacity.Resources, g.resources())
		capacity.Pods += g.Pods()
		for key, value := range g.Instruction.Spec.NodeLabels {
			if capacity.Labels == nil {
				capacity.Labels = map[string]string{}
			}
			capacity.Labels[key] = value
		}
		addNamespaces(g.namespaces(s.OptedIn))
		addNamespaces(g.Bound.Namespaces)
	}
	capacity.Resources = broker.AddTo(capacity.Resources, s.Ungranted.Requests)
	capacity.Pods += s.Ungranted.Count
	addNamespaces(s.Ungranted.Namespaces)
	addNamespaces(s.Finished.Namespaces)
	capacity.Namespaces = slices.Sorted(maps.Keys(namespaces))
	maps.DeleteFunc(capacity.Resources, func(_ corev1.ResourceName, amount resource.Quantity) bool { return amount.IsZero() })
	if capacity.Pods == 0 {
		return capacity
	}
	if len(capacity.Resources) == 0 {
		// Pods that request nothing still need a node that is not parked.
		capacity.Resources = corev1.ResourceList{
			corev1.ResourceCPU:    resource.MustParse("1m"),
			corev1.ResourceMemory: resource.MustParse("1Mi"),
		}
	}
	capacity.Pods += min(s.DaemonPods, peering.DaemonSetPodsAllowance)
	return capacity
}

// PodsOf is the number of pods of pod sets.
func PodsOf(sets []broker.PodSet) int32 { return broker.HeldCapacity{PodSets: sets}.Pods() }
