package waiting

import (
	"cmp"
	lineheap "container/heap"
	"iter"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	framework "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/backend/heap"
	"k8s.io/utils/clock"

	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/usage"
)

const (
	// MinRetry and MaxRetry limit how long the gate holds a pod that nothing wakes. It
	// doubles with each attempt.
	MinRetry, MaxRetry = time.Minute, 5 * time.Minute
	// missedRetry is how long the gate holds a pod that was woken for a place and did not
	// get it: the scheduler may have seen the place later than the gate. It is four times
	// as long with each attempt up to maxMissed; then MinRetry applies.
	missedRetry = time.Second
	maxMissed   = 3
	// rewakeAfter is when a woken pod that was not tried is woken again: another plugin may
	// have kept it out of the queue.
	rewakeAfter = 10 * time.Second
	// KeptFor is how long a place is kept for a woken pod that is not tried.
	KeptFor = 3 * rewakeAfter
	// SnapshotLag is how much older than the start of a scheduling cycle the state may
	// be that the cycle has seen.
	SnapshotLag = 250 * time.Millisecond
	// MaxHold is how long the gate holds a pod that was not tried yet: autoscalers and people
	// are to see soon that it does not fit. It opens up to resyncPeriod later.
	MaxHold = 2 * time.Second
)

// Gate keeps pods that do not fit and wait for capacity in other clusters, and for a short
// time those of the same key that were not tried yet, out of the scheduling queue, until an
// attempt may succeed: a node of this cluster has room for them, a grant of theirs has a
// free slot, or the time for a retry has come. It opens for as many pods as there are
// places, by priority, then age. A pod that the gate does not know passes. Safe for
// concurrent use.
type Gate struct {
	clock clock.PassiveClock

	mu   sync.Mutex
	pods map[types.UID]*waitingPod
	// byKey are the pods by priority, then age.
	byKey map[demand.Key][]*waitingPod
	// opened are the pods that the gate was opened for a place for, by that, until they are
	// assumed to have one, or keptUntil.
	opened map[opening]map[*waitingPod]struct{}
	// failures has the last failed cycle of each key of byKey that has had one.
	failures map[demand.Key]failure
	// byRetry are the pods by retryAt.
	byRetry *heap.Heap[*waitingPod]
}

// failure is a cycle in which a pod did not fit.
type failure struct {
	beganAt, endedAt time.Time
	priority         int32
}

// waitingPod is a pod that did not fit in its last scheduling cycle, or that is held because
// another one of its key did not.
type waitingPod struct {
	HeapItem
	Pod *corev1.Pod
	Key demand.Key
	// latest is the pod as its informer showed it last, if its spec has changed since.
	latest *corev1.Pod
	// since is when it did not fit first, or was held, triedAt the start of the last cycle.
	since, triedAt time.Time
	// retryAt is when the gate opens at the latest, or the pod is woken again; retries
	// doubles the time until then.
	retryAt time.Time
	retries int
	// missed is the number of cycles since the pod was woken for a place that it did not
	// get; 0 if there is none.
	missed int
	// undecided: in its last cycle, preemption waited for the decision of the broker.
	undecided bool
	open      bool
	// lostUntil is when room at home opens the gate again for a pod of a gang that has lost
	// its place there, because the others had none.
	lostUntil time.Time
	// untried: it is held, and has had no cycle. triedAt is that of the other pod.
	untried bool
	// tracked: the gate was never closed for it, but it is woken as the others are.
	tracked bool
	// Opening is what the gate was opened for, for as long as the pod is in gate.opened, which is
	// until keptUntil if it is not tried.
	Opening   opening
	keptUntil time.Time
}

// HeapItem is embedded in what kube-scheduler's heaps hold: pods.
type HeapItem struct{}

// Size implements heap.Item.
func (HeapItem) Size() int { return 1 }

// Type implements heap.Item.
func (HeapItem) Type() framework.EntityKeyType { return framework.PodKeyType }

// opening is a place that the gate was opened for, of a pod that does not use it: it is
// another pod's. The zero opening is none.
type opening struct {
	// key of the pods whose grant has the slot, or else room.
	key  demand.Key
	room usage.RoomID
}

