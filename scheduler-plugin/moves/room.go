package moves

import (
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	framework "k8s.io/kube-scheduler/framework"
	podutil "k8s.io/kubernetes/pkg/api/v1/pod"
	schedulerframework "k8s.io/kubernetes/pkg/scheduler/framework"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/usage"
	"github.com/spillway-dev/spillway/scheduler-plugin/waiting"
)

// maxWaiting is the number of different pods that wait for this cluster beyond which it is taken
// to have no room for others.
const maxWaiting = 200

// triedWithin is the time within which schedulers try the pods that a node has room for.
const triedWithin = time.Minute

// WatchedPods are the pods that the return of others depends on, kept from the events of
// pods. Safe for concurrent use.
type WatchedPods struct {
	// profile of the scheduler whose pods may return.
	profile string
	// isVirtual reports whether a node is a virtual one.
	isVirtual func(node string) bool

	mu sync.Mutex
	// guests are the pods on virtual nodes that have a hold.
	guests map[types.UID]*corev1.Pod
	// pending pods have no node, and nothing but a scheduler keeps them from one.
	pending map[types.UID]*corev1.Pod
	// repelling are the pods on other nodes with required anti-affinity.
	repelling map[types.UID]framework.PodInfo
}

func NewWatchedPods(profile string, isVirtual func(node string) bool) *WatchedPods {
	return &WatchedPods{profile: profile, isVirtual: isVirtual, guests: map[types.UID]*corev1.Pod{}, pending: map[types.UID]*corev1.Pod{}, repelling: map[types.UID]framework.PodInfo{}}
}

// Set records a pod as an informer shows it.
func (w *WatchedPods) Set(pod *corev1.Pod) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.guests, pod.UID)
	delete(w.pending, pod.UID)
	delete(w.repelling, pod.UID)
	switch {
	case podutil.IsPodTerminal(pod):
	case pod.Spec.NodeName == "":
		if pod.DeletionTimestamp == nil && len(pod.Spec.SchedulingGates) == 0 {
			w.pending[pod.UID] = pod
		}
	case w.isVirtual(pod.Spec.NodeName):
		if pod.DeletionTimestamp == nil && pod.Labels[broker.LabelHold] != "" && pod.Spec.SchedulerName == w.profile {
			w.guests[pod.UID] = pod
		}
	case repels(pod):
		if info, err := schedulerframework.NewPodInfo(pod); err == nil {
			w.repelling[pod.UID] = info
		}
	}
}

func repels(pod *corev1.Pod) bool {
	a := pod.Spec.Affinity
	return a != nil && a.PodAntiAffinity != nil && len(a.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution) > 0
}

// Remove removes a deleted pod.
func (w *WatchedPods) Remove(uid types.UID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.guests, uid)
	delete(w.pending, uid)
	delete(w.repelling, uid)
}

func (w *WatchedPods) guestsNow() []*corev1.Pod {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Collect(maps.Values(w.guests))
}

// hasUntried reports whether a scheduler may be about to place a pod: one that was
// created since a time and that none has found unschedulable.
func (w *WatchedPods) hasUntried(since time.Time) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, pod := range w.pending {
		if !waiting.Unschedulable(pod) && pod.CreationTimestamp.After(since) {
			return true
		}
	}
	return false
}

// waiting returns the unschedulable pods: of each controller, those that differ in nothing that
// keeps a pod from a node once.
func (w *WatchedPods) waiting() []*corev1.Pod {
	w.mu.Lock()
	defer w.mu.Unlock()
	var all []*corev1.Pod
	seen := map[types.UID][]*corev1.Pod{}
	for _, pod := range w.pending {
		if !waiting.Unschedulable(pod) {
			continue
		}
		if controller := metav1.GetControllerOfNoCopy(pod); controller != nil {
			if slices.ContainsFunc(seen[controller.UID], func(other *corev1.Pod) bool { return alikeForNodes(pod, other) }) {
				continue
			}
			seen[controller.UID] = append(seen[controller.UID], pod)
		}
		all = append(all, pod)
	}
	return all
}

