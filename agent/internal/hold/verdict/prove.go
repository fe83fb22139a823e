package verdict

import (
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/spillway-dev/spillway/agent/internal/placeholder"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// settleFor is how long the scheduler may revise that a placeholder has no place: others
// that are released at the same time make room for it.
const settleFor = 3 * time.Second

// Account returns decisions that no placeholders prove: capacity is only accounted for.
func Account(decisions []Decision) []Decision {
	return each(decisions, func(d Decision) Decision {
		d.accounted, d.proof = true, placeholder.Proven
		return d
	})
}

func each(decisions []Decision, next func(Decision) Decision) []Decision {
	out := make([]Decision, len(decisions))
	for i, d := range decisions {
		out[i] = next(d)
	}
	return out
}

// Prove returns the decisions with what their placeholders prove, by the UIDs of promises: those
// for which the scheduler has found no place are refused. timeout is how long it may take to find
// the next. The places of what is refused are to be given up before the broker learns it.
func Prove(decisions []Decision, states map[types.UID]placeholder.State, now time.Time, timeout time.Duration) (proven []Decision, refusedAny bool) {
	// The placeholders are created hold by hold, the earliest one first. Once one is answered,
	// the broker waits longer for the others.
	inTurn, answered := true, slices.ContainsFunc(decisions, func(d Decision) bool { return d.unproven })
	proven = each(decisions, func(d Decision) Decision {
		next := d.prove(states[d.Promise().UID], now, timeout, inTurn, answered)
		refusedAny = refusedAny || next.state != d.state
		inTurn, answered = inTurn && next.proof != placeholder.Waiting, answered || next.unproven
		return next
	})
	return proven, refusedAny
}

// prove is a decision with what its placeholders prove. inTurn: no earlier hold waits. answered:
// another attempt is answered now.
func (d Decision) prove(state placeholder.State, now time.Time, timeout time.Duration, inTurn, answered bool) Decision {
	wait := placeholder.NewWait()
	if d.known.wait != nil {
		wait = *d.known.wait
	}
	d.takes = wait.Observe(state, inTurn, now)
	if d.known.wait = &wait; len(state.Missing) == 0 {
		d.known.wait = nil
	}
	d.proof, d.proofMessage = state.Judge(d.takes, placeholder.Deadlines{Settle: min(settleFor, timeout), Timeout: timeout}), state.String()
	if d.proof == placeholder.Waiting && d.state == open && !answered && d.late(now) {
		d.proof, d.proofMessage = placeholder.Refused, d.proofMessage+outOfTime(d.instruction)
	}
	if d.proof != placeholder.Refused || d.state == refused || d.state == reduced {
		return d
	}
	d.known.wait = nil
	switch left := state.Without(d.held); d.state {
	case standing:
		return d.refuse(capacity.Min(d.before, left), &capacity.Rejection{Reason: ReasonCapacityLost, Message: state.String()})
	case open:
		d.unproven = true
		return d.refuse(d.fallBack(left), &capacity.Rejection{Reason: ReasonInsufficientCapacity, Message: d.proofMessage})
	}
	return d // deferred: another hold of the consumer comes first
}

// minTrial is how long guests of an attempt are tried at least, however long its proof took.
const minTrial = 3 * time.Second

// trialRetryAfter is the delay before guests are tried again that could not be: roles, quotas
// and accounts of a new namespace take effect without an event.
const trialRetryAfter = 200 * time.Millisecond

// Answer is what the API server says about a guest.
type Answer string

const (
	Admitted    Answer = "admitted"
	NotAdmitted Answer = "not admitted"
	// Undecided: nothing yet.
	Undecided Answer = "undecided"
	// NotGranted: nothing before what it requests is granted.
	NotGranted Answer = "not granted"
)

// Trial is what the API server says about a guest of one shape.
type Trial struct {
	Answer Answer
	// Words of the API server, unless it admits the guest, or why it cannot be asked.
	Words string
}

// refusal is why pods with some requests are refused.
func (t Trial) refusal(of string) *capacity.Rejection {
	why := fmt.Sprintf("It is not known whether the API server admits pods of %s: %s.", of, t.Words)
	if t.Answer == NotAdmitted {
		why = fmt.Sprintf("The API server does not admit pods of %s: %s.", of, t.Words)
	}
	return &capacity.Rejection{Reason: ReasonGuestNotAdmitted, Message: why}
}

// Guests are the shapes of which the API server must admit a guest before more is accepted, none
// if it waits for something else. Guests of a divisible total may be of any size: some part of it
// must be admitted.
func (d Decision) Guests() (sets []broker.PodSet, divisible bool) {
	if d.state != open || d.waits() {
		return nil, false
	}
	if total := d.held.Totals; len(d.held.PodSets) == 0 && len(total.List()) > 0 {
		return []broker.PodSet{{Name: "total", Count: 1, Requests: total}}, true
	}
	return d.held.PodSets, false
}

// Tries reports whether a decision has guests to try.
func (d Decision) Tries() bool {
	sets, _ := d.Guests()
	return len(sets) > 0
}

// Try returns the decisions with what the API server says about their Guests, by instruction: those
// whose guests it does not admit are refused. What it says may end with the first that it does not
// admit if the instruction's status has what was accepted before. A decision whose guests cannot be
// tried yet waits for that, and is refused if the attempt takes longer than a timeout with its
// proof: the broker waits for both.
func Try(decisions []Decision, trials map[types.UID][]Trial, now time.Time, timeout time.Duration) (tried []Decision, refusedAny bool) {
	tried = each(decisions, func(d Decision) Decision {
		next := d.try(trials[d.instruction.UID], now, timeout)
		refusedAny = refusedAny || next.state != d.state
		return next
	})
	return tried, refusedAny
}

func (d Decision) try(trials []Trial, now time.Time, timeout time.Duration) Decision {
	sets, divisible := d.Guests()
	for i, t := range trials {
		if t.Answer == Admitted {
			continue
		}
		if t.Answer != NotAdmitted {
			if d.known.attempt.untried.IsZero() {
				d.known.attempt.untried = now
			}
			took, untried := now.Sub(d.known.attempt.since), now.Sub(d.known.attempt.untried)
			if !d.late(now) && (took < timeout || untried < min(minTrial, timeout)) {
				d.untried, d.granting, d.takes = t.Words, t.Answer == NotGranted, max(d.takes, untried)
				return d
			}
		}
		set, of := sets[i], sets[i].Requests.String()
		if divisible {
			of = "any part of " + of
		}
		left := placeholder.State{Missing: []placeholder.Missing{{Set: set, Wanted: set.Count}}}.Without(d.held)
		if d = d.refuse(d.fallBack(left), t.refusal(of)); d.instruction.Status.Accepted != nil {
			break
		}
	}
	if len(sets) > 0 {
		d.known.attempt.untried = time.Time{}
	}
	return d
}
