package reservation

import (
	"context"
	"fmt"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/spillway-dev/spillway/agent/internal/transport"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// ackRecorder is a broker that only takes acks.
type ackRecorder struct {
	Broker
	acks []protocol.RequesterAck
}

func (b *ackRecorder) AckRequester(_ context.Context, _ string, ack protocol.RequesterAck) error {
	b.acks = append(b.acks, ack)
	return nil
}

// TestAcksOfHub: the broker keeps no virtual node for an allocation that its provider has not
// accepted. Until it has, there is nothing to report, however long it takes.
func TestAcksOfHub(t *testing.T) {
	in := broker.ReservationInstruction{Spec: broker.ReservationInstructionSpec{TargetClusterID: "paris", Attempt: 7}}
	in.Status.ObservedAttempt = 7
	meta.SetStatusCondition(&in.Status.Conditions, metav1.Condition{Type: broker.ConditionVirtualNodeReady, Status: metav1.ConditionTrue, Reason: "Ready"})
	acks := &ackRecorder{}
	r := &Reconciler{Options: Options{Broker: acks}, reportedUse: map[string]time.Time{}}
	view := &protocol.ConsumerView{ID: "for-rome", UID: "hub", Status: broker.ReservationStatus{
		Attempt: broker.Attempt{Number: 8}, Allocations: []broker.Allocation{{Cluster: "paris"}},
	}}
	now := time.Unix(10000, 0)
	expectAcks := func(what string, want ...string) {
		t.Helper()
		acks.acks = nil
		for range 3 {
			result, err := r.acknowledgeFromHub(t.Context(), view, []broker.ReservationInstruction{in}, now)
			expect.NoError(t, err)
			now = now.Add(max(result.RequeueAfter, time.Second))
			if len(acks.acks) > 0 {
				// The broker shows what it has taken.
				view.Status.Allocations[0].VirtualNodeReady = view.Status.Allocations[0].Accepted
			}
		}
		var got []string
		for _, ack := range acks.acks {
			got = append(got, fmt.Sprint(ack.Attempt, ack.Ready))
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s: acks %v, want %v", what, got, want)
		}
	}
	expectAcks("not accepted")
	view.Status.Allocations[0].Accepted = true
	expectAcks("accepted", "8 [paris]")
	// As after a fail-over to a broker that has lost it.
	view.Status.Allocations[0].VirtualNodeReady = false
	now = now.Add(transport.ResendAfter)
	expectAcks("lost", "8 [paris]")

	// What no pod can use is reported for as long as the broker shows it.
	meta.SetStatusCondition(&in.Status.Conditions, metav1.Condition{Type: broker.ConditionVirtualNodeReady, Status: metav1.ConditionFalse, Reason: "NamespaceRejected"})
	meta.SetStatusCondition(&in.Status.Conditions, metav1.Condition{Type: broker.ConditionUnusable, Status: metav1.ConditionTrue, Reason: "NamespaceRejected", Message: "its name is taken"})
	acks.acks = nil
	for range 3 {
		result, err := r.acknowledgeFromHub(t.Context(), view, []broker.ReservationInstruction{in}, now)
		expect.NoError(t, err)
		if result.RequeueAfter <= 0 || result.RequeueAfter > transport.ResendAfter {
			t.Errorf("it is reported again after %s", result.RequeueAfter)
		}
		now = now.Add(result.RequeueAfter)
	}
	if len(acks.acks) != 3 || acks.acks[2].Unusable["paris"] != "its name is taken" || len(acks.acks[2].Ready) > 0 {
		t.Errorf("acks %+v", acks.acks)
	}
}
