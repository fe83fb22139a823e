package overflow

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/client-go/util/workqueue"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/klog/v2"
	podutil "k8s.io/kubernetes/pkg/api/v1/pod"
	"k8s.io/kubernetes/pkg/scheduler/backend/heap"
	"k8s.io/utils/clock"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/gang"
	"github.com/spillway-dev/spillway/scheduler-plugin/owners"
	"github.com/spillway-dev/spillway/scheduler-plugin/usage"
	"github.com/spillway-dev/spillway/scheduler-plugin/waiting"
)

const (
	// conflictRetryAfter is the delay after a conflict, and after a Reservation
	// changed.
	conflictRetryAfter = 200 * time.Millisecond
	// retryAfter is the delay after a failure, or while something is pending.
	retryAfter = 2 * time.Second
	// blockedRetryAfter is the delay if another object has to change first.
	blockedRetryAfter = 15 * time.Second
	// raiseAfter is how long a count is not raised again while the last request is
	// undecided: pods that arrive one by one would otherwise restart the processing
	// in the broker and the agents each time.
	raiseAfter = 3 * time.Second
	// deletedWithin is the time that the deletion of a Reservation takes which no pod uses.
	deletedWithin = 10 * time.Second
	// resyncPeriod is how often retries that are due are looked for.
	resyncPeriod = time.Second
	// writers is how many Reservations are written at the same time.
	writers = 8
)

// demandController requests capacity for unschedulable pods, records the progress in
// events on the pods, and wakes the pods when they may be schedulable. It recomputes
// the capacity to request from what it observes. It raises counts: the agent lowers what is
// not needed. One goroutine takes the work from the queue and wakes pods; it never waits for
// a write. Others write the Reservations, one for each slot at a time.
type demandController struct {
	log          klog.Logger
	clock        clock.WithTicker
	queue        *waiting.WorkQueue
	batcher      *demand.Batcher
	grants       *usage.GrantCache
	gate         *waiting.Gate
	placements   *usage.Placements
	waker        *waiting.Waker
	keys         *owners.KeyCache
	gangs        *gang.Gangs
	untried      *waiting.UntriedPods
	pods         corelisters.PodLister
	namespaces   corelisters.NamespaceLister
	reservations *reservationStore
	policies     policyCache
	// synced reports whether the caches of Reservations and policies are complete, and
	// counted, whether placements is.
	synced, counted func() bool
	// active reports whether this replica has to write requests and events.
	active   func() bool
	recorder events.EventRecorder

	// pending pods; only those that can overflow are in the batcher.
	pending *waiting.PendingPods
	// unsteered has the pods that wait for another scheduler, with when that was recorded last.
	// steers: pods are steered to this profile, which records it.
	unsteered map[types.UID]time.Time
	steers    bool
	// nextLook is when to look at what pods wait for.
	nextLook time.Time
	// unresolved pods have an owner that no cache shows yet.
	unresolved map[types.UID]types.NamespacedName
	// askAfter is how long a pod must not have fit, and delayed has the pods for which
	// that time is not over, by its end.
	askAfter time.Duration
	delayed  *heap.Heap[delayedPod]
	// recounted is true once the grants were applied to the complete placements.
	recounted bool

	writeQueue workqueue.TypedInterface[slot]
	mu         sync.Mutex
	requests   map[demand.Key]demand.Request
	// requestedAt is when a key's count was changed last, for raiseAfter.
	requestedAt map[demand.Key]time.Time
	// refusals has the keys whose Reservations the API server does not accept.
	refusals *flowcontrol.Backoff
}

// slot is what one goroutine writes at a time: the Reservation of a key, or all those of a
// namespace (the key is zero) whose policy limits their sum, which two writes at the same time
// could exceed together.
type slot struct {
	namespace string
	key       demand.Key
}

type delayedPod struct {
	waiting.HeapItem
	uid  types.UID
	name types.NamespacedName
	// until is when capacity is requested for it.
	until time.Time
}

