package verdict_test

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/spillway-dev/spillway/agent/internal/hold/verdict"
	"github.com/spillway-dev/spillway/agent/internal/placeholder"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestNoLossWithoutChange accepts one hold after the other, and then judges them while
// the nodes are the same. No packing order finds a place for all of them but that in
// which the last one was accepted.
func TestNoLossWithoutChange(t *testing.T) {
	two := func(cpu string) []capacity.Slot {
		return []capacity.Slot{slot("a", expect.Resources("cpu", cpu)), slot("b", expect.Resources("cpu", cpu))}
	}
	p := newProvider(two("10"))
	for i, cpu := range []string{"3", "3", "3", "5", "2", "4"} {
		p.add(standing(string(rune('a'+i)), onePod(cpu)))
		if lost := verdict.Losses(p.input()); len(lost) > 0 {
			t.Errorf("with %d holds, %v are lost though the nodes are the same", len(p.all), lost)
		}
	}
	p.nodes.Slots = two("8")
	if lost := verdict.Losses(p.input()); len(lost) == 0 {
		t.Error("nothing is lost though the nodes have 16 CPUs for 20")
	}
}

// Of a divisible total, what the nodes have is kept.
func TestPartOfATotal(t *testing.T) {
	nodes := []capacity.Slot{
		slot("a", expect.Resources("cpu", "1100m", "memory", "1Gi", "nvidia.com/gpu", "1")),
		slot("b", expect.Resources("cpu", "1100m", "memory", "1Gi")),
		slot("tainted", expect.Resources("cpu", "8", "memory", "8Gi"), taint("gpu")),
	}
	for want, amounts := range map[string]corev1.ResourceList{
		"cpu 2200m, memory 1Gi, nvidia.com/gpu 1": expect.Resources("cpu", "3", "memory", "1Gi", "nvidia.com/gpu", "3"),
		"memory 2Gi": expect.Resources("memory", "3Gi"),
		"nothing":    expect.Resources("memory", "3Gi", "example.com/fpga", "1"),
		"cpu 100m":   expect.Resources("cpu", "100m"),
	} {
		p := newProvider(nodes)
		p.add(standing("r1", total(amounts)))
		p.memory.Lose(verdict.Losses(p.input()))
		if got := p.chain()[0].Promise().Held; got.Totals.String() != want {
			t.Errorf("of %s, %s is kept, want %s", broker.FromList(amounts), got.Totals, want)
		}
	}
}

// What is lost is given up once, and not again when its status says so.
func TestLossIsWritten(t *testing.T) {
	p := cpus("10")
	p.add(standing("r1", somePods(4)))
	p.nodes.Slots = []capacity.Slot{slot("a", expect.Resources("cpu", "3"))}
	p.memory.Lose(verdict.Losses(p.input()))
	for _, want := range []string{"3 pods, CapacityLost", "3 pods, its status stays"} {
		decisions := p.chain()
		if got := outcome(p, decisions, "r1"); len(got) < len(want) || got[:len(want)] != want {
			t.Errorf("got %q, want %q", got, want)
		}
		for name, status := range p.statuses(decisions) {
			if status.LeaveBy == nil || name != "r1" {
				t.Errorf("guests have no time to leave: %+v", status)
			}
			p.all[0].Status = status
			p.memory.Written(p.all[0], p.now)
		}
	}
}

// Condition Proven of a standing hold is written when it would be wrong for long.
func TestProofChanges(t *testing.T) {
	for _, tc := range []struct {
		what   string
		proven metav1.ConditionStatus
		state  placeholder.State
		since  time.Duration
		want   bool
	}{
		{"proven, as it says", metav1.ConditionTrue, placeholder.State{}, 0, false},
		{"proven later", metav1.ConditionFalse, placeholder.State{}, 0, true},
		{"a guest has just come", metav1.ConditionTrue, untried(1, somePods(2)), time.Second, false},
		{"a place is missing for long", metav1.ConditionTrue, untried(1, somePods(2)), 3 * time.Second, true},
		{"still missing, as it says", metav1.ConditionFalse, untried(1, somePods(2)), 3 * time.Second, false},
	} {
		p := cpus("10")
		p.add(standing("r1", somePods(2)))
		p.all[0].Status.Conditions[1].Status = tc.proven
		p.states["r1"] = tc.state
		p.chain()
		p.now = start.Add(tc.since)
		if got := len(p.statuses(p.chain())) > 0; got != tc.want {
			t.Errorf("%s: %t", tc.what, got)
		}
	}
}
