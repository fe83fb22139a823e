package request

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/charge"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/waiting"
)

// writers is how many Reservations are written at the same time.
const writers = 8

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
	// raisedAt is when a key's request was written last, for raiseAfter.
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

// raised records that the request of a key was written.
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

// reconcile gathers what is known of a request, decides, and writes that. It returns when to
// requeue the request, or zero.
func (c *Controller) reconcile(ctx context.Context, request demand.Request) (requeueAfter time.Duration) {
	if !c.Synced() {
		return retryAfter
	}
	in := c.gather(request)
	d := decide(in)
	if d.limited != nil && (*d.limited || !d.write) {
		c.setLimited(request.Key, *d.limited, d.request.Pods())
	}
	if d.event == nil && d.limited != nil && !d.write {
		c.decisions.set(request.Key, nil)
	}
	if d.event != nil {
		c.recordAll(request, *d.event)
		if d.event.reason == reasonCapped {
			requestsTotal.WithLabelValues(resultCapped).Inc()
		}
	}
	log := c.Log.WithValues("namespace", request.Key.Namespace, "owner", request.Owner.Kind+"/"+request.Owner.Name, "shape", request.Key.Shape)
	if d.err != nil {
		log.Error(d.err, "Failed to evaluate OverflowPolicies; retrying")
	}
	if !d.write {
		return d.requeueAfter
	}
	object, err := c.objectOf(request.Key, request.Owner)
	if err != nil {
		log.Error(err, "Failed to read the owner of a Reservation; retrying")
		return retryAfter
	}
	Writes.WithLabelValues(WriteReservation).Inc()
	applied, err := c.Reservations.apply(ctx, d.request, object, in.policy, in.current)
	if err != nil {
		return c.writeFailed(log, d.request, err)
	}
	c.notRefused(request.Key, "")
	c.decisions.set(request.Key, d.event)
	c.setLimited(request.Key, *d.limited, d.request.Pods())
	c.writes.raised(request.Key)
	requestsTotal.WithLabelValues(resultRequested).Inc()
	requestPods.Observe(float64(len(request.Pending)))
	log.Info("Requested capacity in other clusters", "reservation", applied.Name, "pods", d.request.Pods())
	if in.current == nil || !coversPods(in.current, d.request) {
		c.recordRequested(request, applied)
	}
	return d.requeueAfter
}

// gather returns what is known of a request.
func (c *Controller) gather(request demand.Request) input {
	namespace, name := request.Key.Namespace, request.Key.Name(request.Owner.Name)
	in := input{request: request, current: c.Reservations.get(request.Key, name), raiseIn: c.writes.raiseIn(request.Key)}
	covered := false
	if r := in.current; r != nil {
		if r.DeletionTimestamp != nil && c.Clock.Since(r.DeletionTimestamp.Time) > deletedWithin {
			for i := range r.Status.Allocations {
				in.users += c.Placements.UsersOf(namespace, broker.VirtualNodeName(r.Status.Allocations[i].Cluster), charge.Label(r.Status.ID))
			}
		}
		covered, in.outdated = coversPods(r, request), request.Key.IsGang() && c.isOutdated(r, request)
	}
	if in.policy, in.err = c.policyOf(namespace); in.policy != nil && in.policy.Spec.MaxResources != nil && !covered {
		var all []*broker.Reservation
		if all, in.err = c.Reservations.list(namespace); in.err == nil {
			in.others = requestedResources(all, name)
		}
	}
	return in
}

// policyOf returns the policy of a namespace, nil if none selects it.
func (c *Controller) policyOf(name string) (*broker.OverflowPolicy, error) {
	namespace, err := c.Namespaces.Get(name)
	if err != nil {
		return nil, fmt.Errorf("getting namespace %s: %w", name, err)
	}
	return c.Policies.List().Of(namespace)
}

// writeFailed handles the error of a write, and returns when to requeue the request, or zero.
func (c *Controller) writeFailed(log klog.Logger, request demand.Request, err error) (requeueAfter time.Duration) {
	requestsTotal.WithLabelValues(resultFailed).Inc()
	switch {
	case apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err):
		return conflictRetryAfter
	case apierrors.IsInvalid(err):
		log.Error(err, "The API server rejected the Reservation")
		c.setLimited(request.Key, true, 0)
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
		c.setLimited(request.Key, true, 0)
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

// setLimited records whether capacity for a key is requested for no more than a number of pods,
// and wakes the pods that wait for the decision.
func (c *Controller) setLimited(key demand.Key, limited bool, to int32) {
	if before, was := c.Grants.UnaskedBut(key); was != limited || limited && before != to {
		c.Grants.SetUnasked(key, limited, to)
		c.Queue.AddKey(key)
	}
}