// alikeForNodes reports whether two pods may run on the same nodes.
func alikeForNodes(a, b *corev1.Pod) bool {
	return maps.Equal(usage.PodAmounts(a), usage.PodAmounts(b)) && maps.Equal(a.Spec.NodeSelector, b.Spec.NodeSelector) &&
		equality.Semantic.DeepEqual(a.Spec.Affinity, b.Spec.Affinity) && equality.Semantic.DeepEqual(a.Spec.Tolerations, b.Spec.Tolerations)
}

// repelled reports whether a pod on a node of this cluster has required anti-affinity to
// a pod, in whichever topology.
func (w *WatchedPods) repelled(pod *corev1.Pod, namespace labels.Set) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, info := range w.repelling {
		for _, term := range info.GetRequiredAntiAffinityTerms() {
			if term.Matches(pod, namespace) {
				return true
			}
		}
	}
	return false
}

// roomFinder tells for which pods the nodes of this cluster have room, at one time.
//
// It does not run the filters of the scheduler, whose snapshot only scheduling cycles may
// use. What it leaves out are requirements that no pod has that could overflow
// (demand.Admissible): volumes of this cluster, host ports, resource claims, required pod
// affinity, strict topology spread. It is stricter in two ways. A node that a pod waits
// for is no room for others: one that an unschedulable pod could run on if the node were
// empty, and for which it lacks room now. And a pod that another repels from a part of the
// cluster has none anywhere.
type roomFinder struct {
	mover   *Mover
	rooms   []usage.Room
	nodes   map[string]*corev1.Node
	waiting []*corev1.Pod
	// awaited has the nodes that a pod waits for, as far as computed, and found the
	// results for pods that are alike.
	awaited map[string]bool
	found   map[alike]bool
}

// alike are pods of one controller and key.
type alike struct {
	controller types.UID
	key        demand.Key
}

func (m *Mover) newRoomFinder() *roomFinder {
	return &roomFinder{mover: m, awaited: map[string]bool{}, found: map[alike]bool{}}
}

// has reports whether there is room for a pod with a controller.
func (f *roomFinder) has(pod *corev1.Pod, key demand.Key) bool {
	id := alike{metav1.GetControllerOfNoCopy(pod).UID, key}
	found, known := f.found[id]
	if !known {
		found = f.find(pod)
		f.found[id] = found
	}
	return found
}

func (f *roomFinder) find(pod *corev1.Pod) bool {
	f.observe()
	if len(f.waiting) > maxWaiting || !slices.ContainsFunc(f.rooms, func(r usage.Room) bool {
		need, ok := r.Need(pod)
		return ok && need.FitsIn(r.Free) > 0 && !f.isAwaited(r)
	}) {
		return false
	}
	namespace, err := f.mover.Namespaces.Get(pod.Namespace)
	return err == nil && !f.mover.Watched.repelled(pod, labels.Set(namespace.Labels))
}

// observe reads the nodes and the pods that wait, once.
func (f *roomFinder) observe() {
	if f.nodes != nil {
		return
	}
	f.nodes = map[string]*corev1.Node{}
	all, err := f.mover.Nodes.List(labels.Everything())
	if err != nil {
		return
	}
	names := map[string]bool{}
	for _, node := range all {
		f.nodes[node.Name], names[node.Name] = node, true
	}
	f.rooms, f.waiting = f.mover.Placements.RoomOn(names), f.mover.Watched.waiting()
}

// isAwaited reports whether an unschedulable pod could run on a node if it were empty, and lacks
// room there now, or has had it for less than triedWithin. One that has had room for longer is
// kept from the node by something else, such as a volume, for which returning pods need not wait.
func (f *roomFinder) isAwaited(r usage.Room) bool {
	awaited, known := f.awaited[r.Node]
	if !known {
		node := f.nodes[r.Node]
		size, fresh := capacity.Floor(node.Status.Allocatable), f.mover.Clock.Since(r.ChangedAt) < triedWithin
		awaited = slices.ContainsFunc(f.waiting, func(pod *corev1.Pod) bool {
			need := usage.PodAmounts(pod)
			_, gang := demand.GangOf(pod) // it may lack room for others
			return need.FitsIn(size) > 0 && (fresh || gang || need.FitsIn(r.Free) == 0) && usage.NodeAdmits(node, pod)
		})
		f.awaited[r.Node] = awaited
	}
	return awaited
}
