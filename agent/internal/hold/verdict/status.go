package verdict

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/placeholder"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// Reasons of condition Enforced besides broker.ReasonReleased and those of
// capacity.Admit.
const (
	ReasonAccepted             = "Accepted"
	ReasonInsufficientCapacity = capacity.ReasonInsufficientCapacity
	ReasonGrantPending         = peering.ReasonGrantPending
	ReasonGuestsRemain         = "GuestsRemain"
	// reasonProofPending: the scheduler has not found a place for each placeholder yet.
	reasonProofPending = "ProofPending"
	// ReasonTrialPending: guests cannot be tried yet.
	ReasonTrialPending = "TrialPending"
	// ReasonGuestNotAdmitted: the API server does not admit a guest of the shape.
	ReasonGuestNotAdmitted = "GuestNotAdmitted"
	// ReasonGrantTimeout: the grant was not in effect before the broker stops waiting.
	ReasonGrantTimeout = "GrantTimeout"
	// ReasonCapacityLost: a part of an accepted hold no longer fits the nodes. It stays while
	// guests must leave, also once the broker has lowered its promise: then the condition is True
	// for what remains, or Unknown while guests remain of a hold that ends.
	ReasonCapacityLost = "CapacityLost"
)

// Write is a status to write.
type Write struct {
	Instruction *broker.ProviderInstruction
	Status      broker.ProviderInstructionStatus
}

// Effect is what has come of decisions.
type Effect struct {
	Granted peering.Progress
	// GrantWaits is since when the grant is not in effect, zero if it is.
	GrantWaits time.Time
	// Guests returns those of the consumer.
	Guests func() inventory.Guests
	Now    time.Time
	// LeaveWithin is how long guests may stay that use what is withdrawn.
	LeaveWithin time.Duration
}

// Recordings are the statuses that record larger holds before they are granted.
func Recordings(decisions []Decision, recording peering.Progress, now time.Time) (writes []Write) {
	for _, d := range decisions {
		if d.grows() {
			writes = append(writes, Write{d.instruction, d.status(Effect{Granted: recording, Now: now}, "")})
		}
	}
	return writes
}

// Statuses are the statuses to write of decisions that are not settled. retryAfter is when to
// decide again, 0 if not before a change.
func Statuses(decisions []Decision, e Effect) (writes []Write, retryAfter time.Duration) {
	beyond := ""
	if slices.ContainsFunc(decisions, func(d Decision) bool { return d.state == reduced }) {
		beyond = e.beyond(Grant(decisions))
	}
	var first time.Time
	for _, d := range decisions {
		// Deadlines pass, and grants take effect, without an event.
		if d.proof == placeholder.Waiting || d.state != standing && d.state != deferred && (!e.Granted.Done || d.state == reduced && beyond != "") {
			retryAfter = max(retryAfter, RetryAfter)
		}
		if d.state == open && (first.IsZero() || !d.due.IsZero() && d.due.Before(first)) {
			first = d.due
		}
		if d.says(e) {
			writes = append(writes, Write{d.instruction, d.status(e, beyond)})
		}
	}
	if slices.ContainsFunc(decisions, func(d Decision) bool { return d.untried != "" }) {
		retryAfter = trialRetryAfter
	}
	if left := first.Sub(e.Now); left > 0 {
		retryAfter = min(retryAfter, left)
	}
	return writes, retryAfter
}

// beyond is what guests use, "" if it is no more than an amount.
func (e Effect) beyond(total corev1.ResourceList, pods int32) string {
	var used corev1.ResourceList
	active := e.Guests().Active
	for _, requests := range active {
		used = broker.AddTo(used, requests)
	}
	if len(active) <= int(pods) && capacity.Ceil(used).FitsIn(capacity.Ceil(total)) > 0 {
		return ""
	}
	return fmt.Sprintf("%d pods with %s", len(active), broker.FromList(used))
}

// says reports whether the status of a decision says more than the one before, or has for long.
func (d Decision) says(e Effect) bool {
	switch {
	case d.state == standing:
		return e.Granted.Done && (d.expired(e.Now) || d.proofChanged())
	case d.state == deferred:
		return false
	case e.Granted.Done:
		return !d.waits() || d.takes >= RetryAfter
	}
	return d.state != open || e.GrantWaits.IsZero() || !e.Now.Before(e.GrantWaits.Add(RetryAfter))
}

