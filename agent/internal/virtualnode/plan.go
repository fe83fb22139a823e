package virtualnode

import (
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
	// for one that was created in the hub.
	Reservation *broker.Reservation
	// Limit is the number of pods to keep capacity for while the rest of the
	// instruction is being released; negative for no limit.
	Limit int32
	// Bound are the pods on the virtual node that use the grant and have not
	// finished.
	Bound []*corev1.Pod
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

// Use is what the bound pods use of the grant.
func (g Grant) Use() *broker.Use {
	used := &broker.Use{Count: int32(len(g.Bound)), Resources: broker.FromList(requests(g.Bound))}
	for _, pod := range g.Bound {
		used.Pods = append(used.Pods, pod.Namespace+"/"+pod.Name)
	}
	slices.Sort(used.Pods)
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
	return max(pods, int32(len(g.Bound)))
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
	return capacity.Larger(need, requests(g.Bound))
}

// NodePlan is the capacity that the virtual node is to provide: every grant, and
// the other pods that run there. Finished pods need no capacity, but their
// namespaces stay mapped so that their logs can be read. Pods of DaemonSets take
// a pod slot each and no resources.
func NodePlan(s *Snapshot) peering.Capacity {
	var capacity peering.Capacity
	namespaces := map[string]bool{}
	addNamespaces := func(pods []*corev1.Pod) {
		for _, pod := range pods {
			namespaces[pod.Namespace] = true
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
		for _, ns := range g.namespaces(s.OptedIn) {
			namespaces[ns] = true
		}
		addNamespaces(g.Bound)
	}
	capacity.Resources = broker.AddTo(capacity.Resources, requests(s.Ungranted))
	capacity.Pods += int32(len(s.Ungranted))
	addNamespaces(s.Ungranted)
	addNamespaces(s.Finished)
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

// requests sums what pods request.
func requests(pods []*corev1.Pod) corev1.ResourceList {
	var total corev1.ResourceList
	for _, pod := range pods {
		total = broker.AddTo(total, inventory.Requests(pod))
	}
	return total
}
