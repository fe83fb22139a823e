package request

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/flowcontrol"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/klog/v2"
	podutil "k8s.io/kubernetes/pkg/api/v1/pod"
	"k8s.io/kubernetes/pkg/scheduler/backend/heap"
	"k8s.io/utils/clock"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/condition"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/gang"
	"github.com/spillway-dev/spillway/scheduler-plugin/owners"
	"github.com/spillway-dev/spillway/scheduler-plugin/usage"
	"github.com/spillway-dev/spillway/scheduler-plugin/waiting"
)

// resyncPeriod is how often retries that are due are looked for.
const resyncPeriod = time.Second

// Config is what a Controller reads and tells others.
type Config struct {
	Log          klog.Logger
	Clock        clock.WithTicker
	Queue        *waiting.WorkQueue
	Batcher      *demand.Batcher
	Grants       *usage.GrantCache
	Gate         *waiting.Gate
	Placements   *usage.Placements
	Waker        *waiting.Waker
	Keys         *owners.KeyCache
	Gangs        *gang.Gangs
	Untried      *waiting.UntriedPods
	Pods         corelisters.PodLister
	Namespaces   corelisters.NamespaceLister
	Reservations *Reservations
	Policies     PolicyCache
	// Pending pods; only those that can overflow are in the batcher.
	Pending *waiting.PendingPods
	// Synced reports whether the caches of Reservations and policies are complete, and
	// Counted, whether Placements is.
	Synced, Counted func() bool
	// Active reports whether this replica has to write requests and events.
	Active   func() bool
	Recorder events.EventRecorder
	// Client writes the conditions of pods.
	Client kubernetes.Interface
	// Profile is the scheduler of the pods. Steers: pods are steered to it, and it records it on
	// those that are not.
	Profile string
	Steers  bool
	// AskAfter is how long a pod must not have fit before capacity is requested for it.
	AskAfter time.Duration
}

// Controller requests capacity for unschedulable pods, records the progress in
// events on the pods, and wakes the pods when they may be schedulable. It recomputes
// the capacity to request from what it observes. It raises counts: the agent lowers what is
// not needed. One goroutine takes the work from the queue and wakes pods; it never waits for
// a write. Others write the Reservations, one for each slot at a time.
type Controller struct {
	Config

	// later has the pods that are looked at again by themselves.
	later *heap.Heap[laterPod]
	// unsteered has the pods that wait for another scheduler, with when that was recorded last.
	unsteered map[types.UID]time.Time
	// nextLook is when to look at what pods wait for, and nextExplained, when to compare their
	// conditions with that.
	nextLook, nextExplained time.Time
	// recounted is true once the grants were applied to the complete placements.
	recounted bool

	writes     *writeQueue
	decisions  decisions
	conditions *condition.Writer
	// refusals has the keys whose Reservations the API server does not accept.
	refusals *flowcontrol.Backoff
}

// laterPod is a pod that is looked at again after a time: that of AskAfter or, if its owner is in
// no cache yet, zero.
type laterPod struct {
	waiting.HeapItem
	uid  types.UID
	name types.NamespacedName
	at   time.Time
}

// New returns a Controller, which does nothing until Run or Sync is called.
func New(config Config) *Controller {
	return &Controller{
		Config: config, writes: newWriteQueue(config.Clock), refusals: newRefusals(config.Clock),
		decisions:  decisions{events: map[demand.Key]Event{}},
		conditions: condition.New(config.Client, config.Clock, func() { Writes.WithLabelValues(WriteCondition).Inc() }),
		later:      heap.New(func(p laterPod) string { return string(p.uid) }, func(x, y laterPod) bool { return x.at.Before(y.at) }),
	}
}

// Run processes the queue, and writes what Sync returns, until ctx ends.
func (c *Controller) Run(ctx context.Context) {
	defer c.writes.slots.ShutDown()
	defer c.conditions.ShutDown()
	for range writers {
		go c.write(ctx)
		go c.conditions.Run(ctx, c.Log)
	}
	for {
		for _, request := range c.Sync() {
			c.writes.add(c.slotOf(request.Key), request)
		}
		timer := c.Clock.After(max(0, c.nextSync().Sub(c.Clock.Now())))
		select {
		case <-ctx.Done():
			return
		case <-c.Queue.Ready:
		case <-timer:
		}
	}
}

// nextSync returns when to sync even if the queue stays empty.
func (c *Controller) nextSync() time.Time {
	if !c.Active() {
		// Nothing signals that the lease has become this replica's.
		return c.Clock.Now().Add(waiting.LookPeriod)
	}
	at := c.nextLook
	if due, ok := c.Batcher.Next(); ok && due.Before(at) {
		at = due
	}
	if c.nextExplained.Before(at) && c.Pending.Len() > 0 {
		at = c.nextExplained
	}
	wait := resyncPeriod
	first, some := c.later.Peek()
	unresolved := some && first.at.IsZero()
	if unresolved && c.Gate.Len() == 0 {
		wait = retryAfter
	}
	if later := c.Clock.Now().Add(wait); (unresolved || c.Gate.Len() > 0 || !c.recounted) && later.Before(at) {
		return later
	}
	return at
}