func newDelayedPods() *heap.Heap[delayedPod] {
	return heap.New(func(p delayedPod) string { return string(p.uid) }, func(x, y delayedPod) bool { return x.until.Before(y.until) })
}

// run processes the queue until ctx ends.
func (c *demandController) run(ctx context.Context) {
	c.unresolved, c.requests, c.requestedAt = map[types.UID]types.NamespacedName{}, map[demand.Key]demand.Request{}, map[demand.Key]time.Time{}
	c.delayed, c.refusals = newDelayedPods(), newRefusals(c.clock)
	c.writeQueue = workqueue.NewTyped[slot]()
	defer c.writeQueue.ShutDown()
	for range writers {
		go c.write(ctx)
	}
	for {
		c.sync()
		timer := c.clock.After(max(0, c.nextSync().Sub(c.clock.Now())))
		select {
		case <-ctx.Done():
			return
		case <-c.queue.Ready:
		case <-timer:
		}
	}
}

// nextSync returns when to sync even if the queue stays empty.
func (c *demandController) nextSync() time.Time {
	if !c.active() {
		// Nothing signals that the lease has become this replica's.
		return c.clock.Now().Add(waiting.LookPeriod)
	}
	at := c.nextLook
	if due, ok := c.batcher.Next(); ok && due.Before(at) {
		at = due
	}
	wait := resyncPeriod
	if len(c.unresolved) > 0 && c.gate.Len() == 0 {
		wait = retryAfter
	}
	if later := c.clock.Now().Add(wait); (len(c.unresolved) > 0 || c.gate.Len() > 0 || !c.recounted) && later.Before(at) {
		return later
	}
	return at
}

