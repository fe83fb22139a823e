package hold

import (
	"fmt"
	"time"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// attempt is an attempt that is not decided yet: since when this agent knows it, and since when
// its guests cannot be tried, zero if they could be the last time.
type attempt struct {
	number         int64
	since, untried time.Time
}

// answered is when this agent last decided on an attempt, and since when it had known the latest
// of those that it has decided on.
type answered struct{ at, since time.Time }

// deliveryShare: of the time that the broker waits, this part is left for the ways of the request
// and of the answer.
const deliveryShare = 6

// noteAttempts notes since when the attempts of decisions are known.
func (r *Reconciler) noteAttempts(decisions []decision) {
	for _, d := range decisions {
		switch {
		case settled(d.instruction):
			delete(r.attempts, d.instruction.UID)
		case d.undecided():
			r.attemptOf(d.instruction)
		}
	}
}

// attemptOf is the attempt of an instruction, which begins when it is first asked for.
func (r *Reconciler) attemptOf(in *broker.ProviderInstruction) *attempt {
	a := r.attempts[in.UID]
	if a == nil || a.number != in.Spec.Attempt {
		a = &attempt{number: in.Spec.Attempt, since: r.Clock.Now()}
		r.attempts[in.UID] = a
	}
	return a
}

// noteAnswer notes that an attempt is decided, if the written status of its instruction says so.
func (r *Reconciler) noteAnswer(in *broker.ProviderInstruction) {
	a := r.attempts[in.UID]
	if a == nil || !settled(in) {
		return
	}
	delete(r.attempts, in.UID)
	if r.answered.at = r.Clock.Now(); a.since.After(r.answered.since) {
		r.answered.since = a.since
	}
}

// decideBy is when an undecided attempt must be decided, so that the answer is there before the
// broker asks another provider; zero if the broker has not said how long it waits. The time of
// those that wait for others counts from the last answer, as the broker counts it
// (answers.Progress).
func (r *Reconciler) decideBy(in *broker.ProviderInstruction) time.Time {
	if in.Spec.AnswerWithin == nil || in.Spec.AnswerWithin.Duration <= 0 {
		return time.Time{}
	}
	within, since := in.Spec.AnswerWithin.Duration, r.attemptOf(in).since
	due := since.Add(within)
	if r.answered.at.After(since) && !r.answered.since.After(due) {
		due = r.answered.at.Add(within)
	}
	return due.Add(-within / deliveryShare)
}

// late reports whether there is no more time to decide on an attempt.
func (r *Reconciler) late(in *broker.ProviderInstruction) bool {
	by := r.decideBy(in)
	return !by.IsZero() && !r.Clock.Now().Before(by)
}

// firstDue is when the first of the undecided attempts must be decided, zero if none has to be.
func (r *Reconciler) firstDue(decisions []decision) (first time.Time) {
	for _, d := range decisions {
		if !d.undecided() {
			continue
		}
		if by := r.decideBy(d.instruction); first.IsZero() || !by.IsZero() && by.Before(first) {
			first = by
		}
	}
	return first
}

// outOfTime is the end of the message of a refusal because there was no more time.
func outOfTime(in *broker.ProviderInstruction) string {
	return fmt.Sprintf(" The broker waits %s for an answer.", in.Spec.AnswerWithin.Duration)
}

// refuseLateGrants refuses what is not decided in time because the consumer's grant is not in
// effect. The broker learns it once the smaller grant is.
func (r *Reconciler) refuseLateGrants(consumer string, decisions []decision) {
	if _, waiting := r.waiting[consumer]; !waiting {
		return
	}
	for i := range decisions {
		if d := &decisions[i]; d.undecided() && d.instruction.Status.Accepted != nil && r.late(d.instruction) {
			d.held = d.accepted()
			d.refused = &capacity.Rejection{Reason: ReasonGrantTimeout, Message: "The grant is not in effect in time." + outOfTime(d.instruction)}
		}
	}
}