// openFor opens the gate for a pod that a place has become free for.
func (g *Gate) openFor(w *waitingPod, of opening) {
	now := g.clock.Now()
	g.wake(w, now)
	w.keptUntil = now.Add(KeptFor)
	g.keep(w, of)
}

// keep notes what the gate is opened for, for a pod; for nothing any more, if of is zero.
func (g *Gate) keep(w *waitingPod, of opening) {
	g.unkeep(w)
	if w.Opening = of; of == (opening{}) {
		return
	}
	if g.opened[of] == nil {
		g.opened[of] = map[*waitingPod]struct{}{}
	}
	g.opened[of][w] = struct{}{}
}

// unkeep removes a pod from those that the gate is opened for a place for. The pod itself still
// has the place noted.
func (g *Gate) unkeep(w *waitingPod) {
	same := g.opened[w.Opening]
	if delete(same, w); len(same) == 0 {
		delete(g.opened, w.Opening)
	}
}

// NewGate returns a gate that holds no pod.
func NewGate(clock clock.PassiveClock) *Gate {
	return &Gate{clock: clock, pods: map[types.UID]*waitingPod{}, byKey: map[demand.Key][]*waitingPod{},
		opened: map[opening]map[*waitingPod]struct{}{}, failures: map[demand.Key]failure{},
		byRetry: heap.New(func(w *waitingPod) string { return string(w.Pod.UID) }, func(x, y *waitingPod) bool { return x.retryAt.Before(y.retryAt) })}
}

// UnresolvedKey is the key by which the gate knows a pod whose owner is unknown: no other
// pod has it.
func UnresolvedKey(pod *corev1.Pod) demand.Key {
	return demand.Key{Namespace: pod.Namespace, Shape: string(pod.UID)}
}

// Resolve opens the gate for a pod that it does not know by its key, and reports whether
// there is one: its next cycle tells.
func (g *Gate) Resolve(pod *corev1.Pod, key demand.Key) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	w := g.pods[pod.UID]
	if w == nil || w.Key == key || w.Key != UnresolvedKey(pod) {
		return false
	}
	g.wake(w, g.clock.Now())
	return true
}

// Since returns when a pod did not fit first, or was held: now, if the gate does not know it.
func (g *Gate) Since(uid types.UID) time.Time {
	g.mu.Lock()
	defer g.mu.Unlock()
	if w := g.pods[uid]; w != nil {
		return w.since
	}
	return g.clock.Now()
}

// Close closes the gate for a pod that did not fit in a cycle that began at triedAt.
// If decision is not zero, preemption waits for a decision until then. The result is
// what the gate was opened for.
func (g *Gate) Close(pod *corev1.Pod, key demand.Key, triedAt, decision time.Time) (unused opening) {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := g.clock.Now()
	w := &waitingPod{since: now}
	if before := g.remove(pod.UID); before != nil {
		w.since, unused, w.lostUntil = before.since, before.Opening, before.lostUntil
		if !before.untried {
			w.retries = before.retries + 1
		}
		if unused != (opening{}) {
			w.missed = 1
		} else if before.missed > 0 {
			w.missed = before.missed + 1
		}
		if before.latest != nil && before.latest.Generation > pod.Generation {
			// The cycle was that of the former spec.
			w.latest, w.open = before.latest, true
		}
	}
	w.Pod, w.Key, w.triedAt = pod, key, triedAt
	w.retryAt = now.Add(min(MinRetry<<min(w.retries, 8), MaxRetry))
	if w.missed > 0 && w.missed <= maxMissed {
		w.retryAt = now.Add(missedRetry << (2 * (w.missed - 1)))
	}
	if w.undecided = !decision.IsZero(); w.undecided && decision.Before(w.retryAt) {
		w.retryAt = decision
	}
	g.insert(w)
	g.failures[key] = failure{beganAt: triedAt, endedAt: now, priority: corev1helpers.PodPriority(pod)}
	return unused
}

