package waiting

import (
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// An event is repeated each RepeatAfter while its state lasts: API servers keep events for an
// hour by default. What pods wait for is looked at each LookPeriod, and a pod has at most one event
// of a reason in EventInterval: so each look can record one.
const RepeatAfter, LookPeriod, EventInterval = time.Hour, time.Minute, 55 * time.Second

// PendingPods are the pods that PostFilter reported and that have no node yet, with
// the events that they have got. Safe for concurrent use.
type PendingPods struct {
	mu   sync.Mutex
	pods map[types.UID]*pendingPod
}

type pendingPod struct {
	name types.NamespacedName
	// since is when it was added.
	since time.Time
	// events has the last event by reason.
	events map[string]lastEvent
}

// Event is what an event says: events of one reason with one key say the same. Clusters are those
// that it is about.
type Event struct {
	Reason, Key string
	Clusters    []string
}

// lastEvent is the last event of a reason.
type lastEvent struct {
	Event
	at time.Time
}

// NewPendingPods returns none.
func NewPendingPods() *PendingPods { return &PendingPods{pods: map[types.UID]*pendingPod{}} }

// Add adds a pod that is pending since now.
func (p *PendingPods) Add(uid types.UID, name types.NamespacedName, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pods[uid] == nil {
		p.pods[uid] = &pendingPod{name: name, since: now, events: map[string]lastEvent{}}
	}
}

// Remove drops a pod.
func (p *PendingPods) Remove(uid types.UID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.pods, uid)
}

// Len is the number of pods.
func (p *PendingPods) Len() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.pods)
}

// Has reports whether a pod is one of them.
func (p *PendingPods) Has(uid types.UID) bool {
	_, ok := p.Name(uid)
	return ok
}

// Name returns the namespace and name of a pod that is one of them.
func (p *PendingPods) Name(uid types.UID) (types.NamespacedName, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	pod := p.pods[uid]
	if pod == nil {
		return types.NamespacedName{}, false
	}
	return pod.name, true
}

// In calls f for each pod of a namespace.
func (p *PendingPods) In(namespace string, f func(types.UID, types.NamespacedName)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for uid, pod := range p.pods {
		if pod.name.Namespace == namespace {
			f(uid, pod.name)
		}
	}
}

// Announce reports whether a pod is to get an event: one of each reason in EventInterval,
// because what a provider lacks may change each second, for thousands of pods that wait; and in
// RepeatAfter if it repeats the last one, which has the same key. placed, if it is not nil, says
// whether the pod has a place, and with one it gets none; it is called under the lock, because the
// pod's binding calls announced after that.
func (p *PendingPods) Announce(uid types.UID, e Event, now time.Time, placed func(types.UID) bool) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	pod := p.pods[uid]
	if pod == nil || placed != nil && placed(uid) {
		return false
	}
	last, known := pod.events[e.Reason]
	if age := now.Sub(last.at); known && (age < EventInterval || last.Key == e.Key && age < RepeatAfter) {
		return false
	}
	pod.events[e.Reason] = lastEvent{e, now}
	return true
}

// Waiting returns those that were added before a time.
func (p *PendingPods) Waiting(before time.Time) map[types.UID]types.NamespacedName {
	p.mu.Lock()
	defer p.mu.Unlock()
	names := map[types.UID]types.NamespacedName{}
	for uid, pod := range p.pods {
		if !pod.since.After(before) {
			names[uid] = pod.name
		}
	}
	return names
}

// Announced reports whether the last event of a reason that a pod has got is about a cluster.
func (p *PendingPods) Announced(uid types.UID, reason, cluster string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	pod := p.pods[uid]
	return pod != nil && slices.Contains(pod.events[reason].Clusters, cluster)
}

// UntriedPods are the pods of a scheduler that it has not tried yet, by their keys: to count
// those of one key does not take longer with the number of others. Safe for concurrent use.
type UntriedPods struct {
	clock clock.PassiveClock

	mu sync.Mutex
	// arrived is when a pod became one of them, for as long as it has no node.
	arrived map[types.UID]time.Time
	// newest is when the last pod of a controller, or of a namespace without one, arrived.
	newest map[types.UID]time.Time
	// added pods by namespace, whose keys were not needed or not known yet.
	added map[string]map[types.UID]*corev1.Pod
	byKey map[demand.Key]map[types.UID]*corev1.Pod
	keys  map[types.UID]demand.Key
}

