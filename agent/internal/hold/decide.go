package hold

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/spillway-dev/spillway/agent/internal/hold/usage"
	"github.com/spillway-dev/spillway/agent/internal/instruction"
	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/placeholder"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// input is what the instructions of one consumer are decided on.
type input struct {
	consumer string
	// instructions of all consumers.
	instructions []*broker.ProviderInstruction
	lending      broker.Lending
	// before is what was held, by the instruction's UID, where its status shows a
	// larger hold that is being decided on.
	before map[types.UID]broker.HeldCapacity
	// lost is what no longer fits of holds, and refused what was refused and is not in the
	// status yet, by the instruction's UID.
	lost    map[types.UID]loss
	refused map[types.UID]refusal
	// observed are nodes and pods, and nodes returns what the nodes have free and what uses them.
	observed Observed
	nodes    func() nodes
}

// nodes are the observed nodes and pods.
type nodes struct {
	slots  []capacity.Slot
	guests map[string]inventory.Guests
	// pending are the cluster's own pods that wait for a node.
	pending []broker.PodSet
}

func (in input) hasInstruction() bool {
	return slices.ContainsFunc(in.instructions, func(i *broker.ProviderInstruction) bool { return i.Spec.RequesterClusterID == in.consumer })
}

// decision on one instruction.
type decision struct {
	instruction *broker.ProviderInstruction
	// held is the capacity to hold from now on, before what was held.
	held, before broker.HeldCapacity
	// refused explains why the wanted capacity is not held; nil if it is.
	refused *capacity.Rejection
	// smaller is set if less is held than before.
	smaller bool
	// settled is set if the status shows the decision already.
	settled bool
	// proof is what the placeholders prove, and proofTakes since when they do not; with
	// accounted there are none.
	proof        placeholder.Verdict
	proofMessage string
	proofTakes   time.Duration
	accounted    bool
	// untried is why its guests cannot be tried yet, and granting is set if that is because
	// the grant is to come first.
	untried  string
	granting bool
}

// proving reports whether the decision waits for the scheduler, or to try its guests.
func (d decision) proving() bool {
	return d.undecided() && (!d.accounted && d.proof == placeholder.Waiting || d.untried != "")
}

// undecided reports whether it is open whether what is wanted can be held.
func (d decision) undecided() bool { return !d.settled && !d.smaller && d.refused == nil }

// accepted is what was held before all that is not decided yet. It is in the status, so that
// an agent that restarts meanwhile knows it.
func (d decision) accepted() broker.HeldCapacity {
	if before := d.instruction.Status.Accepted; before != nil {
		return *before
	}
	return d.before
}

// fallBack is what a decision holds once it is refused: what was accepted or, if no more was
// to be held, what remains of it.
func (d decision) fallBack(remains broker.HeldCapacity) broker.HeldCapacity {
	if d.instruction.Status.Accepted != nil {
		return d.accepted()
	}
	return capacity.Min(d.before, remains)
}

// withdrawn reports whether this cluster gives up a part of what it had accepted.
func (d decision) withdrawn() bool { return d.refused != nil && !Covers(d.held, d.accepted()) }

// grows reports whether more is to be held than before.
func (d decision) grows() bool {
	return !d.settled && !d.smaller && d.refused == nil && !Covers(d.before, d.held)
}

// refusal is a verdict about an instruction, and what is held after it.
type refusal struct {
	generation int64
	held       broker.HeldCapacity
	why        *capacity.Rejection
}

// heldBy returns the capacity that an instruction holds so far, nil for none.
var heldBy = instruction.Held

// settled reports whether an instruction's status is the decision about what it says
// now: about this attempt and this content.
func settled(in *broker.ProviderInstruction) bool {
	_, decided := instruction.Decision(in)
	return decided
}

