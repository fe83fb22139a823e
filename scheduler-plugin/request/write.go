package request

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
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
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
	// writers is how many Reservations are written at the same time.
	writers = 8
)

// slot is what one goroutine writes at a time: the Reservation of a key, or all those of a
// namespace (the key is zero) whose policy limits their sum, which two writes at the same time
// could exceed together.
type slot struct {
	namespace string
	key       demand.Key
}

// writeQueue has the requests that are to be written, by slot. Safe for concurrent use.
type writeQueue struct {
	clock clock.PassiveClock
	slots workqueue.TypedInterface[slot]

	mu       sync.Mutex
	requests map[demand.Key]demand.Request
	// raisedAt is when a key's count was changed last, for raiseAfter.
	raisedAt map[demand.Key]time.Time
}

func newWriteQueue(clock clock.PassiveClock) *writeQueue {
	return &writeQueue{clock: clock, slots: workqueue.NewTyped[slot](), requests: map[demand.Key]demand.Request{}, raisedAt: map[demand.Key]time.Time{}}
}

// add replaces the request of a key.
func (q *writeQueue) add(s slot, request demand.Request) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.requests[request.Key] = request
	q.slots.Add(s)
}

// next removes and returns a request of a slot.
func (q *writeQueue) next(s slot) (request demand.Request, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if s.key == (demand.Key{}) {
		for key := range q.requests {
			if key.Namespace == s.namespace {
				s.key = key
				break
			}
		}
	}
	request, ok = q.requests[s.key]
	delete(q.requests, s.key)
	return request, ok
}

// raiseIn returns how long the count of a key is not to be raised again.
func (q *writeQueue) raiseIn(key demand.Key) time.Duration {
	q.mu.Lock()
	defer q.mu.Unlock()
	return raiseAfter - q.clock.Since(q.raisedAt[key])
}

// raised records that the count of a key was raised.
func (q *writeQueue) raised(key demand.Key) {
	q.mu.Lock()
	defer q.mu.Unlock()
	maps.DeleteFunc(q.raisedAt, func(_ demand.Key, at time.Time) bool { return q.clock.Since(at) > raiseAfter })
	q.raisedAt[key] = q.clock.Now()
}

// write makes Reservations of requests until the queue is shut down.
func (c *Controller) write(ctx context.Context) {
	for {
		s, shutdown := c.writes.slots.Get()
		if shutdown {
			return
		}
		for request, ok := c.writes.next(s); ok; request, ok = c.writes.next(s) {
			if delay := c.reconcile(ctx, request); delay > 0 {
				c.Batcher.RequeueAfter(request.Key, delay)
				c.Queue.Signal()
			}
		}
		c.writes.slots.Done(s)
	}
}

// slotOf returns the slot of a key.
func (c *Controller) slotOf(key demand.Key) slot {
	if policy, err := c.policyOf(key.Namespace); err == nil && policy != nil && policy.Spec.MaxResources != nil {
		return slot{namespace: key.Namespace}
	}
	return slot{key.Namespace, key}
}

// reconcile makes a Reservation request at least what is needed, within the policy's limit. It
// returns when to requeue the request, or zero.
func (c *Controller) reconcile(ctx context.Context, request demand.Request) (requeueAfter time.Duration) {
	log := c.Log.WithValues("namespace", request.Key.Namespace, "owner", request.Owner.Kind+"/"+request.Owner.Name, "shape", request.Key.Shape)
	if !c.Synced() {
		return retryAfter
	}
	name := request.Key.Name(request.Owner.Name)
	current := c.Reservations.get(request.Key.Namespace, name)
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
	Writes.WithLabelValues(WriteReservation).Inc()
	applied, err := c.Reservations.apply(ctx, request, object, policy, current)
	if err != nil {
		return c.writeFailed(log, request, err)
	}
	c.notRefused(request.Key, "")
	c.setLimited(request.Key, limited, request.Pods())
	c.writes.raised(request.Key)
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
func (c *Controller) limitTo(units int32, short corev1.ResourceName, request demand.Request, policy *broker.OverflowPolicy, current *broker.Reservation) (part demand.Request, limited bool) {
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
func (c *Controller) writeFailed(log klog.Logger, request demand.Request, err error) (requeueAfter time.Duration) {
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
func (c *Controller) refused(request demand.Request, kind string, err error) (requeueAfter time.Duration) {
	c.notRefused(request.Key, kind)
	key := refusalKey(request.Key, kind)
	c.refusals.GC() // those of pods that are gone
	if now := c.Clock.Now(); !c.refusals.IsInBackOffSinceUpdate(key, now) {
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
func (c *Controller) notRefused(key demand.Key, but string) {
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
func (c *Controller) followExisting(request demand.Request, name string, current *broker.Reservation) (requeueAfter time.Duration, done bool) {
	if key, _ := demand.KeyOfReservation(current); key != request.Key {
		c.setUnasked(request.Key, true)
		c.recordAll(request, failed(name, fmt.Sprintf("Reservation %s already exists for another owner. Delete it to request capacity for this pod.", name), current))
		return 0, true
	}
	if current.DeletionTimestamp != nil {
		// Its capacity is released; it is created again once it is deleted.
		if c.Clock.Since(current.DeletionTimestamp.Time) > deletedWithin {
			var users int32
			for i := range current.Status.Allocations {
				users += c.Placements.UsersOf(current.Namespace, broker.VirtualNodeName(current.Status.Allocations[i].Cluster), demand.HoldLabel(current.Status.ID))
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
	if wait := c.writes.raiseIn(request.Key); wait > 0 && (!decided(current) || coversPods(current, request)) {
		return wait, true
	}
	return 0, false
}

// objectOf returns a reference to the object that the owner of a key is.
func (c *Controller) objectOf(key demand.Key, owner metav1.OwnerReference) (metav1.OwnerReference, error) {
	switch {
	case key.IsGang():
		if group := c.Gangs.Described(key.Namespace, owner); group != nil {
			owner.UID, owner.APIVersion = group.GetUID(), group.GetAPIVersion()
			return owner, nil
		}
	case owner.UID != demand.SharedOwner:
		return owner, nil
	}
	namespace, err := c.Namespaces.Get(key.Namespace)
	if err != nil {
		return owner, fmt.Errorf("getting namespace %s: %w", key.Namespace, err)
	}
	return metav1.OwnerReference{APIVersion: "v1", Kind: "Namespace", Name: namespace.Name, UID: namespace.UID}, nil
}

// setUnasked records whether no capacity for a key is requested, and wakes the pods that wait
// for the decision.
func (c *Controller) setUnasked(key demand.Key, unasked bool) { c.setLimited(key, unasked, 0) }

// setLimited does so if capacity is requested for no more than a number of pods.
func (c *Controller) setLimited(key demand.Key, limited bool, to int32) {
	if before, was := c.Grants.UnaskedBut(key); was != limited || limited && before != to {
		c.Grants.SetUnasked(key, limited, to)
		c.Queue.AddKey(key)
	}
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