// Sync processes the queue, and returns the requests that are due.
func (c *Controller) Sync() (due []demand.Request) {
	work := c.Queue.Take()
	if !c.recounted && c.Counted() {
		// Pods were refused until now, whatever their grants.
		work.Pools = true
		c.recounted, work.AllKeys, c.Waker.CountedAt = true, true, c.Clock.Now()
	}
	for uid := range work.Removed {
		c.removePod(uid, &work)
	}
	for pod, some := c.later.Peek(); some && !pod.at.After(c.Clock.Now()); pod, some = c.later.Peek() {
		work.Unschedulable[pod.uid] = pod.name
		c.later.Delete(pod)
	}
	for namespace := range work.Namespaces {
		c.Pending.In(namespace, func(uid types.UID, name types.NamespacedName) { work.Unschedulable[uid] = name })
	}
	earliest, waits := c.Clock.Now(), false
	for uid, name := range work.Unschedulable {
		c.addPod(uid, name, &work)
		if triedAt, known := c.Gate.TriedAt(uid); known {
			waits = true
			if triedAt.Before(earliest) {
				earliest = triedAt
			}
		}
	}
	changedPods := map[string]*corev1.Pod{}
	for uid, name := range work.Changed {
		if pod := c.getPending(uid, name); pod != nil {
			changedPods[name.String()] = pod
		}
	}
	if len(changedPods) > 0 {
		waiting.GateOpenings.WithLabelValues(waiting.OpenedForSpec).Add(float64(len(changedPods)))
		c.Waker.Activate(changedPods)
	}
	for key := range work.Reservations {
		c.Reservations.dropDeleted(key)
		c.recordStatus(key, c.Batcher.Pending(key)...)
		// The agent may have lowered a count, or a Reservation may be deleted, while
		// pods are pending.
		c.Batcher.RequeueAfter(key, conflictRetryAfter)
	}
	for key := range work.Requirements {
		c.Batcher.RequeueAfter(key, conflictRetryAfter)
	}
	if waits {
		// What has changed since their cycles began.
		work.Pools = true
		c.Placements.ChangedSince(earliest.Add(-waiting.SnapshotLag), work.Nodes)
	}
	c.Waker.Wake(c.Waker.ChangedKeys(work), work.Nodes, work.Pools)
	for _, pod := range work.Asked {
		if c.Gate.OpenForRoomOf(pod.UID) { // it may need no capacity elsewhere: its next cycle is waited for
			c.Batcher.Add(pod.UID, pod.Key.Key.OfReservation(), pod.Key.Owner, pod.Key.Set, c.Clock.Now())
		}
	}
	if !c.Active() {
		return nil
	}
	if now := c.Clock.Now(); !now.Before(c.nextLook) {
		c.nextLook = now.Add(waiting.LookPeriod)
		c.look()
	}
	if now := c.Clock.Now(); !now.Before(c.nextExplained) {
		c.nextExplained = now.Add(conditionPeriod)
		c.explain()
	}
	var changed []*corev1.Pod
	requests := c.Batcher.Due(c.validator(&changed), c.totals())
	for _, pod := range changed {
		c.Queue.AddUnschedulable(pod)
	}
	// What was decided for pods that are gone does not hold for those that come later.
	c.Grants.KeepUnasked(c.Batcher.Has)
	c.decisions.keep(c.Batcher.Has)
	for _, request := range requests {
		if len(request.PodSets) == 0 {
			if members, required := c.Gangs.MembersOf(request.Key); int32(len(members)) < required {
				c.recordAll(request, incomplete(members, required))
			}
			c.Batcher.RequeueAfter(request.Key, retryAfter) // further pods of the gang do not appear here if they fit
			continue
		}
		if priority, pending := c.priorityOf(request.Pending); pending { // otherwise all were bound or deleted meanwhile
			request.Priority, request.MinAvailable = priority, c.minAvailable(request)
			due = append(due, request)
		}
	}
	return due
}

// maxPriority is that of a Reservation, which is below those of Kubernetes' own pods.
const maxPriority = 1_000_000_000

// priorityOf returns the highest priority of pending pods; ok is false if none is pending.
func (c *Controller) priorityOf(pods []types.UID) (highest int32, ok bool) {
	highest = -maxPriority
	for _, uid := range pods {
		if name, known := c.Pending.Name(uid); known {
			if pod := c.getPending(uid, name); pod != nil {
				highest, ok = max(highest, corev1helpers.PodPriority(pod)), true
			}
		}
	}
	return min(highest, maxPriority), ok
}

// removePod drops a pod that is no longer pending. The place that it was woken for may
// be another pod's.
func (c *Controller) removePod(uid types.UID, work *waiting.Work) {
	c.Batcher.Remove(uid)
	if name, known := c.Pending.Name(uid); known {
		if pod, err := c.Pods.Pods(name.Namespace).Get(name.Name); err == nil && pod.UID == uid {
			c.settle(pod)
		}
	}
	c.Pending.Remove(uid)
	c.later.Delete(laterPod{uid: uid})
	if was := c.Gate.Drop(uid); was != nil {
		pod, err := c.Pods.Pods(was.Pod.Namespace).Get(was.Pod.Name)
		if err != nil {
			pod = nil
		}
		was.ObserveEnd(pod, c.Placements.IsVirtual, c.Clock.Now())
		work.Keys[was.Key] = true
		work.AddOpening(was.Opening)
	}
}