// Hold closes the gate, for MaxHold at most, for a pod that was not tried yet, if one of its
// key, and of no lower priority, has just not fit and waits: this would not fit either. It
// opens for the same places. It reports whether the gate is closed.
func (g *Gate) Hold(pod *corev1.Pod, key demand.Key) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	now, last := g.clock.Now(), g.failures[key]
	if g.pods[pod.UID] != nil || now.Sub(last.endedAt) >= MaxHold || corev1helpers.PodPriority(pod) > last.priority {
		return false
	}
	g.insert(&waitingPod{Pod: pod, Key: key, since: now, triedAt: last.beganAt, retryAt: now.Add(MaxHold), untried: true})
	return true
}

// Failing reports whether a pod has just not fit, so that others may be held.
func (g *Gate) Failing() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.failures) > 0
}

func (g *Gate) insert(w *waitingPod) {
	g.pods[w.Pod.UID] = w
	line := g.byKey[w.Key]
	at, _ := slices.BinarySearchFunc(line, w, (*waitingPod).compare)
	g.byKey[w.Key] = slices.Insert(line, at, w)
	g.byRetry.AddOrUpdate(w)
}

// Track records a pod that waits, without closing the gate for it: its last cycle could
// not tell its key, or whether there are grants. It has no effect on a known pod.
func (g *Gate) Track(pod *corev1.Pod, key demand.Key) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.pods[pod.UID] != nil {
		return
	}
	now := g.clock.Now()
	g.insert(&waitingPod{Pod: pod, Key: key, since: now, retryAt: now.Add(MinRetry), open: true, tracked: true})
}

// OpenForRoomOf reports whether the gate is open for a pod because a node or a pool has room for it.
func (g *Gate) OpenForRoomOf(uid types.UID) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	w := g.pods[uid]
	return w != nil && w.open && w.Opening.room != (usage.RoomID{})
}

// waits reports whether a pod may be woken.
func (w *waitingPod) waits() bool { return !w.open || w.tracked }

// wake opens the gate for a pod.
func (g *Gate) wake(w *waitingPod, now time.Time) {
	w.open, w.tracked = true, false
	g.retryBy(w, now.Add(rewakeAfter))
}

// retryBy sets when the gate opens for a pod at the latest, or the pod is woken again.
func (g *Gate) retryBy(w *waitingPod, at time.Time) {
	w.retryAt = at
	g.byRetry.AddOrUpdate(w)
}

// Observe records a pod as an informer shows it. It reports whether the gate is open
// because the pod's spec has changed since its last cycle.
func (g *Gate) Observe(pod *corev1.Pod) (changed bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	w := g.pods[pod.UID]
	if w == nil || pod.Generation <= w.Pod.Generation {
		return false
	}
	w.latest = pod
	g.wake(w, g.clock.Now())
	return true
}

// Stale reports whether the last cycle of a pod was that of a former spec.
func (g *Gate) Stale(uid types.UID) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	w := g.pods[uid]
	return w != nil && w.latest != nil
}

// Passes reports whether a pod may be scheduled. A pod whose spec has changed since
// its last cycle may.
func (g *Gate) Passes(pod *corev1.Pod) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	w := g.pods[pod.UID]
	return w == nil || w.open || w.Pod.Generation != pod.Generation
}

// Drop removes a pod that no longer waits: it passes. It returns what was known of
// it, or nil.
func (g *Gate) Drop(uid types.UID) *waitingPod {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.remove(uid)
}

func (g *Gate) remove(uid types.UID) *waitingPod {
	w := g.pods[uid]
	if w == nil {
		return nil
	}
	delete(g.pods, uid)
	g.byRetry.Delete(w)
	g.unkeep(w)
	line := g.byKey[w.Key]
	at, _ := slices.BinarySearchFunc(line, w, (*waitingPod).compare)
	at += slices.Index(line[at:], w) // from the first that is equal
	if g.byKey[w.Key] = slices.Delete(line, at, at+1); len(line) == 1 {
		delete(g.byKey, w.Key)
		delete(g.failures, w.Key)
	}
	return w
}

