package verdict

import (
	"maps"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/spillway-dev/spillway/agent/internal/placeholder"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// Memory is what an agent remembers of instructions that their statuses do not say. The one who
// reads and writes changes it between decisions; a decision does not.
type Memory struct {
	of map[types.UID]known
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
func NewMemory() *Memory { return &Memory{of: map[types.UID]known{}} }

// change replaces what is known of an instruction.
func (m *Memory) change(uid types.UID, change func(*known)) {
	k := m.of[uid]
	if change(&k); k == (known{}) {
		delete(m.of, uid)
	} else {
		m.of[uid] = k
	}
}

// Keep forgets all other instructions.
func (m *Memory) Keep(instructions []*broker.ProviderInstruction) {
	maps.DeleteFunc(m.of, func(uid types.UID, _ known) bool {
		return !slices.ContainsFunc(instructions, func(of *broker.ProviderInstruction) bool { return of.UID == uid })
	})
}

// Lose replaces what no longer fits.
func (m *Memory) Lose(losses map[types.UID]*Loss) {
	for uid := range m.of {
		m.change(uid, func(k *known) { k.lost = nil })
	}
	for uid, lost := range losses {
		m.change(uid, func(k *known) { k.lost = lost })
	}
}

// Recorded notes what was held before decisions for more, until it is verified that no other agent
// holds the same.
func (m *Memory) Recorded(decisions []Decision, verified bool) {
	for _, d := range decisions {
		if d.grows() {
			m.change(d.instruction.UID, func(k *known) {
				if k.before = &d.before; verified {
					k.before = nil
				}
			})
		}
	}
}

// Note notes how far decisions are.
func (m *Memory) Note(decisions []Decision) {
	for _, d := range decisions {
		m.change(d.instruction.UID, func(k *known) {
			k.attempt, k.wait = d.known.attempt, d.known.wait
			if d.state == refused {
				k.refused = &refusal{d.instruction.Generation, d.held, d.why}
			}
		})
	}
}

// Written notes that the status of an instruction says what is decided: if that is final, the
// attempt is answered.
func (m *Memory) Written(of *broker.ProviderInstruction, now time.Time) {
	m.change(of.UID, func(k *known) {
		k.before, k.lost, k.refused = nil, nil, nil
		if k.attempt.since.IsZero() || !settled(of) {
			return
		}
		if m.answered = now; k.attempt.since.After(m.lastKnown) {
			m.lastKnown = k.attempt.since
		}
		k.attempt = attempt{}
	})
}
