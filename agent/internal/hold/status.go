package hold

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

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
	// ReasonProofPending: the scheduler has not found a place for each placeholder yet.
	ReasonProofPending = "ProofPending"
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

// status returns the status that shows a decision. within is whether the guests
// keep to the grant, using what they use. observedAttempt becomes the instruction's
// only if the decision is final.
func (d decision) status(granted peering.Progress, within bool, using string, now time.Time, leaveWithin time.Duration) broker.ProviderInstructionStatus {
	instruction := d.instruction
	consumer := instruction.Spec.RequesterClusterID
	status := *instruction.Status.DeepCopy()
	status.Enforced, status.ObservedGeneration = false, instruction.Generation
	enforced := metav1.Condition{Type: broker.ConditionEnforced, Status: metav1.ConditionFalse, ObservedGeneration: instruction.Generation, LastTransitionTime: metav1.NewTime(now)}
	final, held := true, d.held
	if d.grows() && status.Accepted == nil {
		status.Accepted = d.before.DeepCopy()
	}
	switch {
	case !granted.Done:
		enforced.Status, enforced.Reason, enforced.Message, final = metav1.ConditionUnknown, ReasonGrantPending, granted.Message, false
		// The grant may be in effect already: the larger of the old and the new hold
		// is kept from others.
		if d.smaller || d.refused != nil {
			held = d.before
		}
	case d.refused != nil:
		enforced.Reason, enforced.Message = d.refused.Reason, d.refused.Message
		if !d.held.Empty() {
			// It does not name the consumer: a broker of an earlier version repeats it to others.
			enforced.Message = fmt.Sprintf("Holding only %s: %s", describe(d.held), d.refused.Message)
		}
		if d.withdrawn() {
			status.LeaveBy = &metav1.Time{Time: now.Add(leaveWithin).Truncate(time.Second)}
			enforced.Message = fmt.Sprintf("%s. %s", strings.TrimSuffix(enforced.Message, "."), mustLeave(status.LeaveBy))
		}
	case d.proving() && d.untried != "":
		enforced.Status, enforced.Reason, final = metav1.ConditionUnknown, ReasonTrialPending, false
		enforced.Message = fmt.Sprintf("Waiting to try whether the API server admits the guests: %s.", d.untried)
	case d.proving():
		enforced.Status, enforced.Reason, enforced.Message, final = metav1.ConditionUnknown, ReasonProofPending, d.proofMessage, false
	case d.smaller && !within:
		enforced.Status, enforced.Reason, final = metav1.ConditionUnknown, ReasonGuestsRemain, false
		enforced.Message = fmt.Sprintf("Waiting for guests of consumer %s to terminate: %s are running, the hold is reduced to %s.", consumer, using, describe(d.held))
		held = d.before
		if status.LeaveBy != nil && now.Before(status.LeaveBy.Time) {
			sayLeaving(&enforced, status.LeaveBy)
		}
	case instruction.Spec.Releasing:
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
		status.ObservedAttempt, status.Accepted = instruction.Spec.Attempt, nil
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
func (d decision) expired(now time.Time) bool {
	status := d.instruction.Status
	return status.Enforced && status.LeaveBy != nil && !now.Before(status.LeaveBy.Time) && settled(d.instruction) && (d.accounted || d.proof == placeholder.Proven)
}

// proofChanged reports whether condition Proven of a hold that is enforced does not say what its
// placeholders prove: all have a place, or some have had none for a while. That a guest
// has just come, of which the next placeholder holds what it leaves, is not worth a write.
func (d decision) proofChanged() bool {
	status := d.instruction.Status
	if d.accounted || !status.Enforced || !settled(d.instruction) {
		return false
	}
	if meta.IsStatusConditionTrue(status.Conditions, broker.ConditionProven) {
		return d.proof != placeholder.Proven && d.proofTakes >= requeueAfter
	}
	return d.proof == placeholder.Proven
}

func mustLeave(by *metav1.Time) string {
	return fmt.Sprintf("Guests beyond that must leave by %s.", by.UTC().Format(time.RFC3339))
}

// ReasonNoPlace is the reason of the event of a guest that waits and for which nothing promised is
// left.
const ReasonNoPlace = "NoPlace"

// Reasons of condition Proven.
const (
	ReasonPlacesFound = "PlacesFound"
	ReasonNotProven   = "NotProven"
)

// setProven sets condition Proven of a decision that is final.
func (d decision) setProven(status *broker.ProviderInstructionStatus, now time.Time) {
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

// recording is the progress of a grant while its hold is only recorded.
func (r *Reconciler) recording() peering.Progress {
	if r.Placeholders.Namespace != "" {
		return peering.Waiting(ReasonGrantPending, "Waiting for the grant to be in effect, and for the scheduler to find a place for each pod.")
	}
	return peering.Waiting(ReasonGrantPending, "Waiting for the grant to be in effect.")
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
