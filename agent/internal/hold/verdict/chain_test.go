package verdict_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/spillway-dev/spillway/agent/internal/hold/verdict"
	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/placeholder"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// start is when the provider's time begins.
var start = time.Unix(100_000, 0)

// provider is what a chain of verdicts about rome's instructions is given.
type provider struct {
	all     []*broker.ProviderInstruction
	memory  *verdict.Memory
	nodes   verdict.Nodes
	now     time.Time
	waits   time.Time
	granted peering.Progress
	timeout time.Duration
	// states of the scheduler's places by instruction; proven where there is none. With accounted,
	// there are no placeholders.
	states    map[string]placeholder.State
	accounted bool
	// trials by instruction; admitted where there are none.
	trials map[string][]verdict.Trial
}

func newProvider(slots []capacity.Slot) *provider {
	return &provider{memory: verdict.NewMemory(), nodes: verdict.Nodes{Slots: slots}, now: start, granted: peering.Done("InEffect", ""), timeout: 20 * time.Second, states: map[string]placeholder.State{}, trials: map[string][]verdict.Trial{}}
}

// cpus is a provider of one node.
func cpus(n string) *provider {
	return newProvider([]capacity.Slot{slot("a", expect.Resources("cpu", n, "memory", "64Gi"))})
}

func (p *provider) add(of *broker.ProviderInstruction) {
	of.CreationTimestamp = metav1.NewTime(start.Add(time.Duration(len(p.all)) * time.Second))
	p.all = append(p.all, of)
}

func (p *provider) input() verdict.Input {
	return verdict.Input{
		Consumer: "rome", Instructions: p.all, Lending: broker.Lending{Enabled: true}, Memory: p.memory, Nodes: func() verdict.Nodes { return p.nodes }, Now: p.now, GrantWaits: p.waits,
	}
}

// prove is what the scheduler says of decisions.
func (p *provider) prove(decisions []verdict.Decision) ([]verdict.Decision, bool) {
	if p.accounted {
		return verdict.Account(decisions), false
	}
	states := map[types.UID]placeholder.State{}
	for name, state := range p.states {
		states[types.UID(name)] = state
	}
	return verdict.Prove(decisions, states, p.now, p.timeout)
}

// try is what the API server says of their guests.
func (p *provider) try(decisions []verdict.Decision) ([]verdict.Decision, bool) {
	all := map[types.UID][]verdict.Trial{}
	for _, d := range decisions {
		sets, _ := d.Guests()
		for i := range sets {
			trial := verdict.Trial{Answer: verdict.Admitted}
			if i < len(p.trials[d.Instruction().Name]) {
				trial = p.trials[d.Instruction().Name][i]
			}
			all[d.Instruction().UID] = append(all[d.Instruction().UID], trial)
		}
	}
	return verdict.Try(decisions, all, p.now, p.timeout)
}

// chain decides, and remembers how far it has come.
func (p *provider) chain() []verdict.Decision {
	decisions := verdict.Decide(p.input())
	for _, next := range []func([]verdict.Decision) ([]verdict.Decision, bool){p.prove, p.try} {
		decisions, _ = next(decisions)
		p.memory.Note(decisions)
	}
	return decisions
}

func (p *provider) effect() verdict.Effect {
	return verdict.Effect{Granted: p.granted, GrantWaits: p.waits, Now: p.now, LeaveWithin: 10 * time.Minute, Guests: func() inventory.Guests { return p.nodes.Guests["rome"] }}
}

// statuses are those to write, by instruction.
func (p *provider) statuses(decisions []verdict.Decision) map[string]broker.ProviderInstructionStatus {
	out := map[string]broker.ProviderInstructionStatus{}
	writes, _ := verdict.Statuses(decisions, p.effect())
	for _, w := range writes {
		out[w.Instruction.Name] = w.Status
	}
	return out
}

// record records what grows, as before it is granted.
func (p *provider) record() {
	for _, w := range verdict.Recordings(verdict.Decide(p.input()), peering.Waiting(verdict.ReasonGrantPending, ""), p.now) {
		w.Instruction.Status = w.Status
	}
}

func condition(status broker.ProviderInstructionStatus) metav1.Condition {
	if c := meta.FindStatusCondition(status.Conditions, broker.ConditionEnforced); c != nil {
		return *c
	}
	return metav1.Condition{}
}

