package verdict

import (
	"fmt"
	"time"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// RetryAfter is the delay before what waits without an event is decided on again. Until then its
// status, which says so already, is not written.
const RetryAfter = 2 * time.Second

// deliveryShare: of the time that the broker waits, this part is left for the ways of the request
// and of the answer.
const deliveryShare = 6

// inTime is a decision with regard to the time that is left. While an earlier grant of the
// consumer is not in effect, more is left alone for a while: otherwise holds that come one after
// the other would all wait for the last one. Then more is refused once the broker waits no longer;
// the broker learns it when the smaller grant is in effect.
func (in Input) inTime(d Decision) Decision {
	if d.state != open {
		if settled(d.instruction) {
			d.known.attempt = attempt{}
		}
		return d
	}
	waits, grows := !in.GrantWaits.IsZero(), d.grows()
	if waits && grows && in.Now.Before(in.GrantWaits.Add(RetryAfter)) {
		d.state, d.held = deferred, d.before
		return d
	}
	if a := &d.known.attempt; a.since.IsZero() || a.number != d.instruction.Spec.Attempt {
		*a = attempt{number: d.instruction.Spec.Attempt, since: in.Now}
	}
	d.due = in.due(d)
	if waits && (grows || d.instruction.Status.Accepted != nil) && d.late(in.Now) {
		return d.refuse(d.accepted(), &capacity.Rejection{Reason: ReasonGrantTimeout, Message: "The grant is not in effect in time." + outOfTime(d.instruction)})
	}
	return d
}

// due is when an undecided attempt must be decided, so that the answer is there before the
// broker asks another provider; zero if the broker has not said how long it waits. The time of
// those that wait for others counts from the last answer, as the broker counts it
// (answers.Progress).
func (in Input) due(d Decision) time.Time {
	if d.instruction.Spec.AnswerWithin == nil || d.instruction.Spec.AnswerWithin.Duration <= 0 {
		return time.Time{}
	}
	within, since := d.instruction.Spec.AnswerWithin.Duration, d.known.attempt.since
	due := since.Add(within)
	if in.Memory.answered.After(since) && !in.Memory.lastKnown.After(due) {
		due = in.Memory.answered.Add(within)
	}
	return due.Add(-within / deliveryShare)
}

// late reports whether there is no more time to decide on an attempt.
func (d Decision) late(now time.Time) bool { return !d.due.IsZero() && !now.Before(d.due) }

// outOfTime is the end of the message of a refusal because there was no more time.
func outOfTime(of *broker.ProviderInstruction) string {
	return fmt.Sprintf(" The broker waits %s for an answer.", of.Spec.AnswerWithin.Duration)
}
