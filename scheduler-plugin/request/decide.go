package request

import (
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/usage"
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
)

// input is what is known of a request when it is decided on.
type input struct {
	request demand.Request
	// current is the Reservation of the request, or nil.
	current *broker.Reservation
	// users is how many pods use it, if its deletion takes longer than deletedWithin.
	users int32
	// outdated: it was made for pods of a gang that have come back with other requests.
	outdated bool
	// raiseIn is how long its count is not to be raised again.
	raiseIn time.Duration
	// policy of the namespace, or nil. others is what other Reservations of the namespace
	// request; nil if no limit keeps the request from what it lacks. err is why both are unknown.
	policy *broker.OverflowPolicy
	others corev1.ResourceList
	err    error
}

// decision is what to do about a request.
type decision struct {
	// request that its policy allows, and whether it is to be written.
	request demand.Request
	write   bool
	// limited: capacity is requested for no more pods than those of request; nil if it is not
	// known yet. If it is not limited and to be written, that counts once it is written.
	limited *bool
	// event for the pods of the whole request, or nil.
	event *Event
	// requeueAfter is when to decide again; zero if nothing is to be waited for.
	requeueAfter time.Duration
	// err is what has kept it from being decided.
	err error
}

// unasked is the decision to request nothing while something is as the event says.
func unasked(e Event, requeueAfter time.Duration) decision {
	return decision{limited: ptr.To(true), event: &e, requeueAfter: requeueAfter}
}

// decide returns what a Reservation is to request: at least what is needed, within the policy's limit.
func decide(in input) decision {
	request, current := in.request, in.current
	if current != nil {
		switch key, _ := demand.KeyOfReservation(current); {
		case key != request.Key:
			return unasked(failed(current.Name, fmt.Sprintf("Reservation %s already exists for another owner. Delete it to request capacity for this pod.", current.Name), current), 0)
		case current.DeletionTimestamp != nil && in.users > 0:
			return unasked(deleting(current, in.users), retryAfter)
		case current.DeletionTimestamp != nil: // its capacity is released; it is created again once it is deleted
			return decision{requeueAfter: retryAfter}
		case covers(current, request):
			return decision{limited: ptr.To(false)}
		case in.raiseIn > 0 && (!decided(current) || coversPods(current, request)): // priority and minimum follow pods that come and go
			return decision{requeueAfter: in.raiseIn}
		case in.outdated:
			return decision{event: ptr.To(outdated(current, request)), requeueAfter: retryAfter}
		}
	}
	if request.Key.IsGang() {
		// What its Reservation requests for pods of other shapes stays, and counts for a policy.
		if current != nil {
			request.PodSets = raised(current.Spec.PodSets, request.PodSets)
		}
		if len(request.PodSets) > maxShapes {
			return unasked(tooManyShapes(request, len(in.request.PodSets), current), blockedRetryAfter)
		}
	}
	if in.err != nil {
		return decision{err: in.err, event: ptr.To(failed(in.err.Error(), fmt.Sprintf("Failed to request capacity, retrying: %v.", in.err), nil)), requeueAfter: retryAfter}
	}
	units, short := allowed(in, request)
	part := request.Limited(units)
	if part.Pods() < request.MinAvailable {
		part = request.Limited(0)
	}
	d := decision{request: part, limited: ptr.To(part.Pods() != request.Pods()), write: part.Pods() > 0 && (current == nil || !covers(current, part))}
	if *d.limited {
		d.event, d.requeueAfter = ptr.To(capped(in.policy.Name, request, part.Pods(), short, current)), blockedRetryAfter
	}
	return d
}

// allowed returns how many units of a request the policy of its namespace allows beside
// what other Reservations request; short is the resource that allows no more. What its own
// requests already stays, also after the limit was lowered.
func allowed(in input, request demand.Request) (units int32, short corev1.ResourceName) {
	each, wanted := request.Unit()
	if in.others == nil {
		return wanted, ""
	}
	units, short = demand.MaxPods(each, *in.policy.Spec.MaxResources, in.others)
	if in.current != nil && len(request.PodSets) == 1 {
		units = max(units, usage.RequestedPods(in.current))
	}
	return min(units, wanted), short
}

// requestedResources sums up what Reservations request, except one of a name.
func requestedResources(all []*broker.Reservation, except string) corev1.ResourceList {
	sum := corev1.ResourceList{}
	for _, r := range all {
		if r.Name == except {
			continue
		}
		broker.AddTo(sum, capacity.Requested(&r.Spec).Totals.List())
	}
	return sum
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
