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
	// reminders are the pods that may have to get an event of the request for them, by time.
	reminders []reminder
	// late are the pods that have not got an event of a change, because they have got many.
	late []reminder
}

// A pod gets freeChanges events of one reason that differ from the one before as they come, and
// further ones once in eventInterval: what a provider lacks may change each second, for
// thousands of pods that wait.
const freeChanges, eventInterval = 3, time.Minute

// reminder is a pod, which may be gone, to be looked at again.
type reminder struct {
	pod types.UID
	at  time.Time
}

type pendingPod struct {
	name types.NamespacedName
	// events has the last event by reason.
	events map[string]lastEvent
	// late: it is among pendingPods.late.
	late bool
	// requested: a Reservation requests capacity for it.
	requested bool
}

// lastEvent is the last event of a reason.
type lastEvent struct {
	key     string
	at      time.Time
	changes int
}

func newPendingPods() *pendingPods { return &pendingPods{pods: map[types.UID]*pendingPod{}} }

func (p *pendingPods) add(uid types.UID, name types.NamespacedName) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pods[uid] == nil {
		p.pods[uid] = &pendingPod{name: name, events: map[string]lastEvent{}}
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

// announce reports whether a pod is to get an event: not if the event repeats its last one
// of that reason, nor if the pod has just had many: then takeLate returns the pod later. One of
// what was requested for it or granted is not for a pod that has a place; placed is called under
// the lock, because its binding calls announced after that.
func (p *pendingPods) announce(uid types.UID, e event, now time.Time, placed func(types.UID) bool) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	pod := p.pods[uid]
	if pod == nil || (e.reason == reasonGranted || e.reason == reasonRequested) && placed(uid) {
		return false
	}
	last, known := pod.events[e.reason]
	if known && last.key == e.key {
		return false
	}
	if next := last.at.Add(eventInterval); last.changes > freeChanges && now.Before(next) {
		if !pod.late {
			pod.late = true
			p.late = append(p.late, reminder{uid, next})
		}
		return false
	}
	pod.events[e.reason] = lastEvent{e.key, now, last.changes + 1}
	return true
}

// takeLate returns the pods that may get an event again of which they have not got one.
func (p *pendingPods) takeLate(now time.Time) (pods []types.UID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.late = slices.DeleteFunc(p.late, func(r reminder) bool {
		if r.at.After(now) {
			return false
		}
		if pod := p.pods[r.pod]; pod != nil {
			pod.late = false
			pods = append(pods, r.pod)
		}
		return true
	})
	return pods
}

// withoutRequest returns the pods that remind was not called for.
func (p *pendingPods) withoutRequest(pods []types.UID) (without []types.UID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, uid := range pods {
		if pod := p.pods[uid]; pod != nil && !pod.requested {
			without = append(without, uid)
		}
	}
	return without
}

// remind makes reminded return pods for which capacity is requested, at a time that is no
// earlier than that of former calls.
func (p *pendingPods) remind(pods []types.UID, at time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, uid := range pods {
		if pod := p.pods[uid]; pod != nil {
			pod.requested = true
			p.reminders = append(p.reminders, reminder{uid, at})
		}
	}
}

// reminded returns once those that are still pending, and that have no event of the request.
func (p *pendingPods) reminded(now time.Time) (pods []types.UID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.reminders) > 0 && !p.reminders[0].at.After(now) {
		uid := p.reminders[0].pod
		p.reminders = p.reminders[1:]
		if pod := p.pods[uid]; pod != nil && pod.events[reasonRequested].key == "" {
			pods = append(pods, uid)
		}
	}
	return pods
}

// announced reports whether the last event of a reason that a pod has got is about a cluster.
func (p *pendingPods) announced(uid types.UID, reason, cluster string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	pod := p.pods[uid]
	return pod != nil && slices.Contains(strings.Split(pod.events[reason].key, ","), cluster)
}

// unsteeredPods are the pods that wait for another scheduler, with those among them that have no
// event of that yet: their namespace has not opted in, or this replica was not active. Not safe
// for concurrent use.
type unsteeredPods struct {
	names map[types.UID]types.NamespacedName
	// silent are those without the event, by namespace.
	silent map[string]map[types.UID]bool
	// due are the namespaces that have silent ones to look at.
	due map[string]bool
}

func newUnsteeredPods() *unsteeredPods {
	return &unsteeredPods{names: map[types.UID]types.NamespacedName{}, silent: map[string]map[types.UID]bool{}, due: map[string]bool{}}
}

// add adds a pod, or reports that it was changed.
func (u *unsteeredPods) add(uid types.UID, name types.NamespacedName) {
	if _, known := u.names[uid]; !known {
		u.names[uid] = name
		if u.silent[name.Namespace] == nil {
			u.silent[name.Namespace] = map[types.UID]bool{}
		}
		u.silent[name.Namespace][uid] = true
	}
	u.lookAt(name.Namespace)
}

func (u *unsteeredPods) remove(uid types.UID) {
	u.recorded(uid)
	delete(u.names, uid)
}

// recorded records that a pod has the event.
func (u *unsteeredPods) recorded(uid types.UID) {
	namespace := u.names[uid].Namespace
	if delete(u.silent[namespace], uid); len(u.silent[namespace]) == 0 {
		delete(u.silent, namespace)
		delete(u.due, namespace)
	}
}

// lookAt makes take return the silent pods of a namespace.
func (u *unsteeredPods) lookAt(namespace string) {
	if len(u.silent[namespace]) > 0 {
		u.due[namespace] = true
	}
}

// waiting reports whether take has something to look at.
func (u *unsteeredPods) waiting() bool { return len(u.due) > 0 }

// take returns the silent pods of the namespaces that were to be looked at and that have opted
// in.
func (u *unsteeredPods) take(optedIn func(namespace string) bool) (pods []types.UID) {
	for namespace := range u.due {
		if optedIn(namespace) {
			pods = slices.AppendSeq(pods, maps.Keys(u.silent[namespace]))
		}
	}
	clear(u.due)
	return pods
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
