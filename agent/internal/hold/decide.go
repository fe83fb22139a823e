package hold

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/spillway-dev/spillway/agent/internal/instruction"
	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/peering"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// input is what the instructions of one consumer are decided on.
type input struct {
	consumer string
	// instructions of all consumers.
	instructions []broker.ProviderInstruction
	lending      broker.Lending
	// slots returns what the nodes have free.
	slots  func() []capacity.Slot
	guests map[string]guestSet
}

func (in input) hasInstruction() bool {
	return slices.ContainsFunc(in.instructions, func(i broker.ProviderInstruction) bool { return i.Spec.RequesterClusterID == in.consumer })
}

// decision on one instruction.
type decision struct {
	instruction *broker.ProviderInstruction
	// held is the capacity to hold from now on.
	held broker.HeldCapacity
	// refused explains why the wanted capacity is not held; nil if it is.
	refused *capacity.Rejection
	// smaller is set if less is held than before.
	smaller bool
}

// heldBy returns the capacity that an instruction holds so far, nil for none.
var heldBy = instruction.Held

// decide decides on each instruction of the consumer. What is wanted beyond what is
// held already must fit the nodes, besides all that is promised to any consumer and
// not used yet. A refusal stands until the broker makes another attempt.
func decide(in input) []decision {
	held := map[types.UID]broker.HeldCapacity{}
	var own []*broker.ProviderInstruction
	for i := range in.instructions {
		instruction := &in.instructions[i]
		if old := heldBy(instruction); old != nil {
			held[instruction.UID] = *old
		}
		if instruction.Spec.RequesterClusterID == in.consumer {
			own = append(own, instruction)
		}
	}
	slices.SortFunc(own, func(a, b *broker.ProviderInstruction) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	var decisions []decision
	for _, instruction := range own {
		have, want := held[instruction.UID], wanted(instruction)
		d := decision{instruction: instruction, held: have}
		if Covers(have, want) {
			d.held, d.smaller = want, !Covers(want, have) || instruction.Spec.Releasing
		} else if d.refused = in.refuse(instruction, want, held); d.refused == nil {
			d.held = want
		}
		held[instruction.UID] = d.held
		decisions = append(decisions, d)
	}
	return decisions
}

// refuse explains why the wanted capacity cannot be held, nil if it can.
func (in input) refuse(instruction *broker.ProviderInstruction, want broker.HeldCapacity, held map[types.UID]broker.HeldCapacity) *capacity.Rejection {
	previous := meta.FindStatusCondition(instruction.Status.Conditions, broker.ConditionEnforced)
	if instruction.Status.ObservedAttempt == instruction.Spec.Attempt && previous != nil && previous.Status == metav1.ConditionFalse {
		return &capacity.Rejection{Reason: previous.Reason, Message: previous.Message}
	}
	if rejection := capacity.Admit(in.lending, in.consumer); rejection != nil {
		return rejection
	}
	missing, promised := in.unused(instruction, want, held)
	return Fit(in.slots(), promised, missing)
}

// unused is the part of the wanted capacity that no guest uses yet (missing), and
// that of all other promises.
func (in input) unused(instruction *broker.ProviderInstruction, want broker.HeldCapacity, held map[types.UID]broker.HeldCapacity) (missing broker.HeldCapacity, promised []broker.HeldCapacity) {
	byConsumer := map[string][]broker.HeldCapacity{}
	for i := range in.instructions {
		if other := &in.instructions[i]; other.UID != instruction.UID {
			byConsumer[other.Spec.RequesterClusterID] = append(byConsumer[other.Spec.RequesterClusterID], held[other.UID])
		}
	}
	// Last, so that guests count for the consumer's other promises first, and as
	// much as possible of this one must fit.
	byConsumer[in.consumer] = append(byConsumer[in.consumer], want)
	for _, consumer := range slices.Sorted(maps.Keys(byConsumer)) {
		unused := Unused(byConsumer[consumer], in.guests[consumer].bound)
		if consumer == in.consumer {
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

// grant is the amount that lets a consumer use all that is held.
func grant(decisions []decision) (total corev1.ResourceList, pods int32) {
	total = corev1.ResourceList{}
	for _, d := range decisions {
		broker.AddTo(total, d.held.Totals.List())
		switch {
		case len(d.held.PodSets) > 0:
			pods += d.held.Pods()
		case !d.held.Empty():
			pods += peering.DefaultPodsOfTotal
		}
	}
	return total, pods
}

// guestSet is the requests of one consumer's guests that have not finished.
type guestSet struct {
	// bound are the guests on a node, active those and the pending ones.
	bound, active []corev1.ResourceList
}

func guestsByConsumer(cluster *inventory.Cluster) map[string]guestSet {
	out := map[string]guestSet{}
	for _, pod := range cluster.Pods {
		consumer, ok := cluster.GuestOf(pod)
		if !ok || inventory.Finished(pod) {
			continue
		}
		set, requests := out[consumer], inventory.Requests(pod)
		set.active = append(set.active, requests)
		if pod.Spec.NodeName != "" {
			set.bound = append(set.bound, requests)
		}
		out[consumer] = set
	}
	return out
}

// within reports whether the guests use no more than an amount, and what they use.
func (g guestSet) within(total corev1.ResourceList, pods int32) (using string, ok bool) {
	var used corev1.ResourceList
	for _, requests := range g.active {
		used = broker.AddTo(used, requests)
	}
	using = fmt.Sprintf("%d pods with %s", len(g.active), broker.FromList(used))
	return using, len(g.active) <= int(pods) && covers(total, used)
}