// sync processes the queue, and hands the requests that are due to the writers.
func (c *demandController) sync() {
	work := c.queue.Take()
	if !c.recounted && c.counted() {
		// Pods were refused until now, whatever their grants.
		work.Pools = true
		c.recounted, work.AllKeys, c.waker.CountedAt = true, true, c.clock.Now()
	}
	for uid := range work.Removed {
		c.removePod(uid, &work)
	}
	for uid, name := range c.unresolved {
		if _, queued := work.Unschedulable[uid]; !queued {
			work.Unschedulable[uid] = name
		}
	}
	for pod, some := c.delayed.Peek(); some && !pod.until.After(c.clock.Now()); pod, some = c.delayed.Peek() {
		work.Unschedulable[pod.uid] = pod.name
		c.undelay(pod.uid)
	}
	for namespace := range work.Namespaces {
		c.pending.In(namespace, func(uid types.UID, name types.NamespacedName) { work.Unschedulable[uid] = name })
	}
	earliest, waits := c.clock.Now(), false
	for uid, name := range work.Unschedulable {
		c.addPod(uid, name, &work)
		if triedAt, known := c.gate.TriedAt(uid); known {
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
		c.waker.Activate(changedPods)
	}
	for key := range work.Reservations {
		c.reservations.dropDeleted(key)
		c.recordStatus(key, c.batcher.Pending(key)...)
		// The agent may have lowered a count, or a Reservation may be deleted, while
		// pods are pending.
		c.batcher.RequeueAfter(key, conflictRetryAfter)
	}
	for key := range work.Requirements {
		c.batcher.RequeueAfter(key, conflictRetryAfter)
	}
	if waits {
		// What has changed since their cycles began.
		work.Pools = true
		c.placements.ChangedSince(earliest.Add(-waiting.SnapshotLag), work.Nodes)
	}
	c.waker.Wake(c.waker.ChangedKeys(work), work.Nodes, work.Pools)
	for _, pod := range work.Asked {
		if c.gate.OpenForRoomOf(pod.UID) { // it may need no capacity elsewhere: its next cycle is waited for
			c.batcher.Add(pod.UID, pod.Key.Key.OfReservation(), pod.Key.Owner, pod.Key.Set, c.clock.Now())
		}
	}
	if !c.active() {
		return
	}
	if now := c.clock.Now(); !now.Before(c.nextLook) {
		c.nextLook = now.Add(waiting.LookPeriod)
		c.look()
	}
	var changed []*corev1.Pod
	requests := c.batcher.Due(c.validator(&changed), c.totals())
	for _, pod := range changed {
		c.queue.AddUnschedulable(pod)
	}
	// What was decided for pods that are gone does not hold for those that come later.
	c.grants.KeepUnasked(c.batcher.Has)
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, request := range requests {
		if len(request.PodSets) == 0 {
			if members, required := c.gangs.MembersOf(request.Key); int32(len(members)) < required {
				c.recordAll(request, incomplete(members, required))
			}
			c.batcher.RequeueAfter(request.Key, retryAfter) // further pods of the gang do not appear here if they fit
			continue
		}
		priority, pending := c.priorityOf(request.Pending)
		if !pending {
			continue // all were bound or deleted meanwhile
		}
		request.Priority, request.MinAvailable = priority, c.minAvailable(request)
		c.requests[request.Key] = request
		c.writeQueue.Add(c.slotOf(request.Key))
	}
}

// maxPriority is that of a Reservation, which is below those of Kubernetes' own pods.
const maxPriority = 1_000_000_000

// priorityOf returns the highest priority of pending pods; ok is false if none is pending.
func (c *demandController) priorityOf(pods []types.UID) (highest int32, ok bool) {
	highest = -maxPriority
	for _, uid := range pods {
		if name, known := c.pending.Name(uid); known {
			if pod := c.getPending(uid, name); pod != nil {
				highest, ok = max(highest, corev1helpers.PodPriority(pod)), true
			}
		}
	}
	return min(highest, maxPriority), ok
}

// write makes Reservations of requests until the queue is shut down.
func (c *demandController) write(ctx context.Context) {
	for {
		s, shutdown := c.writeQueue.Get()
		if shutdown {
			return
		}
		for request, ok := c.next(s); ok; request, ok = c.next(s) {
			if delay := c.reconcile(ctx, request); delay > 0 {
				c.batcher.RequeueAfter(request.Key, delay)
				c.queue.Signal()
			}
		}
		c.writeQueue.Done(s)
	}
}

// slotOf returns the slot of a key.
func (c *demandController) slotOf(key demand.Key) slot {
	if policy, err := c.policyOf(key.Namespace); err == nil && policy != nil && policy.Spec.MaxResources != nil {
		return slot{namespace: key.Namespace}
	}
	return slot{key.Namespace, key}
}

// next removes and returns a request of a slot.
func (c *demandController) next(s slot) (request demand.Request, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s.key == (demand.Key{}) {
		for key := range c.requests {
			if key.Namespace == s.namespace {
				s.key = key
				break
			}
		}
	}
	request, ok = c.requests[s.key]
	delete(c.requests, s.key)
	return request, ok
}

// removePod drops a pod that is no longer pending. The place that it was woken for may
// be another pod's.
func (c *demandController) removePod(uid types.UID, work *waiting.Work) {
	c.batcher.Remove(uid)
	c.pending.Remove(uid)
	delete(c.unresolved, uid)
	c.undelay(uid)
	if was := c.gate.Drop(uid); was != nil {
		pod, err := c.pods.Pods(was.Pod.Namespace).Get(was.Pod.Name)
		if err != nil {
			pod = nil
		}
		was.ObserveEnd(pod, c.placements.IsVirtual, c.clock.Now())
		work.Keys[was.Key] = true
		work.AddOpening(was.Opening)
	}
}

// addPod adds an unschedulable pod to the request of its key, or records why it
// cannot overflow. It may be called again for the same pod.
func (c *demandController) addPod(uid types.UID, name types.NamespacedName, work *waiting.Work) {
	delete(c.unresolved, uid)
	c.undelay(uid)
	pod := c.getPending(uid, name)
	if pod == nil {
		c.removePod(uid, work)
		c.queue.Untrack(uid)
		return
	}
	c.pending.Add(uid, name, c.clock.Now())
	if !optedIn(c.namespaces, pod.Namespace) {
		c.release(pod, work)
		return
	}
	if ok, reason := c.gangs.Admissible(pod); !ok {
		c.release(pod, work)
		if reason != "" {
			c.record(uid, notPossible(reason))
		}
		return
	}
	key, ok := c.keys.Get(pod)
	if !ok {
		c.unresolved[uid] = name
		return
	}
	if c.gate.Resolve(pod, key.Key) {
		c.waker.Activate(map[string]*corev1.Pod{name.String(): pod})
	}
	c.gate.Track(pod, key.Key)
	if until := c.gate.Since(uid).Add(c.askAfter); until.After(c.clock.Now()) {
		c.delayed.AddOrUpdate(delayedPod{uid: uid, name: name, until: until})
		c.record(uid, delayed(c.askAfter))
	} else {
		arrived := c.clock.Now()
		if c.askAfter == 0 { // otherwise the others are not counted before their time is over
			arrived = c.untried.ArrivedAt(pod)
		}
		c.batcher.Add(uid, key.Key.OfReservation(), key.Owner, key.Set, arrived)
		work.Asked = append(work.Asked, waiting.Asked{UID: uid, Key: key})
	}
	work.Keys[key.Key] = true
	c.recordStatus(key.Key, uid)
}

func (c *demandController) undelay(uid types.UID) {
	c.delayed.Delete(delayedPod{uid: uid})
}

// release stops requesting capacity for a pod, and lets it pass the gate.
func (c *demandController) release(pod *corev1.Pod, work *waiting.Work) {
	c.batcher.Remove(pod.UID)
	if was := c.gate.Drop(pod.UID); was != nil {
		work.AddOpening(was.Opening)
		c.waker.Activate(map[string]*corev1.Pod{waiting.NameOf(pod).String(): pod})
	}
}

// validator reports whether a pod still needs the capacity that is requested for a
// key. Pods that need it no longer, or for another key, are added to changed.
func (c *demandController) validator(changed *[]*corev1.Pod) func(types.UID, demand.Key) bool {
	return func(uid types.UID, key demand.Key) bool {
		name, known := c.pending.Name(uid)
		if !known {
			return false
		}
		pod := c.getPending(uid, name)
		// One that is being bound counts with those that run. If it is not bound, it is
		// added again when it does not fit any more; a gang is counted as a whole.
		if pod == nil || !key.IsGang() && c.placements.Has(uid) {
			return false
		}
		current, resolved := c.keys.Get(pod)
		if ok, _ := c.gangs.Admissible(pod); ok && optedIn(c.namespaces, pod.Namespace) && resolved && current.Key.OfReservation() == key {
			return true
		}
		*changed = append(*changed, pod)
		return false
	}
}

// getPending returns a pod from the cache; nil unless it is pending.
func (c *demandController) getPending(uid types.UID, name types.NamespacedName) *corev1.Pod {
	pod, err := c.pods.Pods(name.Namespace).Get(name.Name)
	if err != nil || pod.UID != uid || pod.Spec.NodeName != "" || pod.DeletionTimestamp != nil || podutil.IsPodTerminal(pod) {
		return nil
	}
	return pod
}

// recordStatus records the status of a key's Reservations on pending pods.
func (c *demandController) recordStatus(key demand.Key, pods ...types.UID) {
	if len(pods) == 0 || !c.active() {
		return
	}
	all, err := c.reservations.byKey(key)
	if err != nil {
		c.log.Error(err, "Failed to read the status of Reservations")
		return
	}
	for _, r := range all {
		for _, e := range statusEvents(r) {
			for _, uid := range pods {
				c.record(uid, e)
			}
		}
	}
}

// totals adds to the pending pods of a key those that run in other clusters, and those
// that the scheduler has not tried yet: if one pod of a key does not fit, the others
// will not either, and are better requested with it. Terminating pods do not count:
// their replacements use their slots.
func (c *demandController) totals() func(demand.Key, broker.PodSet) []broker.PodSet {
	mayWait := func(pod *corev1.Pod) bool {
		ok, _ := c.gangs.Admissible(pod)
		// Pending pods are in the batcher.
		return ok && c.askAfter == 0 && !c.pending.Has(pod.UID) && !c.placements.Has(pod.UID)
	}
	return func(key demand.Key, pending broker.PodSet) []broker.PodSet {
		if key.IsGang() {
			return c.gangSets(key)
		}
		pending.Count += c.placements.LivingOf(key)
		if optedIn(c.namespaces, key.Namespace) {
			pending.Count += c.untried.Count(key, c.keys.KeyOf, mayWait)
		}
		return []broker.PodSet{pending}
	}
}

// reconcile makes a Reservation request at least what is needed, within the policy's limit. It
// returns when to requeue the request, or zero.
func (c *demandController) reconcile(ctx context.Context, request demand.Request) (requeueAfter time.Duration) {
	log := c.log.WithValues("namespace", request.Key.Namespace, "owner", request.Owner.Kind+"/"+request.Owner.Name, "shape", request.Key.Shape)
	if !c.synced() {
		return retryAfter
	}
	name := request.Key.Name(request.Owner.Name)
	current := c.reservations.get(request.Key.Namespace, name)
	if current != nil {
		if requeueAfter, done := c.followExisting(request, name, current); done {
			return requeueAfter
		}
	}
	if request, requeueAfter = c.completeGang(request, current); requeueAfter > 0 {
		return requeueAfter
	}
	policy, err := c.policyOf(request.Key.Namespace)
	var units int32
	var short corev1.ResourceName
	if err == nil {
		units, short, err = c.allowed(policy, request, name, current)
	}
	if err != nil {
		log.Error(err, "Failed to evaluate OverflowPolicies; retrying")
		c.recordAll(request, failed(err.Error(), fmt.Sprintf("Failed to request capacity, retrying: %v.", err), nil))
		return retryAfter
	}
	request, limited := c.limitTo(units, short, request, policy, current)
	if limited {
		requeueAfter = blockedRetryAfter
	}
	if current != nil && covers(current, request) {
		c.setLimited(request.Key, limited, request.Pods())
		return requeueAfter
	}
	if request.Pods() == 0 {
		return requeueAfter
	}
	object, err := c.objectOf(request.Key, request.Owner)
	if err != nil {
		log.Error(err, "Failed to read the owner of a Reservation; retrying")
		return retryAfter
	}
	writesTotal.WithLabelValues(writesOfReservations).Inc()
	applied, err := c.reservations.apply(ctx, request, object, policy, current)
	if err != nil {
		return c.writeFailed(log, request, err)
	}
	c.notRefused(request.Key, "")
	c.setLimited(request.Key, limited, request.Pods())
	c.raised(request.Key)
	requestsTotal.WithLabelValues(resultRequested).Inc()
	requestPods.Observe(float64(len(request.Pending)))
	log.Info("Requested capacity in other clusters", "reservation", name, "pods", request.Pods())
	if current == nil || !coversPods(current, request) {
		c.recordRequested(request, applied)
	}
	return requeueAfter
}

// limitTo returns the part of a request that its policy allows, and whether that is not all. Then
// its pods hear of it.
func (c *demandController) limitTo(units int32, short corev1.ResourceName, request demand.Request, policy *broker.OverflowPolicy, current *broker.Reservation) (part demand.Request, limited bool) {
	part = request.Limited(units)
	if part.Pods() < request.MinAvailable {
		part = request.Limited(0)
	}
	if part.Pods() == request.Pods() {
		return part, false
	}
	c.setLimited(request.Key, true, part.Pods())
	requestsTotal.WithLabelValues(resultCapped).Inc()
	c.recordAll(request, capped(policy.Name, request, part.Pods(), short, current))
	return part, true
}

// writeFailed handles the error of a write, and returns when to requeue the request, or zero.
func (c *demandController) writeFailed(log klog.Logger, request demand.Request, err error) (requeueAfter time.Duration) {
	requestsTotal.WithLabelValues(resultFailed).Inc()
	switch {
	case apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err):
		return conflictRetryAfter
	case apierrors.IsInvalid(err):
		log.Error(err, "The API server rejected the Reservation")
		c.setUnasked(request.Key, true)
		c.recordAll(request, failed("invalid", fmt.Sprintf("Failed to request capacity: %v. It is requested again when the pod is tried again, within %.0f minutes.", err, waiting.MaxRetry.Minutes()), nil))
		return 0
	case apierrors.IsNotFound(err) || apierrors.IsForbidden(err) || apierrors.IsBadRequest(err): // the last is of a webhook that gives no code
		log.Error(err, "Failed to write a Reservation; retrying. Check the quotas and admission policies of the namespace, and that the agent's chart has installed the CRDs and the RBAC rules of the scheduler")
		return c.refused(request, refusedWrite, err)
	case apierrors.ReasonForError(err) != metav1.StatusReasonUnknown:
		log.Error(err, "Failed to write a Reservation; retrying")
		return c.refused(request, failedWrite, err)
	default: // no answer of the API server, which takes no events either
		log.Error(err, "Failed to write a Reservation; retrying")
		c.notRefused(request.Key, "")
		return retryAfter
	}
}

