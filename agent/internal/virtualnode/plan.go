package virtualnode

import (
	"cmp"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/peering"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Grant is one instruction, and what is known of its use.
type Grant struct {
	Instruction *broker.ReservationInstruction
	// Reservation is the local one that it is for; nil where it is gone.
	Reservation *broker.Reservation
	// Limit is how many pods to keep room for, where that is less than the
	// instruction says because the rest is on its way back; negative for none.
	Limit int32
	// Bound are the pods on the virtual node that use it and have not finished.
	Bound []*corev1.Pod
}

// Ending reports whether only what still runs is to be kept.
func (g Grant) Ending() bool {
	return g.Reservation == nil || g.Reservation.DeletionTimestamp != nil
}

// Places is how many pods the virtual node is to have room for.
func (g Grant) Places() int32 {
	var places int32
	switch held := g.held(); {
	case g.Ending():
	case len(held.PodSets) > 0:
		places = held.Pods()
		if g.Limit >= 0 {
			places = min(places, g.Limit)
		}
	case !held.Empty():
		places = peering.DefaultPodsOfTotal
	}
	return max(places, int32(len(g.Bound)))
}

func (g Grant) held() broker.HeldCapacity {
	return broker.HeldCapacity{Totals: g.Instruction.Spec.RequestedResources, PodSets: g.Instruction.Spec.PodSets}
}

// resources is what the places need, and never less than what the bound pods
// use.
func (g Grant) resources() corev1.ResourceList {
	var need corev1.ResourceList
	switch held := g.held(); {
	case g.Ending():
	case len(held.PodSets) > 0:
		left := g.Places()
		for _, set := range held.PodSets {
			n := min(set.Count, left)
			left -= n
			need = broker.AddTo(need, broker.Times(set.Requests.List(), n))
		}
	default:
		need = held.Totals.List()
	}
	return largest(need, sum(g.Bound))
}

// NodePlan is the capacity that a provider's virtual node is to carry: each
// grant, and whatever else runs there already. Finished pods need no room, but
// their namespaces stay mapped, so that their logs can be read. Daemons take a
// place each and nothing else.
func NodePlan(grants []Grant, strangers, finished []*corev1.Pod, daemons int32) peering.Capacity {
	var capacity peering.Capacity
	namespaces := map[string]bool{}
	for _, g := range grants {
		capacity.Resources = broker.AddTo(capacity.Resources, g.resources())
		capacity.Pods += g.Places()
		if ns := g.Instruction.Spec.SourceNamespace; ns != "" {
			namespaces[ns] = true
		}
	}
	capacity.Resources = broker.AddTo(capacity.Resources, sum(strangers))
	capacity.Pods += int32(len(strangers))
	for _, g := range grants {
		mark(namespaces, g.Bound)
	}
	mark(namespaces, strangers)
	mark(namespaces, finished)
	capacity.Namespaces = slices.Sorted(maps.Keys(namespaces))
	for name, amount := range capacity.Resources {
		if amount.IsZero() {
			delete(capacity.Resources, name)
		}
	}
	if capacity.Pods > 0 && len(capacity.Resources) == 0 {
		// Pods that request nothing still need a node that is not parked.
		capacity.Resources = corev1.ResourceList{
			corev1.ResourceCPU:    resource.MustParse("1m"),
			corev1.ResourceMemory: resource.MustParse("1Mi"),
		}
	}
	if capacity.Pods > 0 {
		capacity.Pods += min(daemons, peering.DaemonSetPodsAllowance)
	}
	return capacity
}

func mark(namespaces map[string]bool, pods []*corev1.Pod) {
	for _, pod := range pods {
		namespaces[pod.Namespace] = true
	}
}

func sum(pods []*corev1.Pod) corev1.ResourceList {
	var total corev1.ResourceList
	for _, pod := range pods {
		total = broker.AddTo(total, inventory.Requests(pod))
	}
	return total
}

func largest(a, b corev1.ResourceList) corev1.ResourceList {
	out := corev1.ResourceList{}
	maps.Copy(out, a)
	for name, amount := range b {
		if have, ok := out[name]; !ok || have.Cmp(amount) < 0 {
			out[name] = amount
		}
	}
	return out
}

// Need is how many pods of a Reservation there are.
type Need struct {
	// Pending have no node.
	Pending int32
	// Remote have not finished on a provider's virtual node.
	Remote map[string]int32
}

// Total is how many places are needed.
func (n Need) Total() int32 {
	total := n.Pending
	for _, pods := range n.Remote {
		total += pods
	}
	return total
}

// Slack follows a Reservation that asks for more than is needed. The zero value
// has seen none.
type Slack struct {
	since time.Time
	peak  int32
}

// Judge takes a look at the need now. Once it has been below what is asked for
// throughout the grace, due is true, and target is the most that was needed
// meanwhile; before, wait is how much of the grace is left, zero if there is no
// slack.
func (s *Slack) Judge(now time.Time, need, asked int32, grace time.Duration) (target int32, wait time.Duration, due bool) {
	if need >= asked {
		*s = Slack{}
		return asked, 0, false
	}
	if s.since.IsZero() || s.peak >= asked {
		// The first look, or the first since the count was lowered to the peak.
		*s = Slack{since: now, peak: need}
	}
	s.peak = max(s.peak, need)
	if left := s.since.Add(grace).Sub(now); left > 0 {
		return asked, left, false
	}
	return s.peak, 0, true
}

// Keep distributes a lowered count over the providers: first where pods run,
// then where most of them do, so that others become free altogether.
func Keep(target int32, granted, remote map[string]int32) map[string]int32 {
	providers := slices.SortedFunc(maps.Keys(granted), func(a, b string) int {
		return cmp.Or(cmp.Compare(remote[b], remote[a]), cmp.Compare(a, b))
	})
	keep := map[string]int32{}
	for _, p := range providers {
		keep[p] = min(granted[p], remote[p], target)
		target -= keep[p]
	}
	for _, p := range providers {
		more := min(granted[p]-keep[p], target)
		keep[p] += more
		target -= more
	}
	return keep
}

// Welcome is a pod that is to tolerate a provider's virtual node.
type Welcome struct {
	Pod     *corev1.Pod
	Cluster string
}

// Welcomes chooses the waiting pods that get the free places: as many as there
// are, the oldest first, and none beside those that tolerate the node already.
func Welcomes(waiting []*corev1.Pod, free map[string]int32) []Welcome {
	waiting = slices.Clone(waiting)
	slices.SortFunc(waiting, func(a, b *corev1.Pod) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	free = maps.Clone(free)
	clusters := slices.Sorted(maps.Keys(free))
	placed := map[*corev1.Pod]bool{}
	for _, pod := range waiting {
		for _, cluster := range clusters {
			if free[cluster] > 0 && tolerates(pod, cluster) {
				free[cluster]--
				placed[pod] = true
				break
			}
		}
	}
	var out []Welcome
	for _, pod := range waiting {
		if placed[pod] {
			continue
		}
		i := slices.IndexFunc(clusters, func(c string) bool { return free[c] > 0 })
		if i < 0 {
			break
		}
		free[clusters[i]]--
		out = append(out, Welcome{Pod: pod, Cluster: clusters[i]})
	}
	return out
}

// tolerates reports whether a pod has been let onto a provider's virtual node.
func tolerates(pod *corev1.Pod, cluster string) bool {
	return slices.Contains(pod.Spec.Tolerations, overflowToleration(cluster))
}

// overflowToleration is Equal, never Exists: one provider, no other.
func overflowToleration(cluster string) corev1.Toleration {
	return corev1.Toleration{Key: broker.TaintOverflow, Operator: corev1.TolerationOpEqual, Value: cluster, Effect: corev1.TaintEffectNoSchedule}
}