// asked is an attempt of rome that is not decided.
func asked(name string, attempt int64, want broker.HeldCapacity) *broker.ProviderInstruction {
	return &broker.ProviderInstruction{
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name), Generation: attempt},
		Spec: broker.ProviderInstructionSpec{
			ReservationName: name, RequesterClusterID: "rome", Attempt: attempt, PodSets: want.PodSets, RequestedResources: want.Totals, AnswerWithin: &metav1.Duration{Duration: 30 * time.Second},
		},
	}
}

// standing is a hold of rome that is accepted.
func standing(name string, held broker.HeldCapacity) *broker.ProviderInstruction {
	of := asked(name, 1, held)
	of.Status = broker.ProviderInstructionStatus{Enforced: true, ObservedAttempt: 1, ObservedGeneration: 1, Held: held.DeepCopy(), Conditions: []metav1.Condition{
		{Type: broker.ConditionEnforced, Status: metav1.ConditionTrue, Reason: verdict.ReasonAccepted, ObservedGeneration: 1},
		{Type: broker.ConditionProven, Status: metav1.ConditionTrue, Reason: verdict.ReasonPlacesFound, ObservedGeneration: 1},
	}}
	if held.Empty() {
		of.Status.Held = nil
	}
	return of
}

// grown is a hold of which the next attempt asks for more.
func grown(name string, from, to broker.HeldCapacity) *broker.ProviderInstruction {
	of := standing(name, from)
	of.Spec.Attempt, of.Generation = 2, 2
	of.Spec.PodSets, of.Spec.RequestedResources = to.PodSets, to.Totals
	return of
}

// nowhere says that the scheduler has found no place for n of the pods of a set, which it has tried.
func nowhere(n int32, of broker.HeldCapacity) placeholder.State {
	missing := of.PodSets[0]
	missing.Count = n
	return placeholder.State{Pods: of.PodSets[0].Count, Missing: []placeholder.Missing{{Set: missing, Wanted: of.PodSets[0].Count, Messages: []string{"0/1 nodes are available"}, Tried: n}}}
}

// untried says the same of pods that it has not come to.
func untried(n int32, of broker.HeldCapacity) placeholder.State {
	state := nowhere(n, of)
	state.Missing[0].Messages, state.Missing[0].Tried = nil, 0
	return state
}

func onePod(cpu string) broker.HeldCapacity { return pods(set("a", 1, expect.Resources("cpu", cpu))) }
func somePods(n int32) broker.HeldCapacity {
	return pods(set("a", n, expect.Resources("cpu", "1")))
}

var (
	no      = verdict.Trial{Answer: verdict.NotAdmitted, Words: "no"}
	later   = verdict.Trial{Answer: verdict.Undecided, Words: "later"}
	granted = verdict.Trial{Answer: verdict.NotGranted, Words: "once granted"}
	yes     = verdict.Trial{Answer: verdict.Admitted}
)

// outcome is a decision as the chain leaves it: what is held, and what its status would say.
func outcome(p *provider, decisions []verdict.Decision, name string) string {
	statuses := p.statuses(decisions)
	for _, d := range decisions {
		if d.Instruction().Name != name {
			continue
		}
		says := "its status stays"
		if status, written := statuses[name]; written {
			says = strings.TrimSpace(condition(status).Reason + " " + condition(status).Message)
		}
		return fmt.Sprintf("%d pods, %s", d.Promise().Held.Pods(), says)
	}
	return "no decision"
}

// chains say what happens until the last chain, and the outcome for r1 after it.
type chains map[string]struct {
	reason string
	run    func(p *provider) []verdict.Decision
	want   string
}

func (all chains) run(t *testing.T) {
	for name, tc := range all {
		t.Run(name, func(t *testing.T) {
			p := cpus("10")
			if got := outcome(p, tc.run(p), "r1"); got != tc.want {
				t.Errorf("%s:\ngot  %s\nwant %s", tc.reason, got, tc.want)
			}
		})
	}
}

func within(p *provider, after time.Duration) { p.now = start.Add(after) }