// refused returns when to requeue a request whose Reservation the API server does not accept:
// after 2, 4 and 8 s at first, because it refuses also what it will allow while it starts. From
// then on, its pods have the reason. A refusal before that time does not count, nor do those of
// another kind.
func (c *demandController) refused(request demand.Request, kind string, err error) (requeueAfter time.Duration) {
	c.notRefused(request.Key, kind)
	key := refusalKey(request.Key, kind)
	c.refusals.GC() // those of pods that are gone
	if now := c.clock.Now(); !c.refusals.IsInBackOffSinceUpdate(key, now) {
		c.refusals.Next(key, now)
	}
	if requeueAfter = c.refusals.Get(key); requeueAfter < blockedRetryAfter {
		return requeueAfter
	}
	if kind == refusedWrite {
		c.setUnasked(request.Key, true)
	}
	c.recordAll(request, notWritten(kind, err))
	return requeueAfter
}

// notRefused ends the refusals of a key in a row, but for those of a kind.
func (c *demandController) notRefused(key demand.Key, but string) {
	for _, kind := range []string{refusedWrite, failedWrite} {
		if kind != but {
			c.refusals.Reset(refusalKey(key, kind))
		}
	}
}

func refusalKey(key demand.Key, kind string) string { return kind + " " + key.String() }