// Assumed records that a pod has got a place, which is counted as taken from now on: room on
// a node or in a pool, or a slot of a grant if room is zero. The result is what the gate was
// opened for, if that was another place.
func (g *Gate) Assumed(uid types.UID, room usage.RoomID) (unused opening) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if w := g.pods[uid]; w != nil {
		taken := opening{room: room}
		if room == (usage.RoomID{}) {
			taken.key = w.Key
		}
		if unused = w.Opening; unused == taken || g.exchange(w, taken) {
			unused = opening{}
		}
		g.keep(w, opening{})
		if w.open {
			g.retryBy(w, g.clock.Now().Add(MaxRetry)) // its cycle goes on
		}
	}
	return unused
}

// exchange gives what the gate was opened for, for a pod that has taken another place, to a pod
// of its key that the gate was opened for that place, and reports whether there is one. A pool
// may be for some pods of a key only, so its places are not exchanged.
func (g *Gate) exchange(w *waitingPod, taken opening) bool {
	if w.Opening == (opening{}) || w.Opening.room.InPool() || taken.room.InPool() {
		return false
	}
	var first *waitingPod
	for other := range g.opened[taken] {
		if other != w && other.Key == w.Key && (first == nil || other.compare(first) < 0) {
			first = other
		}
	}
	if first != nil {
		g.keep(first, w.Opening)
	}
	return first != nil
}

// TriedAt returns the start of a pod's last cycle; known is false if it does not wait.
func (g *Gate) TriedAt(uid types.UID) (at time.Time, known bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	w := g.pods[uid]
	if w == nil {
		return time.Time{}, false
	}
	return w.triedAt, true
}

// keys returns the keys of the waiting pods.
func (g *Gate) keys() []demand.Key {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Collect(maps.Keys(g.byKey))
}

// Len returns how many pods the gate knows.
func (g *Gate) Len() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.pods)
}

// openDue opens the gate for pods whose retry is due, or wakes them again. It returns the
// places that were kept for them for long enough.
func (g *Gate) openDue() (pods []*corev1.Pod, unused []opening) {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := g.clock.Now()
	for w, some := g.byRetry.Peek(); some && !w.retryAt.After(now); w, some = g.byRetry.Peek() {
		if w.Opening != (opening{}) && !w.keptUntil.After(now) {
			unused = append(unused, w.Opening)
			g.keep(w, opening{})
		}
		g.wake(w, now)
		pods = append(pods, w.Pod)
	}
	return pods, unused
}

// openDecided opens the gate for the pods of a key that wait for a decision, but for those,
// the most important ones without a place, that capacity is still coming for.
func (g *Gate) openDecided(key demand.Key, coming int32, placed func(types.UID) bool) []*corev1.Pod {
	g.mu.Lock()
	defer g.mu.Unlock()
	var pods []*corev1.Pod
	for _, w := range g.byKey[key] {
		if coming > 0 {
			if !placed(w.Pod.UID) {
				coming--
			}
		} else if w.waits() && w.undecided {
			g.wake(w, g.clock.Now())
			pods = append(pods, w.Pod)
		}
	}
	return pods
}

// IsAmong reports whether a pod is among the first n of its key that have no place.
func (g *Gate) IsAmong(n int32, pod *corev1.Pod, key demand.Key, placed func(types.UID) bool) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	this := &waitingPod{Pod: pod}
	for _, w := range g.byKey[key] {
		if n <= 0 || w.Pod.UID == pod.UID || w.compare(this) >= 0 {
			break
		}
		if !placed(w.Pod.UID) {
			n--
		}
	}
	return n > 0
}

// slots are the places that a grant has on one virtual node.
type slots struct {
	node *corev1.Node
	free int32
	// changedAt is when the grant or the node last changed.
	changedAt time.Time
}

// openForSlots opens the gate for as many pods of a key as have a free slot, the most
// important first. A pod that was tried since the slots changed is not tried again.
func (g *Gate) openForSlots(key demand.Key, all []slots) []*corev1.Pod {
	g.mu.Lock()
	defer g.mu.Unlock()
	free := -int32(len(g.opened[opening{key: key}]))
	for _, s := range all {
		free += max(0, s.free)
	}
	var pods []*corev1.Pod
	if free <= 0 {
		return nil
	}
	for _, w := range g.byKey[key] {
		if free == 0 {
			break
		}
		if !w.waits() || !slices.ContainsFunc(all, func(s slots) bool {
			return s.free > 0 && s.changedAt.After(w.triedAt.Add(-SnapshotLag)) && usage.ToleratesOverflow(w.Pod, s.node)
		}) {
			continue
		}
		g.openFor(w, opening{key: w.Key})
		pods = append(pods, w.Pod)
		free--
	}
	return pods
}

