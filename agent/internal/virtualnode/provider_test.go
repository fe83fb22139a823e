package virtualnode

import (
	"errors"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// A pod waits in vain from when the provider has stopped starting others, at most
// turnsMost times as long as one for which nothing happens at all.
func TestInTurn(t *testing.T) {
	since := time.Unix(1000, 0)
	for name, tc := range map[string]struct{ lately, want time.Duration }{
		"nothing ever started":   {-1000 * time.Second, 0},
		"others started before":  {-time.Second, 0},
		"others have started":    {30 * time.Second, 30 * time.Second},
		"others start all along": {time.Hour, (turnsMost - 1) * time.Minute},
	} {
		if got := inTurn(since, since.Add(tc.lately), time.Minute).Sub(since); got != tc.want {
			t.Errorf("%s: %s later, want %s", name, got, tc.want)
		}
	}
}

// What a virtual node carries for an instruction is said until it carries what the
// instruction says now, and not once the node is gone or the grant ends.
func TestReportCarried(t *testing.T) {
	pods := func(n int32) broker.HeldCapacity {
		return broker.HeldCapacity{PodSets: []broker.PodSet{{Name: "pods", Count: n}}}
	}
	ready := &corev1.Node{Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}}}
	done, waits := peering.Done("Done", ""), peering.Waiting("Growing", "the node grows")
	for name, tc := range map[string]struct {
		node   *corev1.Node
		ending bool
		o      outcome
		want   int32
	}{
		"carries it all":                {node: ready, o: outcome{peered: done, node: done}, want: 5},
		"grows":                         {node: ready, o: outcome{peered: done, node: waits}, want: 2},
		"a step failed":                 {node: ready, o: outcome{peered: done, node: waits, err: errors.New("no")}, want: 2},
		"the provider has forgotten it": {node: ready, o: outcome{peered: done, node: peering.Waiting(peering.ReasonGrantPending, ""), overdue: true}},
		"the node is gone":              {o: outcome{peered: waits, node: waits}},
		"the node is not ready":         {node: &corev1.Node{}, o: outcome{peered: done, node: waits}},
		"the reservation is not":        {node: ready, ending: true, o: outcome{peered: done, node: waits}},
	} {
		t.Run(name, func(t *testing.T) {
			in := &broker.ReservationInstruction{Spec: broker.ReservationInstructionSpec{Attempt: 2, PodSets: pods(5).PodSets}}
			in.Status.Carried = ptr.To(pods(2))
			g := Grant{Instruction: in, Reservation: &broker.Reservation{}, Limit: -1}
			if tc.ending {
				g.Reservation = nil
			}
			var got int32
			if status := report(g, &scene{provider: "paris", node: tc.node}, tc.o); status.Carried != nil {
				got = status.Carried.Pods()
			}
			if got != tc.want {
				t.Errorf("carries %d pods, want %d", got, tc.want)
			}
		})
	}
}
