package verdict

import (
	"cmp"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/spillway-dev/spillway/agent/internal/instruction"
	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/placeholder"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/charge"
)

// Input is what the instructions of one consumer are decided on.
type Input struct {
	Consumer string
	// Instructions of all consumers.
	Instructions []*broker.ProviderInstruction
	Lending      broker.Lending
	// Memory is what their statuses do not say.
	Memory *Memory
	// Nodes returns what the nodes have free and what uses them.
	Nodes func() Nodes
	// Now is the time, and GrantWaits since when a grant of the consumer is not in effect, zero if
	// all are.
	Now, GrantWaits time.Time
}

// Nodes are the observed nodes and pods.
type Nodes struct {
	Slots  []capacity.Slot
	Guests map[string]inventory.Guests
	// Pending are the cluster's own pods that wait for a node.
	Pending []broker.PodSet
}

// state of a decision.
type state int

const (
	// open: what is wanted fits, and is to be proven and tried.
	open state = iota
	// standing: the status shows the decision already.
	standing
	// deferred: more is wanted, and is decided on once an earlier grant is in effect.
	deferred
	// reduced: less is held than before, or nothing any more.
	reduced
	// refused: what is wanted is not held.
	refused
)

// Decision on one instruction.
type Decision struct {
	instruction *broker.ProviderInstruction
	state       state
	// held is the capacity to hold from now on, before what was held.
	held, before broker.HeldCapacity
	// why it is refused.
	why *capacity.Rejection
	// due is when an open decision must be made, zero if the broker does not say.
	due time.Time
	// proof is what the placeholders prove, and takes for how long it is open; with accounted there
	// are none. unproven is set if it is refused because of that.
	proof        placeholder.Verdict
	proofMessage string
	takes        time.Duration
	accounted    bool
	unproven     bool
	// untried is why its guests cannot be tried yet, and granting is set if that is because
	// the grant is to come first.
	untried  string
	granting bool
	// known is what is to be remembered of it.
	known known
}

// Instruction is what is decided on.
func (d Decision) Instruction() *broker.ProviderInstruction { return d.instruction }

// Promise is what is held from now on.
func (d Decision) Promise() charge.Promise { return charge.PromiseOf(d.instruction, d.held) }

// Open reports whether it is open whether what is wanted can be held.
func (d Decision) Open() bool { return d.state == open }

// Deferred reports whether it waits for an earlier grant.
func (d Decision) Deferred() bool { return d.state == deferred }

// waits reports whether the decision waits for the scheduler, or to try its guests.
func (d Decision) waits() bool {
	return d.state == open && (d.proof == placeholder.Waiting || d.untried != "")
}

// refuse is the decision to hold no more than a capacity, and why. It is remembered until the status
// says so: to find it out again, what is given up with it would be needed again.
func (d Decision) refuse(held broker.HeldCapacity, why *capacity.Rejection) Decision {
	d.state, d.held, d.why = refused, held, why
	d.known.refused = &refusal{d.instruction.Generation, held, why}
	return d
}

// accepted is what was held before all that is not decided yet. It is in the status, so that
// an agent that restarts meanwhile knows it.
func (d Decision) accepted() broker.HeldCapacity {
	if before := d.instruction.Status.Accepted; before != nil {
		return *before
	}
	return d.before
}

// fallBack is what a decision holds once it is refused: what was accepted or, if no more was
// to be held, what remains of it.
func (d Decision) fallBack(remains broker.HeldCapacity) broker.HeldCapacity {
	if d.instruction.Status.Accepted != nil {
		return d.accepted()
	}
	return capacity.Min(d.before, remains)
}

// withdrawn reports whether this cluster gives up a part of what it had accepted.
func (d Decision) withdrawn() bool { return d.state == refused && !Covers(d.held, d.accepted()) }

// grows reports whether more is to be held than before.
func (d Decision) grows() bool { return d.state == open && !Covers(d.before, d.held) }

// settled reports whether an instruction's status is the decision about what it says
// now: about this attempt and this content.
func settled(in *broker.ProviderInstruction) bool {
	_, decided := instruction.Decision(in)
	return decided
}

// Decide decides on each instruction of the consumer that is not settled. What is
// wanted beyond what is held already must fit the nodes, besides all that is promised
// to any consumer and not used yet. A refusal stands until the broker makes another
// attempt.
func Decide(in Input) (decisions []Decision) {
	judge := judge{Input: in, held: map[types.UID]broker.HeldCapacity{}}
	var own []*broker.ProviderInstruction
	for _, of := range in.Instructions {
		if before := cmp.Or(in.known(of).before, instruction.Held(of)); before != nil {
			judge.held[of.UID] = *before
		}
		if of.Spec.RequesterClusterID == in.Consumer {
			own = append(own, of)
		}
	}
	sortByAge(own)
	for _, of := range own {
		d := judge.decide(of)
		judge.held[of.UID] = d.held
		decisions = append(decisions, in.inTime(d))
	}
	return decisions
}

