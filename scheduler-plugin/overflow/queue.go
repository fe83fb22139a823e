package overflow

import (
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// workQueue collects what the scheduling cycle and the informers report to the
// demand controller. Adding never blocks. Safe for concurrent use.
type workQueue struct {
	// ready has a token whenever there is work to take.
	ready chan struct{}

	mu   sync.Mutex
	work work
	// tracked pods were added and not removed since; other pods do not concern the
	// controller.
	tracked map[types.UID]bool
	// isVirtual reports whether a node is a virtual one.
	isVirtual func(node string) bool
}

// work is what the demand controller has to process.
type work struct {
	// unschedulable pods, to request capacity for.
	unschedulable map[types.UID]types.NamespacedName
	// removed pods are no longer pending, or no longer need capacity elsewhere.
	removed map[types.UID]bool
	// reservations are the keys whose Reservations changed; true if the change
	// concerns their pods.
	reservations map[demand.Key]bool
	// requirements of the gangs with these keys changed.
	requirements map[demand.Key]bool
	// nodes have more room than before, and keys more free slots. allKeys: any may.
	nodes   map[string]bool
	keys    map[demand.Key]bool
	allKeys bool
	// pools: one may have more room.
	pools bool
	// changed pods have another spec than in their last cycle.
	changed map[types.UID]types.NamespacedName
	// namespaces were changed.
	namespaces map[string]bool
	// asked: capacity is to be requested for these pods, which this pass has added.
	asked []asked
}

type asked struct {
	uid types.UID
	key *podKey
}

func newWork() work {
	return work{
		unschedulable: map[types.UID]types.NamespacedName{},
		removed:       map[types.UID]bool{},
		reservations:  map[demand.Key]bool{},
		requirements:  map[demand.Key]bool{},
		nodes:         map[string]bool{},
		keys:          map[demand.Key]bool{},
		changed:       map[types.UID]types.NamespacedName{},
		namespaces:    map[string]bool{},
	}
}

func newWorkQueue(isVirtual func(node string) bool) *workQueue {
	return &workQueue{isVirtual: isVirtual, ready: make(chan struct{}, 1), work: newWork(), tracked: map[types.UID]bool{}}
}

// addUnschedulable adds a pod that does not fit.
func (q *workQueue) addUnschedulable(pod *corev1.Pod) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.work.unschedulable[pod.UID] = nameOf(pod)
	delete(q.work.removed, pod.UID)
	q.tracked[pod.UID] = true
	q.signal()
}

// addChanged adds a pod whose spec is not that of its last cycle.
func (q *workQueue) addChanged(pod *corev1.Pod) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.work.changed[pod.UID] = nameOf(pod)
	q.signal()
}

// remove reports that a pod is no longer pending, if it is tracked.
func (q *workQueue) remove(pod types.UID) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.tracked[pod] {
		delete(q.tracked, pod)
		delete(q.work.unschedulable, pod)
		q.work.removed[pod] = true
		q.signal()
	}
}

// has reports whether a pod is tracked, and whether it waits to be taken.
func (q *workQueue) has(pod types.UID) (tracked, waits bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	_, waits = q.work.unschedulable[pod]
	return q.tracked[pod], waits
}

// track makes remove report a pod.
func (q *workQueue) track(pod types.UID) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.tracked[pod] = true
}

// untrack is remove for the controller itself, which needs no report.
func (q *workQueue) untrack(pod types.UID) {
	q.mu.Lock()
	defer q.mu.Unlock()
	delete(q.tracked, pod)
}

// addReservation reports that a Reservation of a key changed; forPods, that the
// change concerns its pods.
func (q *workQueue) addReservation(key demand.Key, forPods bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.work.reservations[key] = q.work.reservations[key] || forPods
	q.signal()
}

// addRequirement reports that what the gang of a key requires changed.
func (q *workQueue) addRequirement(key demand.Key) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.work.requirements[key] = true
	q.signal()
}

// addNode reports that a node has more room: for any grant, if it is a virtual one.
func (q *workQueue) addNode(name string) {
	virtual := q.isVirtual(name)
	q.mu.Lock()
	defer q.mu.Unlock()
	if virtual {
		q.work.allKeys, q.work.pools = true, true
	} else {
		q.work.nodes[name] = true
	}
	q.signal()
}

// addFreed reports the results of placements.setPod and its like.
func (q *workQueue) addFreed(node string, key demand.Key) {
	if node == "" {
		return
	}
	virtual := q.isVirtual(node)
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case !virtual:
		q.work.nodes[node] = true
	case key != demand.Key{}:
		q.work.keys[key], q.work.pools = true, true
	default:
		q.work.allKeys, q.work.pools = true, true
	}
	q.signal()
}

// addOpening reports that a pod does not use what the gate was opened for.
func (q *workQueue) addOpening(of opening) {
	if of == (opening{}) {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.work.addOpening(of)
	q.signal()
}

// addOpening adds what the gate was opened for for a pod that does not use it.
func (w *work) addOpening(of opening) {
	switch {
	case of.room == "":
		if of.key != (demand.Key{}) {
			w.keys[of.key] = true
		}
	case strings.Contains(of.room, "/"):
		w.pools = true
	default:
		w.nodes[of.room] = true
	}
}

// addPools reports that pools have changed.
func (q *workQueue) addPools() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.work.pools = true
	q.signal()
}

// addKey reports that pods of a key may have to be woken.
func (q *workQueue) addKey(key demand.Key) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.work.keys[key] = true
	q.signal()
}

// addNamespace reports that a namespace changed.
func (q *workQueue) addNamespace(name string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.work.namespaces[name] = true
	q.signal()
}

// take empties the queue.
func (q *workQueue) take() work {
	q.mu.Lock()
	defer q.mu.Unlock()
	taken := q.work
	q.work = newWork()
	return taken
}

// signal notifies the controller.
func (q *workQueue) signal() {
	select {
	case q.ready <- struct{}{}:
	default:
	}
}

func nameOf(pod *corev1.Pod) types.NamespacedName {
	return types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}
}