// decide decides on each instruction of the consumer that is not settled. What is
// wanted beyond what is held already must fit the nodes, besides all that is promised
// to any consumer and not used yet. A refusal stands until the broker makes another
// attempt.
func decide(in input) []decision {
	held := map[types.UID]broker.HeldCapacity{}
	var own []*broker.ProviderInstruction
	for _, instruction := range in.instructions {
		if old := in.heldBefore(instruction); old != nil {
			held[instruction.UID] = *old
		}
		if instruction.Spec.RequesterClusterID == in.consumer {
			own = append(own, instruction)
		}
	}
	sortByAge(own)
	var decisions []decision
	judge := judge{input: in, held: held}
	for _, instruction := range own {
		d := decision{instruction: instruction, before: held[instruction.UID]}
		d.held = d.before
		want := wanted(instruction)
		lost, isLost := in.lost[instruction.UID]
		refused, isRefused := in.refused[instruction.UID]
		switch {
		case isLost && settled(instruction):
			d.held = capacity.Min(d.before, lost.held)
			d.refused = &capacity.Rejection{Reason: ReasonCapacityLost, Message: lost.why}
		case settled(instruction):
			d.settled = true
		case isRefused && refused.generation == instruction.Generation:
			d.held, d.refused = capacity.Min(d.before, refused.held), refused.why
		case Covers(d.before, want):
			d.held, d.smaller = want, !Covers(want, d.before) || instruction.Spec.Releasing
		default:
			if d.refused = judge.refuse(instruction, want); d.refused == nil {
				d.held = want
			}
		}
		held[instruction.UID] = d.held
		decisions = append(decisions, d)
	}
	return decisions
}

func sortByAge(instructions []*broker.ProviderInstruction) {
	slices.SortFunc(instructions, func(a, b *broker.ProviderInstruction) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
}

func (in input) heldBefore(instruction *broker.ProviderInstruction) *broker.HeldCapacity {
	if before, ok := in.before[instruction.UID]; ok {
		return &before
	}
	return heldBy(instruction)
}

// judge decides whether more capacity can be held, for one instruction after the
// other. What it has accepted counts as held.
type judge struct {
	input
	held map[types.UID]broker.HeldCapacity
	// packer has the nodes with all that is promised in place; nil until it is needed,
	// and after a refusal.
	packer *capacity.Packer
}

// refuse explains why the wanted capacity cannot be held, nil if it can.
func (j *judge) refuse(instruction *broker.ProviderInstruction, want broker.HeldCapacity) *capacity.Rejection {
	if rejection := capacity.Admit(j.lending, j.consumer, want.PodSets); rejection != nil {
		return rejection
	}
	if j.packer != nil {
		// Nothing of it is held: it is placed beside what is in place.
		if before := j.held[instruction.UID]; before.Empty() {
			if place(j.packer, want) == nil {
				return nil
			}
		}
	}
	missing, promised := j.unused(instruction, want)
	packer := reserved(j.nodes(), promised)
	if rejection := place(packer, missing); rejection != nil {
		j.packer = nil
		return rejection
	}
	j.packer = packer
	return nil
}

// unused is the part of the wanted capacity that no guest uses yet (missing), and
// that of all other promises.
func (j *judge) unused(instruction *broker.ProviderInstruction, want broker.HeldCapacity) (missing broker.HeldCapacity, promised []broker.HeldCapacity) {
	byConsumer := map[string][]usage.Promise{}
	for _, other := range j.instructions {
		if other.UID != instruction.UID {
			byConsumer[other.Spec.RequesterClusterID] = append(byConsumer[other.Spec.RequesterClusterID], usage.PromiseOf(other, j.held[other.UID]))
		}
	}
	// Last, so that guests of none count for the consumer's other promises first, and as
	// much as possible of this one must fit.
	byConsumer[j.consumer] = append(byConsumer[j.consumer], usage.PromiseOf(instruction, want))
	guests := j.nodes().guests
	for _, consumer := range slices.Sorted(maps.Keys(byConsumer)) {
		unused := usage.Unused(byConsumer[consumer], guests[consumer].Placed)
		if consumer == j.consumer {
			missing, unused = unused[len(unused)-1], unused[:len(unused)-1]
		}
		promised = append(promised, unused...)
	}
	return missing, promised
}

// wanted is the capacity that an instruction wants held.
func wanted(instruction *broker.ProviderInstruction) broker.HeldCapacity {
	if instruction.Spec.Releasing {
		return broker.HeldCapacity{}
	}
	return broker.HeldCapacity{Totals: instruction.Spec.RequestedResources, PodSets: instruction.Spec.PodSets}
}

// grant is the amount that lets a consumer use all that is held, and nothing of what the
// scheduler has yet to prove: it may be refused.
func grant(decisions []decision) (total corev1.ResourceList, pods int32) {
	total = corev1.ResourceList{}
	for _, d := range decisions {
		held := d.held
		if d.proving() && !d.granting {
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

// within reports whether guests use no more than an amount, and what they use.
func within(guests inventory.Guests, total corev1.ResourceList, pods int32) (using string, ok bool) {
	var used corev1.ResourceList
	for _, requests := range guests.Active {
		used = broker.AddTo(used, requests)
	}
	using = fmt.Sprintf("%d pods with %s", len(guests.Active), broker.FromList(used))
	return using, len(guests.Active) <= int(pods) && usage.Covers(total, used)
}
