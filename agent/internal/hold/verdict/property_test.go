package verdict_test

import (
	"fmt"
	"reflect"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/spillway-dev/spillway/agent/internal/hold/verdict"
	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/placeholder"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// drawProvider is one with some instructions, in any state, of which the scheduler and the API
// server say anything.
func drawProvider(t *rapid.T) *provider {
	p := cpus(fmt.Sprint(rapid.IntRange(0, 10).Draw(t, "cpus")))
	p.accounted = rapid.Bool().Draw(t, "accounted")
	if rapid.Bool().Draw(t, "grant waits") {
		p.waits = start.Add(-rapid.SampledFrom([]time.Duration{time.Second, time.Minute}).Draw(t, "since"))
		p.granted = peering.Waiting("QuotaPending", "")
	}
	count := rapid.Int32Range(0, 4)
	for i := range rapid.IntRange(1, 4).Draw(t, "instructions") {
		name, held, want := fmt.Sprint("r", i), somePods(count.Draw(t, "held")), somePods(count.Draw(t, "want"))
		of := grown(name, held, want)
		switch rapid.SampledFrom([]string{"standing", "asked", "recorded", "releasing"}).Draw(t, "state") {
		case "standing":
			of = standing(name, held)
		case "recorded":
			recorded := somePods(held.Pods() + 1)
			of.Status.Held, of.Status.Accepted = &recorded, held.DeepCopy()
		case "releasing":
			of.Spec.Releasing = true
		}
		if rapid.Bool().Draw(t, "of another") {
			of.Spec.RequesterClusterID = "berlin"
		}
		p.add(of)
		if missing := count.Draw(t, "missing"); missing > 0 {
			p.states[name] = rapid.SampledFrom([]placeholder.State{untried(missing, somePods(4)), nowhere(missing, somePods(4))}).Draw(t, "places")
		}
		p.trials[name] = []verdict.Trial{rapid.SampledFrom([]verdict.Trial{yes, yes, no, later, granted}).Draw(t, "trial")}
	}
	return p
}

// TestOnlyTheChainDecides: whatever the scheduler and the API server say, and however long it takes,
//   - judging the same again says the same, and changes nothing of what is judged;
//   - each step takes away only: what is refused stays refused, and no more is held or granted;
//   - what is accepted was wanted, has a place for each pod, and guests that are admitted.
func TestOnlyTheChainDecides(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawProvider(t)
		var before []*broker.ProviderInstruction
		for _, of := range p.all {
			before = append(before, of.DeepCopy())
		}
		for range rapid.IntRange(1, 3).Draw(t, "times") {
			decisions := verdict.Decide(p.input())
			if again := verdict.Decide(p.input()); !reflect.DeepEqual(again, decisions) {
				t.Fatalf("decided %+v, and then %+v", decisions, again)
			}
			for _, next := range []func([]verdict.Decision) ([]verdict.Decision, bool){p.prove, p.try, p.prove, p.try} {
				after, refused := next(decisions)
				if again, too := next(decisions); too != refused || !reflect.DeepEqual(again, after) {
					t.Fatalf("judged %+v, and then %+v", after, again)
				}
				expectLess(t, decisions, after, refused)
				decisions = after
				p.memory.Note(decisions)
			}
			if !reflect.DeepEqual(before, p.all) {
				t.Fatal("an instruction was changed")
			}
			p.expectDeserved(t, decisions)
			p.now = p.now.Add(rapid.SampledFrom([]time.Duration{0, time.Second, 4 * time.Second, 30 * time.Second}).Draw(t, "later"))
		}
	})
}

// expectLess expects that a step has refused some open decisions, and changed no others.
func expectLess(t *rapid.T, before, after []verdict.Decision, refused bool) {
	changed := false
	for i, b := range before {
		a := after[i]
		if a.Instruction() != b.Instruction() || a.Open() && !b.Open() || a.Deferred() != b.Deferred() {
			t.Fatalf("%s is open again, or another one", b.Instruction().Name)
		}
		had, has := b.Promise().Held, a.Promise().Held
		if !verdict.Covers(had, has) {
			t.Fatalf("%s: %s was to be held, and then %s", b.Instruction().Name, had.Totals, has.Totals)
		}
		changed = changed || a.Open() != b.Open() || !verdict.Covers(has, had)
	}
	if changed && !refused {
		t.Fatal("what is refused has still its place")
	}
}

// expectDeserved expects of what the statuses accept that it may be.
func (p *provider) expectDeserved(t *rapid.T, decisions []verdict.Decision) {
	for name, status := range p.statuses(decisions) {
		of := p.all[name[1]-'0']
		c := condition(status)
		if c.Status != metav1.ConditionUnknown && !p.granted.Done {
			t.Fatalf("%s is decided before the grant is in effect: %+v", name, c)
		}
		if !status.Enforced || of.Status.ObservedAttempt == of.Spec.Attempt {
			continue
		}
		held := broker.HeldCapacity{}
		if status.Held != nil {
			held = *status.Held
		}
		want := broker.HeldCapacity{PodSets: of.Spec.PodSets, Totals: of.Spec.RequestedResources}
		if !verdict.Covers(held, want) || !verdict.Covers(want, held) {
			t.Fatalf("%s holds %s of %s", name, held.Totals, want.Totals)
		}
		if had := of.Status.Held; had != nil && verdict.Covers(*had, want) && !verdict.Covers(want, *had) {
			continue // less than before needs neither
		}
		if missing := p.states[name].Missing; len(missing) > 0 && !p.accounted {
			t.Fatalf("%s is accepted without a place for %d pods", name, missing[0].Set.Count)
		}
		if want.Pods() > 0 && p.trials[name][0].Answer != verdict.Admitted {
			t.Fatalf("%s is accepted although its guests are %s", name, p.trials[name][0].Answer)
		}
	}
}