// status returns the status that shows a decision. beyond is what guests use if that is more than
// the grant. observedAttempt becomes the instruction's only if the decision is final.
func (d Decision) status(e Effect, beyond string) broker.ProviderInstructionStatus {
	of, now := d.instruction, e.Now
	consumer := of.Spec.RequesterClusterID
	status := *of.Status.DeepCopy()
	status.Enforced, status.ObservedGeneration = false, of.Generation
	enforced := metav1.Condition{Type: broker.ConditionEnforced, Status: metav1.ConditionFalse, ObservedGeneration: of.Generation, LastTransitionTime: metav1.NewTime(now)}
	final, held := true, d.held
	if d.grows() && status.Accepted == nil {
		status.Accepted = d.before.DeepCopy()
	}
	switch {
	case !e.Granted.Done:
		enforced.Status, enforced.Reason, enforced.Message, final = metav1.ConditionUnknown, ReasonGrantPending, e.Granted.Message, false
		// The grant may be in effect already: the larger of the old and the new hold
		// is kept from others.
		if d.state == reduced || d.state == refused {
			held = d.before
		}
	case d.state == refused:
		enforced.Reason, enforced.Message = d.why.Reason, d.why.Message
		if !d.held.Empty() {
			// It does not name the consumer: a broker of an earlier version repeats it to others.
			enforced.Message = fmt.Sprintf("Holding only %s: %s", describe(d.held), d.why.Message)
		}
		if d.withdrawn() {
			status.LeaveBy = &metav1.Time{Time: now.Add(e.LeaveWithin).Truncate(time.Second)}
			enforced.Message = fmt.Sprintf("%s. %s", strings.TrimSuffix(enforced.Message, "."), mustLeave(status.LeaveBy))
		}
	case d.waits() && d.untried != "":
		enforced.Status, enforced.Reason, final = metav1.ConditionUnknown, ReasonTrialPending, false
		enforced.Message = fmt.Sprintf("Waiting to try whether the API server admits the guests: %s.", d.untried)
	case d.waits():
		enforced.Status, enforced.Reason, enforced.Message, final = metav1.ConditionUnknown, reasonProofPending, d.proofMessage, false
	case d.state == reduced && beyond != "":
		enforced.Status, enforced.Reason, final = metav1.ConditionUnknown, ReasonGuestsRemain, false
		enforced.Message = fmt.Sprintf("Waiting for guests of consumer %s to terminate: %s are running, the hold is reduced to %s.", consumer, beyond, describe(d.held))
		held = d.before
		if status.LeaveBy != nil && now.Before(status.LeaveBy.Time) {
			sayLeaving(&enforced, status.LeaveBy)
		}
	case of.Spec.Releasing:
		enforced.Reason, enforced.Message = broker.ReasonReleased, "No capacity is held for this Reservation."
	default:
		status.Enforced = true
		enforced.Status, enforced.Reason = metav1.ConditionTrue, ReasonAccepted
		enforced.Message = fmt.Sprintf("Holding %s for consumer %s.", describe(d.held), consumer)
		if status.Accepted != nil || status.LeaveBy != nil && !now.Before(status.LeaveBy.Time) {
			status.LeaveBy = nil
		}
		sayLeaving(&enforced, status.LeaveBy)
	}
	status.Held = nil
	if !held.Empty() {
		status.Held = held.DeepCopy()
	}
	if final {
		status.ObservedAttempt, status.Accepted = of.Spec.Attempt, nil
	}
	meta.SetStatusCondition(&status.Conditions, enforced)
	if final {
		d.setProven(&status, now)
	}
	return status
}

// sayLeaving makes a condition say that capacity was lost, while guests must leave because of it.
func sayLeaving(enforced *metav1.Condition, by *metav1.Time) {
	if by != nil {
		enforced.Reason = ReasonCapacityLost
		enforced.Message += " " + mustLeave(by)
	}
}

// expired reports whether a status still says that guests must leave although their time is
// over.
func (d Decision) expired(now time.Time) bool {
	status := d.instruction.Status
	return status.Enforced && status.LeaveBy != nil && !now.Before(status.LeaveBy.Time) && d.proof == placeholder.Proven
}

// proofChanged reports whether condition Proven of a hold that is enforced does not say what its
// placeholders prove: all have a place, or some have had none for a while. That a guest
// has just come, of which the next placeholder holds what it leaves, is not worth a write.
func (d Decision) proofChanged() bool {
	status := d.instruction.Status
	if d.accounted || !status.Enforced {
		return false
	}
	if meta.IsStatusConditionTrue(status.Conditions, broker.ConditionProven) {
		return d.proof != placeholder.Proven && d.takes >= RetryAfter
	}
	return d.proof == placeholder.Proven
}

func mustLeave(by *metav1.Time) string {
	return fmt.Sprintf("Guests beyond that must leave by %s.", by.UTC().Format(time.RFC3339))
}

// Reasons of condition Proven.
const (
	ReasonPlacesFound = "PlacesFound"
	ReasonNotProven   = "NotProven"
)

// setProven sets condition Proven of a decision that is final.
func (d Decision) setProven(status *broker.ProviderInstructionStatus, now time.Time) {
	proven := metav1.Condition{Type: broker.ConditionProven, Status: metav1.ConditionFalse, Reason: ReasonNotProven, ObservedGeneration: d.instruction.Generation, LastTransitionTime: metav1.NewTime(now)}
	switch {
	case status.Held == nil:
		meta.RemoveStatusCondition(&status.Conditions, broker.ConditionProven)
		return
	case d.accounted:
		proven.Message = "The capacity is accounted for, and no placeholders keep it from other pods."
	case d.proof == placeholder.Proven:
		proven.Status, proven.Reason, proven.Message = metav1.ConditionTrue, ReasonPlacesFound, d.proofMessage
	default:
		proven.Message = d.proofMessage
	}
	meta.SetStatusCondition(&status.Conditions, proven)
}

// describe prints a capacity as "2 pods of cpu 500m, memory 64Mi".
func describe(c broker.HeldCapacity) string {
	if len(c.PodSets) == 0 {
		return c.Totals.String()
	}
	var words []string
	for _, set := range c.PodSets {
		words = append(words, fmt.Sprintf("%d pods of %s", set.Count, set.Requests))
	}
	return cmp.Or(strings.Join(words, " and "), "nothing")
}