// TestDecide: terms, nodes, and the time while an earlier grant is not in effect.
func TestDecide(t *testing.T) {
	chains{
		"accepted": {"it fits, is proven and admitted", func(p *provider) []verdict.Decision {
			p.add(asked("r1", 1, somePods(2)))
			return p.chain()
		}, "2 pods, Accepted Holding 2 pods of cpu 1 for consumer rome."},
		"accounted": {"without placeholders nothing is to be proven", func(p *provider) []verdict.Decision {
			p.accounted = true
			p.states["r1"] = nowhere(2, somePods(2))
			p.add(asked("r1", 1, somePods(2)))
			return p.chain()
		}, "2 pods, Accepted Holding 2 pods of cpu 1 for consumer rome."},
		"does not fit": {"the terms and the nodes come first", func(p *provider) []verdict.Decision {
			p.add(asked("r1", 1, pods(set("a", 6, expect.Resources("cpu", "2")))))
			return p.chain()
		}, `0 pods, InsufficientCapacity 5 of 6 pods of pod set "a" fit. Insufficient cpu on one node: requested 2.`},

		// An earlier grant is not in effect.
		"growth is deferred": {"others would wait for it as well", func(p *provider) []verdict.Decision {
			p.waits, p.granted = start, peering.Waiting("QuotaPending", "")
			p.add(grown("r1", somePods(2), somePods(4)))
			within(p, time.Second)
			return p.chain()
		}, "2 pods, its status stays"},
		"for a while": {"it is decided on with the grant that is late", func(p *provider) []verdict.Decision {
			p.waits, p.granted = start, peering.Waiting("QuotaPending", "the quota is not counted")
			p.add(grown("r1", somePods(2), somePods(4)))
			within(p, 3*time.Second)
			return p.chain()
		}, "4 pods, GrantPending the quota is not counted"},
		"what is smaller is not deferred": {"it needs no grant", func(p *provider) []verdict.Decision {
			p.waits = start
			p.add(grown("r1", somePods(2), somePods(1)))
			return p.chain()
		}, "1 pods, Accepted Holding 1 pods of cpu 1 for consumer rome."},
		"a late grant": {"the broker waits no longer; what was accepted stays", func(p *provider) []verdict.Decision {
			p.add(grown("r1", somePods(2), somePods(4)))
			p.record()
			p.chain()
			p.waits = start.Add(time.Second)
			within(p, 26*time.Second)
			return p.chain()
		}, "2 pods, GrantTimeout Holding only 2 pods of cpu 1: The grant is not in effect in time. The broker waits 30s for an answer."},
		"a grant that is not late": {"there is time left", func(p *provider) []verdict.Decision {
			p.add(grown("r1", somePods(2), somePods(4)))
			p.record()
			p.chain()
			p.waits, p.granted = start.Add(time.Second), peering.Waiting("QuotaPending", "")
			within(p, 24*time.Second)
			return p.chain()
		}, "4 pods, GrantPending"},
	}.run(t)
}

// TestProve: what the scheduler says.
func TestProve(t *testing.T) {
	chains{
		"no place": {"its words are the answer, and what was held stays", func(p *provider) []verdict.Decision {
			p.add(grown("r1", somePods(2), somePods(4)))
			p.states["r1"] = nowhere(1, somePods(4))
			p.chain()
			within(p, 4*time.Second)
			return p.chain()
		}, "2 pods, InsufficientCapacity Holding only 2 pods of cpu 1: The scheduler found a place for 3 of 4 pods of cpu 1: 0/1 nodes are available."},
		"no place yet": {"it may still find one", func(p *provider) []verdict.Decision {
			p.add(asked("r1", 1, somePods(4)))
			p.states["r1"] = nowhere(1, somePods(4))
			p.chain()
			within(p, 2*time.Second)
			return p.chain()
		}, "4 pods, ProofPending The scheduler found a place for 3 of 4 pods of cpu 1: 0/1 nodes are available."},
		"a late proof": {"the broker waits no longer", func(p *provider) []verdict.Decision {
			p.add(asked("r1", 1, somePods(4)))
			p.timeout = time.Hour
			p.states["r1"] = untried(1, somePods(4))
			p.chain()
			within(p, 25*time.Second)
			return p.chain()
		}, "0 pods, InsufficientCapacity The scheduler found a place for 3 of 4 pods of cpu 1: the scheduler has not answered for the others; check that it runs. The broker waits 30s for an answer."},
		"a place that is lost": {"a hold that was accepted is lowered", func(p *provider) []verdict.Decision {
			p.add(standing("r1", somePods(4)))
			p.states["r1"] = nowhere(1, somePods(4))
			p.chain()
			within(p, 4*time.Second)
			return p.chain()
		}, "3 pods, CapacityLost Holding only 3 pods of cpu 1: The scheduler found a place for 3 of 4 pods of cpu 1: 0/1 nodes are available. Guests beyond that must leave by 1970-01-02T03:56:44Z."},
		"no place while it is deferred": {"it holds what it held, and is decided on later", func(p *provider) []verdict.Decision {
			p.waits, p.timeout = start, 0
			p.add(grown("r1", somePods(2), somePods(4)))
			p.states["r1"] = nowhere(1, somePods(2))
			return p.chain()
		}, "2 pods, its status stays"},
		"fewer places are needed": {"what is smaller is not proven", func(p *provider) []verdict.Decision {
			p.add(grown("r1", somePods(4), somePods(2)))
			p.states["r1"] = nowhere(1, somePods(2))
			p.chain()
			within(p, time.Hour)
			return p.chain()
		}, "2 pods, Accepted Holding 2 pods of cpu 1 for consumer rome."},
	}.run(t)
}

