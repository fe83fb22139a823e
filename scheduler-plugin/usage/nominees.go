package usage

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	framework "k8s.io/kube-scheduler/framework"
	podutil "k8s.io/kubernetes/pkg/api/v1/pod"
	"k8s.io/utils/clock"

	"github.com/spillway-dev/spillway/broker/capacity"
)

// SettleFor is how long the room of a nominated pod is kept after it was bound: until then
// a scheduling cycle may have a snapshot without it.
const SettleFor = 5 * time.Second

// nominees are the pods of other schedulers that are nominated to a node and not bound yet,
// such as guests that take the places of placeholders. kube-scheduler keeps the room of
// nominated pods of its own queue only. Safe for concurrent use.
type nominees struct {
	clock clock.PassiveClock
	// Some is false while there is none: Filter asks for each pod and node.
	Some atomic.Bool

	mu     sync.RWMutex
	pods   map[types.UID]*nominee
	byNode map[string]map[types.UID]*nominee
	// bound are those that were bound to the node that they were nominated to, in that order.
	bound []types.UID
	// keptOut are the pods that did not fit beside one since the last one went away.
	keptOut map[types.UID]*corev1.Pod
}

// nominee is a pod that is nominated to a node.
type nominee struct {
	node     string
	priority int32
	amounts  capacity.Vector
	// until is when it is dropped, once it is bound; otherwise zero.
	until time.Time
}

func newNominees(clock clock.PassiveClock) *nominees {
	return &nominees{clock: clock, pods: map[types.UID]*nominee{}, byNode: map[string]map[types.UID]*nominee{}, keptOut: map[types.UID]*corev1.Pod{}}
}

// IsNominee reports whether a pod is nominated to a node, and neither bound nor ending.
func IsNominee(pod *corev1.Pod) bool {
	return pod.Status.NominatedNodeName != "" && pod.Spec.NodeName == "" && pod.DeletionTimestamp == nil && !podutil.IsPodTerminal(pod)
}

// Set records a pod of another scheduler as an informer shows it. freed is the node that its
// room is no longer kept on, "" if there is none.
func (n *nominees) Set(pod *corev1.Pod) (freed string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.expire()
	before := n.pods[pod.UID]
	if before != nil && pod.Spec.NodeName == before.node && !podutil.IsPodTerminal(pod) {
		if before.until.IsZero() {
			before.until = n.clock.Now().Add(SettleFor)
			n.bound = append(n.bound, pod.UID)
		}
		before.priority, before.amounts = corev1helpers.PodPriority(pod), PodAmounts(pod)
		return ""
	}
	freed = n.drop(pod.UID)
	if IsNominee(pod) {
		after := &nominee{node: pod.Status.NominatedNodeName, priority: corev1helpers.PodPriority(pod), amounts: PodAmounts(pod)}
		n.pods[pod.UID] = after
		if n.byNode[after.node] == nil {
			n.byNode[after.node] = map[types.UID]*nominee{}
		}
		n.byNode[after.node][pod.UID] = after
		n.Some.Store(true)
		if freed == after.node {
			freed = ""
		}
	}
	return freed
}

// Remove removes a deleted pod, with the result of set. It may be one that was kept out.
func (n *nominees) Remove(uid types.UID) (freed string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.expire()
	delete(n.keptOut, uid)
	return n.drop(uid)
}

// expire drops those that were bound long enough ago. They have room of their own by now.
func (n *nominees) expire() {
	for now := n.clock.Now(); len(n.bound) > 0 && !n.pods[n.bound[0]].until.After(now); {
		n.drop(n.bound[0])
	}
}

func (n *nominees) drop(uid types.UID) (freed string) {
	before := n.pods[uid]
	if before == nil {
		return ""
	}
	delete(n.pods, uid)
	if delete(n.byNode[before.node], uid); len(n.byNode[before.node]) == 0 {
		delete(n.byNode, before.node)
	}
	if !before.until.IsZero() {
		n.bound = slices.DeleteFunc(n.bound, func(other types.UID) bool { return other == uid })
	}
	n.Some.Store(len(n.pods) > 0)
	return before.node
}

// On returns the nominees of a node, without those that are counted otherwise.
func (n *nominees) On(node string, counted func(types.UID) bool) (all []nominee) {
	n.mu.RLock()
	defer n.mu.RUnlock()
	for uid, other := range n.byNode[node] {
		if (other.until.IsZero() || other.until.After(n.clock.Now())) && !counted(uid) {
			all = append(all, *other)
		}
	}
	return all
}

// FitsBeside reports whether need of a pod fits into what is free beside the nominees of its
// priority or a higher one.
func FitsBeside(all []nominee, pod *corev1.Pod, need, free capacity.Vector) bool {
	if len(all) == 0 {
		return need.FitsIn(free) > 0
	}
	left, priority := maps.Clone(free), corev1helpers.PodPriority(pod)
	for _, other := range all {
		if other.priority >= priority {
			left.Add(other.amounts, -1)
		}
	}
	return need.FitsIn(left) > 0
}

// KeepOut records a pod that did not fit beside a nominee.
func (n *nominees) KeepOut(pod *corev1.Pod) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.keptOut[pod.UID] = pod
}

// KeepsOut reports whether a pod did not fit beside a nominee since the last one went away.
func (n *nominees) KeepsOut(uid types.UID) bool {
	n.mu.RLock()
	defer n.mu.RUnlock()
	return n.keptOut[uid] != nil
}

// TakeKeptOut returns the pods that did not fit beside a nominee, and forgets them.
func (n *nominees) TakeKeptOut() map[types.UID]*corev1.Pod {
	n.mu.Lock()
	defer n.mu.Unlock()
	taken := n.keptOut
	n.keptOut = map[types.UID]*corev1.Pod{}
	return taken
}

// FreeIn is what is free on a node of a snapshot, or of a dry run of preemption.
func FreeIn(info framework.NodeInfo) capacity.Vector {
	free, used := capacity.Floor(info.Node().Status.Allocatable), info.GetRequested()
	free.Add(capacity.Vector{corev1.ResourceCPU: used.GetMilliCPU()}, -1)
	free.Add(capacity.Vector{
		corev1.ResourceMemory: used.GetMemory(), corev1.ResourceEphemeralStorage: used.GetEphemeralStorage(), corev1.ResourcePods: int64(len(info.GetPods())),
	}, -capacity.Unit)
	free.Add(used.GetScalarResources(), -capacity.Unit)
	return free
}