// newRefusals counts refusals in a row that are at most a minute apart: in a namespace with a
// limit, one request is written after another.
func newRefusals(clock clock.Clock) *flowcontrol.Backoff {
	refusals := flowcontrol.NewBackOff(retryAfter, blockedRetryAfter)
	refusals.Clock = clock
	refusals.HasExpiredFunc = func(now, last time.Time, _ time.Duration) bool { return now.Sub(last) > time.Minute }
	return refusals
}

// followExisting reports whether nothing can or need be written while the Reservation is as it is,
// and when to requeue the request then, or zero.
func (c *demandController) followExisting(request demand.Request, name string, current *broker.Reservation) (requeueAfter time.Duration, done bool) {
	if key, _ := demand.KeyOfReservation(current); key != request.Key {
		c.setUnasked(request.Key, true)
		c.recordAll(request, failed(name, fmt.Sprintf("Reservation %s already exists for another owner. Delete it to request capacity for this pod.", name), current))
		return 0, true
	}
	if current.DeletionTimestamp != nil {
		// Its capacity is released; it is created again once it is deleted.
		if c.clock.Since(current.DeletionTimestamp.Time) > deletedWithin {
			var users int32
			for i := range current.Status.Allocations {
				users += c.placements.UsersOf(current.Namespace, broker.VirtualNodeName(current.Status.Allocations[i].Cluster), demand.HoldLabel(current.Status.ID))
			}
			if users > 0 {
				c.setUnasked(request.Key, true)
				c.recordAll(request, deleting(current, users))
			}
		}
		return retryAfter, true
	}
	if covers(current, request) {
		c.setUnasked(request.Key, false)
		return 0, true
	}
	// Priority and minimum follow pods that come and go.
	if wait := c.raiseIn(request.Key); wait > 0 && (!decided(current) || coversPods(current, request)) {
		return wait, true
	}
	return 0, false
}