// TestTry: what the API server says.
func TestTry(t *testing.T) {
	chains{
		"not admitted": {"its words are the answer", func(p *provider) []verdict.Decision {
			p.add(asked("r1", 1, somePods(4)))
			p.trials["r1"] = []verdict.Trial{no}
			return p.chain()
		}, "0 pods, GuestNotAdmitted The API server does not admit pods of cpu 1: no."},
		"one shape of two": {"what is admitted of a standing hold stays", func(p *provider) []verdict.Decision {
			both := pods(set("a", 2, expect.Resources("cpu", "1")), set("b", 1, expect.Resources("cpu", "2")))
			p.add(grown("r1", both, both))
			p.trials["r1"] = []verdict.Trial{no, yes}
			return p.chain()
		}, "1 pods, GuestNotAdmitted Holding only 1 pods of cpu 2: The API server does not admit pods of cpu 1: no. Guests beyond that must leave by 1970-01-02T03:56:40Z."},
		"a part of a total": {"any part may be used", func(p *provider) []verdict.Decision {
			p.add(asked("r1", 1, total(expect.Resources("cpu", "4"))))
			p.trials["r1"] = []verdict.Trial{no}
			return p.chain()
		}, "0 pods, GuestNotAdmitted The API server does not admit pods of any part of cpu 4: no."},
		"cannot be tried yet": {"it waits, and its status says so when it takes long", func(p *provider) []verdict.Decision {
			p.add(asked("r1", 1, somePods(4)))
			p.trials["r1"] = []verdict.Trial{later}
			p.chain()
			within(p, 3*time.Second)
			return p.chain()
		}, "4 pods, TrialPending Waiting to try whether the API server admits the guests: later."},
		"cannot be tried in time": {"the time began with the attempt", func(p *provider) []verdict.Decision {
			p.add(asked("r1", 1, somePods(4)))
			p.trials["r1"] = []verdict.Trial{later}
			p.chain()
			within(p, 21*time.Second)
			return p.chain()
		}, "0 pods, GuestNotAdmitted It is not known whether the API server admits pods of cpu 1: later."},
		"not tried before it is proven": {"its guests are asked for only then", func(p *provider) []verdict.Decision {
			p.add(asked("r1", 1, somePods(4)))
			p.states["r1"], p.trials["r1"] = untried(1, somePods(4)), []verdict.Trial{no}
			return p.chain()
		}, "4 pods, its status stays"},
	}.run(t)
}