// NewUntriedPods returns none.
func NewUntriedPods(clock clock.PassiveClock) *UntriedPods {
	return &UntriedPods{
		clock: clock, arrived: map[types.UID]time.Time{}, newest: map[types.UID]time.Time{},
		added: map[string]map[types.UID]*corev1.Pod{}, byKey: map[demand.Key]map[types.UID]*corev1.Pod{}, keys: map[types.UID]demand.Key{},
	}
}

// Set records whether a pod without a node is one of them.
func (u *UntriedPods) Set(pod *corev1.Pod, untried bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.uncount(pod)
	if !untried {
		return
	}
	insert(u.added, pod.Namespace, pod)
	if _, known := u.arrived[pod.UID]; !known {
		now := u.clock.Now()
		if u.arrived[pod.UID] = now; len(u.newest) > 1000 {
			maps.DeleteFunc(u.newest, func(_ types.UID, at time.Time) bool { return now.Sub(at) > time.Minute })
		}
		u.newest[groupOf(pod)] = now
	}
}

// Remove removes a pod that has got a node, or has ended.
func (u *UntriedPods) Remove(pod *corev1.Pod) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.uncount(pod)
	delete(u.arrived, pod.UID)
}

func (u *UntriedPods) uncount(pod *corev1.Pod) {
	if key, known := u.keys[pod.UID]; known {
		delete(u.keys, pod.UID)
		drop(u.byKey, key, pod.UID)
	}
	drop(u.added, pod.Namespace, pod.UID)
}

// ArrivedAt returns when a pod, which may have been tried since, or the last one with its
// controller (of its namespace, if they have none) became one of them: now, if it never did.
func (u *UntriedPods) ArrivedAt(pod *corev1.Pod) time.Time {
	u.mu.Lock()
	defer u.mu.Unlock()
	at, known := u.arrived[pod.UID]
	if !known {
		return u.clock.Now()
	}
	if newest := u.newest[groupOf(pod)]; newest.After(at) {
		return newest
	}
	return at
}

// groupOf returns whose pods a burst is.
func groupOf(pod *corev1.Pod) types.UID {
	if controller := metav1.GetControllerOfNoCopy(pod); controller != nil {
		return controller.UID
	}
	return types.UID(pod.Namespace)
}

// Count counts those that keyOf returns a key for, and that are of use.
func (u *UntriedPods) Count(key demand.Key, keyOf func(*corev1.Pod) (demand.Key, bool), use func(*corev1.Pod) bool) (n int32) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for uid, pod := range u.added[key.Namespace] {
		if key, ok := keyOf(pod); ok {
			drop(u.added, pod.Namespace, uid)
			insert(u.byKey, key, pod)
			u.keys[uid] = key
		}
	}
	for uid, pod := range u.byKey[key] {
		if current, ok := keyOf(pod); !ok || current != key {
			// Its owner can be read by now.
			delete(u.keys, uid)
			drop(u.byKey, key, uid)
			insert(u.added, pod.Namespace, pod)
		} else if use(pod) {
			n++
		}
	}
	return n
}

func insert[K comparable](index map[K]map[types.UID]*corev1.Pod, key K, pod *corev1.Pod) {
	if index[key] == nil {
		index[key] = map[types.UID]*corev1.Pod{}
	}
	index[key][pod.UID] = pod
}

func drop[K comparable](index map[K]map[types.UID]*corev1.Pod, key K, pod types.UID) {
	if delete(index[key], pod); len(index[key]) == 0 {
		delete(index, key)
	}
}

// Size is how much is kept of pods.
func (u *UntriedPods) Size() int {
	u.mu.Lock()
	defer u.mu.Unlock()
	return len(u.arrived) + len(u.added) + len(u.byKey) + len(u.keys)
}
