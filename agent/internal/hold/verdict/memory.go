package verdict

import (
	"fmt"
	"maps"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/spillway-dev/spillway/agent/internal/placeholder"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// Memory is what an agent remembers of instructions that their statuses do not say. The one who
// reads and writes changes it between decisions; a decision does not.
type Memory struct {
	of map[types.UID]*known
	// answered is when this agent last decided on an attempt, and lastKnown since when it had known
	// the latest of those that it has decided on.
	answered, lastKnown time.Time
}

// known is what is remembered of an instruction.
type known struct {
	// before is what was held before a larger hold that is recorded and not verified yet.
	before *broker.HeldCapacity
	// lost is what no longer fits of it, and refused what was refused, until the status says so.
	lost    *Loss
	refused *refusal
	attempt attempt
	// wait is how it waits for the scheduler, nil if each placeholder has a place.
	wait *placeholder.Wait
}

// refusal is a verdict about an instruction, and what is held after it.
type refusal struct {
	generation int64
	held       broker.HeldCapacity
	why        *capacity.Rejection
}

// attempt is an attempt that is not decided yet: since when this agent knows it, and since when
// its guests cannot be tried, zero if they could be the last time.
type attempt struct {
	number         int64
	since, untried time.Time
}

// NewMemory returns a Memory of nothing.
func NewMemory() *Memory { return &Memory{of: map[types.UID]*known{}} }

// Keep forgets all other instructions.
func (m *Memory) Keep(instructions []*broker.ProviderInstruction) {
	exists := map[types.UID]bool{}
	for _, of := range instructions {
		exists[of.UID] = true
	}
	maps.DeleteFunc(m.of, func(uid types.UID, _ *known) bool { return !exists[uid] })
}

// at is what is known of an instruction.
func (m *Memory) at(uid types.UID) *known {
	if m.of[uid] == nil {
		m.of[uid] = &known{}
	}
	return m.of[uid]
}

// Lose replaces what no longer fits.
func (m *Memory) Lose(losses map[types.UID]*Loss) {
	for uid := range losses {
		m.at(uid)
	}
	for uid, k := range m.of {
		k.lost = losses[uid]
	}
}

// Recorded notes what was held before decisions for more, until it is verified that no other agent
// holds the same.
func (m *Memory) Recorded(decisions []Decision, verified bool) {
	for _, d := range decisions {
		if !d.grows() {
			continue
		}
		if k := m.at(d.instruction.UID); verified {
			k.before = nil
		} else {
			k.before = &d.before
		}
	}
}

// Note notes how far decisions are.
func (m *Memory) Note(decisions []Decision) {
	for _, d := range decisions {
		k := m.at(d.instruction.UID)
		k.attempt, k.wait, k.refused = d.known.attempt, d.known.wait, d.known.refused
	}
}

// Written notes that the status of an instruction says what is decided: if that is final, the
// attempt is answered.
func (m *Memory) Written(of *broker.ProviderInstruction, now time.Time) {
	k := m.at(of.UID)
	k.before, k.lost, k.refused = nil, nil, nil
	if since := k.attempt.since; !since.IsZero() && settled(of) {
		k.attempt, m.answered = attempt{}, now
		if since.After(m.lastKnown) {
			m.lastKnown = since
		}
	}
}

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