// TestOneAnswerAtATime: of two attempts whose time is over, one is refused: the broker waits longer
// for the other, which the memory of the answer says from then on.
func TestOneAnswerAtATime(t *testing.T) {
	p := cpus("10")
	p.timeout = time.Hour
	for _, name := range []string{"r1", "r2"} {
		p.add(asked(name, 1, somePods(2)))
		p.states[name] = untried(2, somePods(2))
	}
	p.chain()
	for _, step := range []struct {
		after time.Duration
		open  string
	}{{24 * time.Second, "r1 r2"}, {25 * time.Second, "r2"}, {49 * time.Second, "r2"}, {50 * time.Second, ""}} {
		p.now = start.Add(step.after)
		decisions := p.chain()
		var open []string
		for _, d := range decisions {
			if d.Open() {
				open = append(open, d.Instruction().Name)
			}
		}
		if got := strings.Join(open, " "); got != step.open {
			t.Errorf("after %s, %q are open, want %q", step.after, got, step.open)
		}
		writes, _ := verdict.Statuses(decisions, p.effect())
		for _, w := range writes {
			w.Instruction.Status = w.Status
			p.memory.Written(w.Instruction, p.now)
		}
	}
}

// TestGrantWhileItWaits: what is not proven or tried yet is not granted, but where the API server
// asks for the grant first.
func TestGrantWhileItWaits(t *testing.T) {
	for name, tc := range map[string]struct {
		state  placeholder.State
		trials []verdict.Trial
		want   int32
	}{
		"proven":                      {want: 4},
		"not proven":                  {state: untried(1, somePods(4)), want: 2},
		"not tried":                   {trials: []verdict.Trial{later}, want: 2},
		"to be tried once granted":    {trials: []verdict.Trial{granted}, want: 4},
		"not admitted":                {trials: []verdict.Trial{no}, want: 2},
		"not proven, to be tried too": {state: untried(1, somePods(4)), trials: []verdict.Trial{granted}, want: 2},
	} {
		p := cpus("10")
		p.add(grown("r1", somePods(2), somePods(4)))
		p.record()
		p.states["r1"], p.trials["r1"] = tc.state, tc.trials
		if _, pods := verdict.Grant(p.chain()); pods != tc.want {
			t.Errorf("%s: %d pods are granted, want %d", name, pods, tc.want)
		}
	}
}

// TestRefusalStands: a refusal that is not in the status yet is not decided again, until the next
// attempt.
func TestRefusalStands(t *testing.T) {
	p := cpus("10")
	p.add(asked("r1", 1, somePods(4)))
	p.trials["r1"] = []verdict.Trial{no}
	p.chain()
	delete(p.trials, "r1")
	if got := outcome(p, p.chain(), "r1"); !strings.HasPrefix(got, "0 pods, GuestNotAdmitted") {
		t.Errorf("the same attempt: %s", got)
	}
	p.all[0].Spec.Attempt, p.all[0].Generation = 2, 2
	if got := outcome(p, p.chain(), "r1"); !strings.HasPrefix(got, "4 pods, Accepted") {
		t.Errorf("the next attempt: %s", got)
	}
}

// TestRefusalFollowsTheNodes: what does not fit the nodes, and an error has kept from being
// reported, is refused only as long as it does not fit.
func TestRefusalFollowsTheNodes(t *testing.T) {
	p := cpus("2")
	p.add(asked("r1", 1, somePods(4)))
	if got := outcome(p, p.chain(), "r1"); !strings.HasPrefix(got, "0 pods, InsufficientCapacity") {
		t.Errorf("a node of 2 CPUs: %s", got)
	}
	p.nodes.Slots = cpus("10").nodes.Slots
	if got := outcome(p, p.chain(), "r1"); !strings.HasPrefix(got, "4 pods, Accepted") {
		t.Errorf("a node of 10 CPUs: %s", got)
	}
}

// TestRecorded: until it is verified that no other agent holds the same, a larger hold that is
// recorded is judged as one that is not.
func TestRecorded(t *testing.T) {
	p := cpus("10")
	p.add(grown("r1", somePods(2), somePods(4)))
	decisions := verdict.Decide(p.input())
	p.record()
	recordings := func() int {
		return len(verdict.Recordings(verdict.Decide(p.input()), peering.Waiting(verdict.ReasonGrantPending, ""), p.now))
	}
	p.memory.Recorded(decisions, false)
	if recordings() != 1 {
		t.Error("it is held before it is verified")
	}
	p.memory.Recorded(decisions, true)
	if recordings() != 0 {
		t.Error("it is recorded again although it is verified")
	}
	p.memory.Recorded(decisions, false)
	p.memory.Keep(nil)
	if recordings() != 0 {
		t.Error("what is gone is remembered")
	}
}
