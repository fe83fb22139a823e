package verdict

import (
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/spillway-dev/spillway/agent/internal/placeholder"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// Places are what the placeholders of decisions show.
type Places struct {
	// States by the UIDs of promises.
	States map[types.UID]placeholder.State
	Now    time.Time
	// Timeout is how long the scheduler may take to find the next place.
	Timeout time.Duration
}

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

// Prove returns the decisions with what their placeholders prove: those for which the scheduler
// has found no place are refused. The places of what is refused are to be given up before the
// broker learns it.
func Prove(decisions []Decision, places Places) (proven []Decision, refusedAny bool) {
	// The placeholders are created hold by hold, the earliest one first. Once one is answered,
	// the broker waits longer for the others.
	inTurn, answered := true, slices.ContainsFunc(decisions, func(d Decision) bool { return d.unproven })
	proven = each(decisions, func(d Decision) Decision {
		next := d.prove(places, inTurn, answered)
		refusedAny = refusedAny || next.state != d.state
		inTurn, answered = inTurn && next.proof != placeholder.Waiting, answered || next.unproven
		return next
	})
	return proven, refusedAny
}

// prove is a decision with what its placeholders prove. inTurn: no earlier hold waits. answered:
// another attempt is answered now.
func (d Decision) prove(places Places, inTurn, answered bool) Decision {
	state, wait := places.States[d.Promise().UID], placeholder.NewWait()
	if d.known.wait != nil {
		wait = *d.known.wait
	}
	d.takes = wait.Observe(state, inTurn, places.Now)
	if d.known.wait = &wait; len(state.Missing) == 0 {
		d.known.wait = nil
	}
	d.proof, d.proofMessage = state.Judge(d.takes, placeholder.Deadlines{Settle: min(settleFor, places.Timeout), Timeout: places.Timeout}), state.String()
	if d.proof == placeholder.Waiting && d.state == open && !answered && d.late(places.Now) {
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
