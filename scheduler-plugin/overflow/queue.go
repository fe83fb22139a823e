package overflow

import (
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
}

// work is what the demand controller has to process.
type work struct {
	// unschedulable pods, to request capacity for.
	unschedulable map[types.UID]types.NamespacedName
	// activate are pending pods that may use more nodes than in their last cycle.
	activate map[types.UID]types.NamespacedName
	// removed pods are no longer pending.
	removed map[types.UID]bool
	// reservations are the keys whose Reservations changed; true if the change
	// concerns their pods.
	reservations map[demand.Key]bool
}

func newWork() work {
	return work{
		unschedulable: map[types.UID]types.NamespacedName{},
		activate:      map[types.UID]types.NamespacedName{},
		removed:       map[types.UID]bool{},
		reservations:  map[demand.Key]bool{},
	}
}

func newWorkQueue() *workQueue {
	return &workQueue{ready: make(chan struct{}, 1), work: newWork(), tracked: map[types.UID]bool{}}
}

// addUnschedulable adds a pod that does not fit.
func (q *workQueue) addUnschedulable(pod *corev1.Pod) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.work.unschedulable[pod.UID] = types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}
	delete(q.work.removed, pod.UID)
	q.tracked[pod.UID] = true
	q.signal()
}

// addActivate adds a pod that may use more nodes than before, if it is tracked.
func (q *workQueue) addActivate(pod *corev1.Pod) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.tracked[pod.UID] {
		q.work.activate[pod.UID] = types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}
		q.signal()
	}
}

// remove reports that a pod is no longer pending, if it is tracked.
func (q *workQueue) remove(pod types.UID) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.tracked[pod] {
		delete(q.tracked, pod)
		delete(q.work.unschedulable, pod)
		delete(q.work.activate, pod)
		q.work.removed[pod] = true
		q.signal()
	}
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
