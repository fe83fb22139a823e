package main

import (
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/types"
)

// schedules is how many of the schedules of make sim a test runs.
const schedules = 50

// TestSchedules runs the first schedules of make sim.
func TestSchedules(t *testing.T) {
	each(t, 1, schedules, func(seed uint64) bool {
		if r := inBubble(t, newSchedule(seed), plant{}, nil); r.violation != nil {
			t.Errorf("seed %d violates %q: %s", seed, r.violation.invariant, r.violation.message)
		}
		return true
	})
}

// TestSchedulesThatFailed runs schedules of more than the first ones that violated an
// invariant once.
func TestSchedulesThatFailed(t *testing.T) {
	for _, seed := range []uint64{
		60,   // a leader's write that shrinks a hold arrived after the next leader had found nothing to change
		125,  // a provider held capacity for a Reservation of which a new leader had not heard that it was released
		1277, // a provider accepted a hold for an instruction that it had just deleted
		3753, // as 763: a new leader with outdated caches listed what was released
		763,
		301,  // the same by a second leader, after the release was confirmed
		4897, // a grant that no pod could use was released at rest: the instruction counted as usable still
		3113, // two Reservations got, one after the other, what no pod could use
		508,  // an agent wrote a status that it had computed from an outdated cache, and left it
	} {
		if r := inBubble(t, newSchedule(seed), plant{}, nil); r.violation != nil {
			t.Errorf("seed %d violates %q: %s", seed, r.violation.invariant, r.violation.message)
		}
	}
}

// TestPlantedFaults checks that the invariants find faults that are there.
func TestPlantedFaults(t *testing.T) {
	for _, name := range []string{"a hold is dropped before the provider confirms", "a provider accepts without holding", "a deletion is lost", "the ledger is written without compare-and-swap"} {
		p := plantNamed(name)
		if p.name == "" || !find(t, 1000, p) {
			t.Errorf("the planted fault %q was not found", name)
		}
	}
}

// TestEveryInvariantHasAPlant checks that a planted fault shows of each invariant that it
// finds something.
func TestEveryInvariantHasAPlant(t *testing.T) {
	for _, invariant := range invariantNames {
		if !slices.ContainsFunc(plants, func(p plant) bool { return p.by == invariant }) {
			t.Errorf("no planted fault must be found by %q", invariant)
		}
	}
}

// TestStatusFollowsLedger checks that only a withdrawal excuses a status that grants more
// than the ledger, and only until it is written.
func TestStatusFollowsLedger(t *testing.T) {
	checks, paris := invariants{ledgers: map[holdKey]ledgerSeen{}}, &cluster{id: "paris"}
	for _, step := range []struct {
		what               string
		granted, withdrawn int64
		version            string
		want               bool
	}{
		{"granted", 5, 0, "1", false},
		{"withdrawn", 3, 2, "1", true},
		{"still not written", 3, 2, "1", true},
		{"written", 3, 2, "2", false},
		{"shrunk", 2, 2, "2", false},
		{"withdrawn again", 1, 4, "2", true},
	} {
		a := &account{granted: pledges{"r": step.granted}, withdrawn: map[types.UID]int64{"r": step.withdrawn}, versions: map[types.UID]string{"r": step.version}}
		if got := checks.follows(a, paris, "r"); got != step.want {
			t.Errorf("%s: excused is %t", step.what, got)
		}
	}
}

// TestSameSeedSameRun checks that a seed determines every step.
func TestSameSeedSameRun(t *testing.T) {
	for seed := range uint64(6) {
		first := inBubble(t, newSchedule(seed+1), plant{}, nil)
		if again := inBubble(t, newSchedule(seed+1), plant{}, nil); again.digest != first.digest || again.steps != first.steps {
			t.Errorf("seed %d: %d steps with digest %x, and then %d with %x", seed+1, first.steps, first.digest, again.steps, again.digest)
		}
	}
}

// TestShrink checks that a schedule that is shrunk keeps what matters.
func TestShrink(t *testing.T) {
	s := newSchedule(3)
	needed := s.events[len(s.events)/2]
	shrunk := shrink(s, func(candidate schedule) bool {
		for _, e := range candidate.events {
			if e == needed {
				return true
			}
		}
		return false
	})
	if len(shrunk.events) != 1 || shrunk.events[0] != needed {
		t.Errorf("shrunk to %v, want only %v", shrunk.events, needed)
	}
}