// objectOf returns a reference to the object that the owner of a key is.
func (c *demandController) objectOf(key demand.Key, owner metav1.OwnerReference) (metav1.OwnerReference, error) {
	switch {
	case key.IsGang():
		if group := c.gangs.Described(key.Namespace, owner); group != nil {
			owner.UID, owner.APIVersion = group.GetUID(), group.GetAPIVersion()
			return owner, nil
		}
	case owner.UID != demand.SharedOwner:
		return owner, nil
	}
	namespace, err := c.namespaces.Get(key.Namespace)
	if err != nil {
		return owner, fmt.Errorf("getting namespace %s: %w", key.Namespace, err)
	}
	return metav1.OwnerReference{APIVersion: "v1", Kind: "Namespace", Name: namespace.Name, UID: namespace.UID}, nil
}

// setUnasked records whether no capacity for a key is requested, and wakes the pods that wait
// for the decision.
func (c *demandController) setUnasked(key demand.Key, unasked bool) { c.setLimited(key, unasked, 0) }

// setLimited does so if capacity is requested for no more than a number of pods.
func (c *demandController) setLimited(key demand.Key, limited bool, to int32) {
	if before, was := c.grants.UnaskedBut(key); was != limited || limited && before != to {
		c.grants.SetUnasked(key, limited, to)
		c.queue.AddKey(key)
	}
}

