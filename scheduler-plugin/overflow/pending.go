package overflow

import (
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// pendingPods are the pods that PostFilter reported and that have no node yet, with
// the events that they have got. Safe for concurrent use.
type pendingPods struct {
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

// lastEvent is the last event of a reason.
type lastEvent struct {
	key string
	at  time.Time
}

func newPendingPods() *pendingPods { return &pendingPods{pods: map[types.UID]*pendingPod{}} }

func (p *pendingPods) add(uid types.UID, name types.NamespacedName, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pods[uid] == nil {
		p.pods[uid] = &pendingPod{name: name, since: now, events: map[string]lastEvent{}}
	}
}

func (p *pendingPods) remove(uid types.UID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.pods, uid)
}

func (p *pendingPods) has(uid types.UID) bool {
	_, ok := p.name(uid)
	return ok
}

func (p *pendingPods) name(uid types.UID) (types.NamespacedName, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	pod := p.pods[uid]
	if pod == nil {
		return types.NamespacedName{}, false
	}
	return pod.name, true
}

// in calls f for each pod of a namespace.
func (p *pendingPods) in(namespace string, f func(types.UID, types.NamespacedName)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for uid, pod := range p.pods {
		if pod.name.Namespace == namespace {
			f(uid, pod.name)
		}
	}
}

// announce reports whether a pod is to get an event: one of each reason in eventInterval,
// because what a provider lacks may change each second, for thousands of pods that wait; and in
// repeatAfter if it repeats the last one. One of what was requested for it or granted is not for
// a pod that has a place; placed is called under the lock, because its binding calls announced
// after that.
func (p *pendingPods) announce(uid types.UID, e event, now time.Time, placed func(types.UID) bool) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	pod := p.pods[uid]
	if pod == nil || (e.reason == reasonGranted || e.reason == reasonRequested) && placed(uid) {
		return false
	}
	last, known := pod.events[e.reason]
	if age := now.Sub(last.at); known && (age < eventInterval || last.key == e.key && age < repeatAfter) {
		return false
	}
	pod.events[e.reason] = lastEvent{e.key, now}
	return true
}

// waiting returns those that were added before a time.
func (p *pendingPods) waiting(before time.Time) map[types.UID]types.NamespacedName {
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

// announced reports whether the last event of a reason that a pod has got is about a cluster.
func (p *pendingPods) announced(uid types.UID, reason, cluster string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	pod := p.pods[uid]
	return pod != nil && slices.Contains(strings.Split(pod.events[reason].key, ","), cluster)
}

// untriedPods are the pods of a scheduler that it has not tried yet, by their keys: to count
// those of one key does not take longer with the number of others. Safe for concurrent use.
type untriedPods struct {
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

func newUntriedPods(clock clock.PassiveClock) *untriedPods {
	return &untriedPods{
		clock: clock, arrived: map[types.UID]time.Time{}, newest: map[types.UID]time.Time{},
		added: map[string]map[types.UID]*corev1.Pod{}, byKey: map[demand.Key]map[types.UID]*corev1.Pod{}, keys: map[types.UID]demand.Key{},
	}
}

// set records whether a pod without a node is one of them.
func (u *untriedPods) set(pod *corev1.Pod, untried bool) {
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

// remove removes a pod that has got a node, or has ended.
func (u *untriedPods) remove(pod *corev1.Pod) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.uncount(pod)
	delete(u.arrived, pod.UID)
}

func (u *untriedPods) uncount(pod *corev1.Pod) {
	if key, known := u.keys[pod.UID]; known {
		delete(u.keys, pod.UID)
		drop(u.byKey, key, pod.UID)
	}
	drop(u.added, pod.Namespace, pod.UID)
}

// arrivedAt returns when a pod, which may have been tried since, or the last one with its
// controller (of its namespace, if they have none) became one of them: now, if it never did.
func (u *untriedPods) arrivedAt(pod *corev1.Pod) time.Time {
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

// count counts those that keyOf returns a key for, and that are of use.
func (u *untriedPods) count(key demand.Key, keyOf func(*corev1.Pod) (demand.Key, bool), use func(*corev1.Pod) bool) (n int32) {
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
