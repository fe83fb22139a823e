package hold

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestNoLossWithoutChange accepts one hold after the other, and then judges them while
// the nodes are the same. No packing order finds a place for all of them but that in
// which the last one was accepted.
func TestNoLossWithoutChange(t *testing.T) {
	slots := func(cpu string) (list []capacity.Slot) {
		for _, name := range []string{"a", "b"} {
			list = append(list, capacity.Slot{Class: &broker.NodeClass{Name: "class-1"}, Node: name, Nodes: 1, Free: capacity.Floor(expect.Resources("cpu", cpu)), Pods: 10})
		}
		return list
	}
	var instructions []*broker.ProviderInstruction
	judge := func(cpu string) map[types.UID]loss {
		return losses(input{instructions: instructions, nodes: func() nodes { return nodes{slots: slots(cpu)} }})
	}
	for i, cpu := range []string{"3", "3", "3", "5", "2", "4"} {
		held := capacity.OfPodSets([]broker.PodSet{{Name: "web", Count: 1, Requests: broker.FromList(expect.Resources("cpu", cpu))}})
		name := string(rune('a' + i))
		in := &broker.ProviderInstruction{
			ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name), Generation: 1, CreationTimestamp: metav1.Unix(int64(i), 0)},
			Spec:       broker.ProviderInstructionSpec{RequesterClusterID: "rome", PodSets: held.PodSets, RequestedResources: held.Totals, Attempt: 1},
			Status:     broker.ProviderInstructionStatus{Held: &held, Enforced: true, ObservedAttempt: 1, ObservedGeneration: 1},
		}
		in.Status.Conditions = []metav1.Condition{{Type: broker.ConditionEnforced, Status: metav1.ConditionTrue, Reason: ReasonAccepted, ObservedGeneration: 1}}
		instructions = append(instructions, in)
		if lost := judge("10"); len(lost) > 0 {
			t.Errorf("with %d holds, %v are lost though the nodes are the same", len(instructions), lost)
		}
	}
	if lost := judge("8"); len(lost) == 0 {
		t.Error("nothing is lost though the nodes have 16 CPUs for 20")
	}
}