// raiseIn returns how long the count of a key is not to be raised again.
func (c *demandController) raiseIn(key demand.Key) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return raiseAfter - c.clock.Since(c.requestedAt[key])
}

// raised records that the count of a key was raised.
func (c *demandController) raised(key demand.Key) {
	c.mu.Lock()
	defer c.mu.Unlock()
	maps.DeleteFunc(c.requestedAt, func(_ demand.Key, at time.Time) bool { return c.clock.Since(at) > raiseAfter })
	c.requestedAt[key] = c.clock.Now()
}

// decided reports whether the current generation of a Reservation is granted,
// queued or failed.
func decided(r *broker.Reservation) bool {
	if r.Status.ObservedGeneration < r.Generation {
		return false
	}
	return r.Status.Phase == broker.ReservationFailed ||
		meta.IsStatusConditionTrue(r.Status.Conditions, broker.ConditionReady) ||
		meta.IsStatusConditionTrue(r.Status.Conditions, broker.ConditionQueued)
}

// policyOf returns the policy of a namespace, nil if none selects it.
func (c *demandController) policyOf(name string) (*broker.OverflowPolicy, error) {
	namespace, err := c.namespaces.Get(name)
	if err != nil {
		return nil, fmt.Errorf("getting namespace %s: %w", name, err)
	}
	return c.policies.list().of(namespace)
}