// OpenForRoom opens the gate for as many pods as have room on these nodes of this
// cluster, or in these pools, the most important first. A pod that was tried since a
// room changed is not tried again for it. The free amounts of the rooms are changed.
func (g *Gate) OpenForRoom(rooms []usage.Room) []*corev1.Pod {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, r := range rooms {
		for w := range g.opened[opening{room: r.RoomID}] {
			need, _ := r.Need(w.Pod)
			r.Free.Add(need, -1)
		}
	}
	// Pods of one key are alike, but for what a pool selects. Once one does not fit, none does.
	type pair struct {
		key  demand.Key
		room usage.RoomID
	}
	unfit := map[pair]bool{}
	var pods []*corev1.Pod
	full := func(key demand.Key) bool {
		return !slices.ContainsFunc(rooms, func(r usage.Room) bool { return !unfit[pair{key, r.RoomID}] })
	}
	for w := range g.inOrder(full) {
		if !w.waits() || w.lostUntil.After(g.clock.Now()) {
			continue
		}
		for i := range rooms {
			r := &rooms[i]
			if !r.ChangedAt.After(w.triedAt.Add(-SnapshotLag)) || unfit[pair{w.Key, r.RoomID}] {
				continue
			}
			if r.Selects != nil && !r.Selects(w.Pod) {
				continue
			}
			need, ok := r.Need(w.Pod)
			if !ok || need.FitsIn(r.Free) == 0 {
				unfit[pair{w.Key, r.RoomID}] = true
				continue
			}
			r.Free.Add(need, -1)
			g.openFor(w, opening{room: r.RoomID})
			pods = append(pods, w.Pod)
			break
		}
	}
	return pods
}

// compare orders pods by priority, then age.
func (w *waitingPod) compare(other *waitingPod) int {
	return cmp.Or(
		cmp.Compare(corev1helpers.PodPriority(other.Pod), corev1helpers.PodPriority(w.Pod)),
		w.Pod.CreationTimestamp.Compare(other.Pod.CreationTimestamp.Time),
		cmp.Compare(w.Pod.Name, other.Pod.Name),
	)
}

// lines is a heap of the pods of each key, in order: the first pod of the first line is before
// all others.
type lines [][]*waitingPod

func (l lines) Len() int           { return len(l) }
func (l lines) Less(i, j int) bool { return l[i][0].compare(l[j][0]) < 0 }
func (l lines) Swap(i, j int)      { l[i], l[j] = l[j], l[i] }
func (l *lines) Push(line any)     { *l = append(*l, line.([]*waitingPod)) }

func (l *lines) Pop() any {
	last := (*l)[len(*l)-1]
	*l = (*l)[:len(*l)-1]
	return last
}

// inOrder yields the pods by priority, then age, and those of a key until done reports that
// the others of it are of no use. Those are not looked at.
func (g *Gate) inOrder(done func(demand.Key) bool) iter.Seq[*waitingPod] {
	return func(yield func(*waitingPod) bool) {
		left := lines(slices.Collect(maps.Values(g.byKey)))
		lineheap.Init(&left)
		for len(left) > 0 {
			w := left[0][0]
			if !yield(w) {
				return
			}
			if left[0] = left[0][1:]; len(left[0]) == 0 || done(w.Key) {
				lineheap.Pop(&left)
			} else {
				lineheap.Fix(&left, 0)
			}
		}
	}
}

// Retry makes sure that a pod that had a place and lost it, at a time, is woken as those that
// wait, but for some time not for room at home, which may then be another pod's.
func (g *Gate) Retry(pod *corev1.Pod, key demand.Key, at time.Time) {
	g.Track(pod, key)
	g.mu.Lock()
	defer g.mu.Unlock()
	if w := g.pods[pod.UID]; w != nil && w.open {
		w.tracked, w.triedAt, w.lostUntil = true, at, at.Add(MinRetry)
		g.retryBy(w, at.Add(MinRetry))
	}
}