// addPod adds an unschedulable pod to the request of its key, or records why it
// cannot overflow. It may be called again for the same pod.
func (c *Controller) addPod(uid types.UID, name types.NamespacedName, work *waiting.Work) {
	c.later.Delete(laterPod{uid: uid})
	pod := c.getPending(uid, name)
	if pod == nil {
		c.removePod(uid, work)
		c.Queue.Untrack(uid)
		return
	}
	c.Pending.Add(uid, name, c.Clock.Now())
	if !OptedIn(c.Namespaces, pod.Namespace) {
		c.release(pod, work)
		return
	}
	if ok, reason := c.Gangs.Admissible(pod); !ok {
		c.release(pod, work)
		if reason != "" {
			c.record(uid, notPossible(reason))
		}
		return
	}
	key, ok := c.Keys.Get(pod)
	if !ok {
		c.later.AddOrUpdate(laterPod{uid: uid, name: name})
		return
	}
	if c.Gate.Resolve(pod, key.Key) {
		c.Waker.Activate(map[string]*corev1.Pod{name.String(): pod})
	}
	c.Gate.Track(pod, key.Key)
	if at := c.Gate.Since(uid).Add(c.AskAfter); at.After(c.Clock.Now()) {
		c.later.AddOrUpdate(laterPod{uid: uid, name: name, at: at})
		c.record(uid, delayed(c.AskAfter))
	} else {
		arrived := c.Clock.Now()
		if c.AskAfter == 0 { // otherwise the others are not counted before their time is over
			arrived = c.Untried.ArrivedAt(pod)
		}
		c.Batcher.Add(uid, key.Key.OfReservation(), key.Owner, key.Set, arrived)
		work.Asked = append(work.Asked, waiting.Asked{UID: uid, Key: key})
	}
	work.Keys[key.Key] = true
	c.recordStatus(key.Key, uid)
}

// release stops requesting capacity for a pod, and lets it pass the gate.
func (c *Controller) release(pod *corev1.Pod, work *waiting.Work) {
	c.Batcher.Remove(pod.UID)
	if was := c.Gate.Drop(pod.UID); was != nil {
		work.AddOpening(was.Opening)
		c.Waker.Activate(map[string]*corev1.Pod{waiting.NameOf(pod).String(): pod})
	}
}

// validator reports whether a pod still needs the capacity that is requested for a
// key. Pods that need it no longer, or for another key, are added to changed.
func (c *Controller) validator(changed *[]*corev1.Pod) func(types.UID, demand.Key) bool {
	return func(uid types.UID, key demand.Key) bool {
		name, known := c.Pending.Name(uid)
		if !known {
			return false
		}
		pod := c.getPending(uid, name)
		// One that is being bound counts with those that run. If it is not bound, it is
		// added again when it does not fit any more; a gang is counted as a whole.
		if pod == nil || !key.IsGang() && c.Placements.Has(uid) {
			return false
		}
		current, resolved := c.Keys.Get(pod)
		if ok, _ := c.Gangs.Admissible(pod); ok && OptedIn(c.Namespaces, pod.Namespace) && resolved && current.Key.OfReservation() == key {
			return true
		}
		*changed = append(*changed, pod)
		return false
	}
}

// getPending returns a pod from the cache; nil unless it is pending.
func (c *Controller) getPending(uid types.UID, name types.NamespacedName) *corev1.Pod {
	pod, err := c.Pods.Pods(name.Namespace).Get(name.Name)
	if err != nil || pod.UID != uid || pod.Spec.NodeName != "" || pod.DeletionTimestamp != nil || podutil.IsPodTerminal(pod) {
		return nil
	}
	return pod
}

// totals adds to the pending pods of a key those that run in other clusters, and those
// that the scheduler has not tried yet: if one pod of a key does not fit, the others
// will not either, and are better requested with it. Terminating pods do not count:
// their replacements use their slots.
func (c *Controller) totals() func(demand.Key, broker.PodSet) []broker.PodSet {
	mayWait := func(pod *corev1.Pod) bool {
		ok, _ := c.Gangs.Admissible(pod)
		// Pending pods are in the batcher.
		return ok && c.AskAfter == 0 && !c.Pending.Has(pod.UID) && !c.Placements.Has(pod.UID)
	}
	return func(key demand.Key, pending broker.PodSet) []broker.PodSet {
		if key.IsGang() {
			return c.gangSets(key)
		}
		pending.Count += c.Placements.LivingOf(key)
		if OptedIn(c.Namespaces, key.Namespace) {
			pending.Count += c.Untried.Count(key, c.Keys.KeyOf, mayWait)
		}
		return []broker.PodSet{pending}
	}
}
