package waiting

import (
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	podutil "k8s.io/kubernetes/pkg/api/v1/pod"

	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/owners"
)

// WorkQueue collects what the scheduling cycle and the informers report to the
// Controller of package request. Adding never blocks. Safe for concurrent use.
type WorkQueue struct {
	// Ready has a token whenever there is work to take.
	Ready chan struct{}

	mu   sync.Mutex
	work Work
	// tracked pods were added and not removed since; other pods do not concern the
	// controller.
	tracked map[types.UID]bool
	// IsVirtual reports whether a node is a virtual one.
	IsVirtual func(node string) bool
}

// Work is what that Controller has to process.
type Work struct {
	// Unschedulable pods, to request capacity for.
	Unschedulable map[types.UID]types.NamespacedName
	// Removed pods are no longer pending, or no longer need capacity elsewhere.
	Removed map[types.UID]bool
	// Reservations are the keys whose Reservations changed; true if the change
	// concerns their pods.
	Reservations map[demand.Key]bool
	// Requirements of the gangs with these keys changed.
	Requirements map[demand.Key]bool
	// Nodes have more room than before, and keys more free slots. AllKeys: any may.
	Nodes   map[string]bool
	Keys    map[demand.Key]bool
	AllKeys bool
	// Pools: one may have more room.
	Pools bool
	// Changed pods have another spec than in their last cycle.
	Changed map[types.UID]types.NamespacedName
	// Namespaces were changed.
	Namespaces map[string]bool
	// Asked: capacity is to be requested for these pods, which this pass has added.
	Asked []Asked
}

// Asked is a pod that capacity is to be requested for, and its key.
type Asked struct {
	UID types.UID
	Key *owners.PodKey
}

func newWork() Work {
	return Work{
		Unschedulable: map[types.UID]types.NamespacedName{},
		Removed:       map[types.UID]bool{},
		Reservations:  map[demand.Key]bool{},
		Requirements:  map[demand.Key]bool{},
		Nodes:         map[string]bool{},
		Keys:          map[demand.Key]bool{},
		Changed:       map[types.UID]types.NamespacedName{},
		Namespaces:    map[string]bool{},
	}
}

// NewWorkQueue returns a queue without work; isVirtual reports whether a node is a virtual one.
func NewWorkQueue(isVirtual func(node string) bool) *WorkQueue {
	return &WorkQueue{IsVirtual: isVirtual, Ready: make(chan struct{}, 1), work: newWork(), tracked: map[types.UID]bool{}}
}

// AddUnschedulable adds a pod that does not fit.
func (q *WorkQueue) AddUnschedulable(pod *corev1.Pod) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.work.Unschedulable[pod.UID] = NameOf(pod)
	delete(q.work.Removed, pod.UID)
	q.tracked[pod.UID] = true
	q.Signal()
}

// AddChanged adds a pod whose spec is not that of its last cycle.
func (q *WorkQueue) AddChanged(pod *corev1.Pod) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.work.Changed[pod.UID] = NameOf(pod)
	q.Signal()
}

// Remove reports that a pod is no longer pending, if it is tracked.
func (q *WorkQueue) Remove(pod types.UID) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.tracked[pod] {
		delete(q.tracked, pod)
		delete(q.work.Unschedulable, pod)
		q.work.Removed[pod] = true
		q.Signal()
	}
}

// Has reports whether a pod is tracked, and whether it waits to be taken.
func (q *WorkQueue) Has(pod types.UID) (tracked, waits bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	_, waits = q.work.Unschedulable[pod]
	return q.tracked[pod], waits
}

// Track makes Remove report a pod.
func (q *WorkQueue) Track(pod types.UID) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.tracked[pod] = true
}

// Untrack is Remove for the controller itself, which needs no report.
func (q *WorkQueue) Untrack(pod types.UID) {
	q.mu.Lock()
	defer q.mu.Unlock()
	delete(q.tracked, pod)
}

// AddReservation reports that a Reservation of a key changed; forPods, that the
// change concerns its pods.
func (q *WorkQueue) AddReservation(key demand.Key, forPods bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.work.Reservations[key] = q.work.Reservations[key] || forPods
	q.Signal()
}

// AddRequirement reports that what the gang of a key requires changed.
func (q *WorkQueue) AddRequirement(key demand.Key) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.work.Requirements[key] = true
	q.Signal()
}

// AddNode reports that a node has more room: for any grant, if it is a virtual one.
func (q *WorkQueue) AddNode(name string) {
	virtual := q.IsVirtual(name)
	q.mu.Lock()
	defer q.mu.Unlock()
	if virtual {
		q.work.AllKeys, q.work.Pools = true, true
	} else {
		q.work.Nodes[name] = true
	}
	q.Signal()
}

// AddFreed reports the results of Placements.SetPod and its like.
func (q *WorkQueue) AddFreed(node string, key demand.Key) {
	if node == "" {
		return
	}
	virtual := q.IsVirtual(node)
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case !virtual:
		q.work.Nodes[node] = true
	case key != demand.Key{}:
		q.work.Keys[key], q.work.Pools = true, true
	default:
		q.work.AllKeys, q.work.Pools = true, true
	}
	q.Signal()
}

// AddOpening reports that a pod does not use what the gate was opened for.
func (q *WorkQueue) AddOpening(of opening) {
	if of == (opening{}) {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.work.AddOpening(of)
	q.Signal()
}

// AddOpening adds what the gate was opened for for a pod that does not use it.
func (w *Work) AddOpening(of opening) {
	switch {
	case of.room.InPool():
		w.Pools = true
	case of.room.Node != "":
		w.Nodes[of.room.Node] = true
	case of.key != demand.Key{}:
		w.Keys[of.key] = true
	}
}

// AddPools reports that pools have changed.
func (q *WorkQueue) AddPools() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.work.Pools = true
	q.Signal()
}

// AddKey reports that pods of a key may have to be woken.
func (q *WorkQueue) AddKey(key demand.Key) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.work.Keys[key] = true
	q.Signal()
}

// AddNamespace reports that a namespace changed.
func (q *WorkQueue) AddNamespace(name string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.work.Namespaces[name] = true
	q.Signal()
}

// Take empties the queue.
func (q *WorkQueue) Take() Work {
	q.mu.Lock()
	defer q.mu.Unlock()
	taken := q.work
	q.work = newWork()
	return taken
}

// Signal notifies the controller.
func (q *WorkQueue) Signal() {
	select {
	case q.Ready <- struct{}{}:
	default:
	}
}

// NameOf returns the namespace and name of a pod.
func NameOf(pod *corev1.Pod) types.NamespacedName {
	return types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}
}

// Unschedulable reports whether a scheduler has found no node for a pod.
func Unschedulable(pod *corev1.Pod) bool {
	_, c := podutil.GetPodCondition(&pod.Status, corev1.PodScheduled)
	return c != nil && c.Status == corev1.ConditionFalse && c.Reason == corev1.PodReasonUnschedulable
}