func (in Input) known(of *broker.ProviderInstruction) known {
	return *cmp.Or(in.Memory.of[of.UID], &known{})
}

func sortByAge(instructions []*broker.ProviderInstruction) {
	slices.SortFunc(instructions, func(a, b *broker.ProviderInstruction) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
}

// judge decides whether more capacity can be held, for one instruction after the
// other. What it has accepted counts as held.
type judge struct {
	Input
	held map[types.UID]broker.HeldCapacity
	// packer has the nodes with all that is promised in place; nil until it is needed,
	// and after a refusal.
	packer *capacity.Packer
}

// decide decides on an instruction by what is known of it, and by what fits.
func (j *judge) decide(of *broker.ProviderInstruction) Decision {
	d := Decision{instruction: of, before: j.held[of.UID], held: j.held[of.UID], known: j.known(of)}
	want := wanted(of)
	lost, past := d.known.lost, d.known.refused
	switch {
	case settled(of) && lost != nil:
		return d.refuse(capacity.Min(d.before, lost.held), lost.why)
	case settled(of):
		d.state = standing
	case past != nil && past.generation == of.Generation:
		return d.refuse(capacity.Min(d.before, past.held), past.why)
	case Covers(d.before, want):
		if d.held = want; of.Spec.Releasing || !Covers(want, d.before) {
			d.state = reduced
		}
	default:
		if d.why = j.refuse(of, want); d.why != nil {
			d.state = refused // as long as it does not fit
			return d
		}
		d.held = want
	}
	return d
}

// refuse explains why the wanted capacity cannot be held, nil if it can.
func (j *judge) refuse(of *broker.ProviderInstruction, want broker.HeldCapacity) *capacity.Rejection {
	if rejection := capacity.Admit(j.Lending, j.Consumer, want.PodSets); rejection != nil {
		return rejection
	}
	if j.packer != nil {
		// Nothing of it is held: it is placed beside what is in place.
		if before := j.held[of.UID]; before.Empty() {
			if place(j.packer, want) == nil {
				return nil
			}
		}
	}
	missing, promised := j.unused(of, want)
	packer := reserved(j.Nodes(), promised)
	if rejection := place(packer, missing); rejection != nil {
		j.packer = nil
		return rejection
	}
	j.packer = packer
	return nil
}

// unused is the part of the wanted capacity that no guest uses yet (missing), and
// that of all other promises.
func (j *judge) unused(of *broker.ProviderInstruction, want broker.HeldCapacity) (missing broker.HeldCapacity, promised []broker.HeldCapacity) {
	byConsumer := map[string][]charge.Promise{}
	for _, other := range j.Instructions {
		if other.UID != of.UID {
			byConsumer[other.Spec.RequesterClusterID] = append(byConsumer[other.Spec.RequesterClusterID], charge.PromiseOf(other, j.held[other.UID]))
		}
	}
	// Last, so that guests of none count for the consumer's other promises first, and as
	// much as possible of this one must fit.
	byConsumer[j.Consumer] = append(byConsumer[j.Consumer], charge.PromiseOf(of, want))
	guests := j.Nodes().Guests
	for _, consumer := range slices.Sorted(maps.Keys(byConsumer)) {
		unused := charge.Unused(byConsumer[consumer], guests[consumer].Placed)
		if consumer == j.Consumer {
			missing, unused = unused[len(unused)-1], unused[:len(unused)-1]
		}
		promised = append(promised, unused...)
	}
	return missing, promised
}

// wanted is the capacity that an instruction wants held.
func wanted(of *broker.ProviderInstruction) broker.HeldCapacity {
	if of.Spec.Releasing {
		return broker.HeldCapacity{}
	}
	return broker.HeldCapacity{Totals: of.Spec.RequestedResources, PodSets: of.Spec.PodSets}
}

// Grant is the amount that lets a consumer use all that is held, and nothing of what the
// scheduler has yet to prove: it may be refused.
func Grant(decisions []Decision) (total corev1.ResourceList, pods int32) {
	total = corev1.ResourceList{}
	for _, d := range decisions {
		held := d.held
		if d.waits() && !d.granting {
			held = d.accepted()
		}
		broker.AddTo(total, held.Totals.List())
		switch {
		case len(held.PodSets) > 0:
			pods += held.Pods()
		case !held.Empty():
			pods += peering.DefaultPodsOfTotal
		}
	}
	return total, pods
}
