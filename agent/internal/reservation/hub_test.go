package reservation_test

import (
	"fmt"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestFromHub: a Reservation that was created in the hub becomes an instruction; its
// virtual node and its use are reported; when it ends, the instruction stays until no pod
// uses it. It is not taken for one that was deleted here.
func TestFromHub(t *testing.T) {
	f := start(t)
	total := broker.FromList(expect.Resources("cpu", "4", "memory", "8Gi"))
	f.broker.Update("for-rome", func(v *protocol.ConsumerView) {
		v.UID = "hub"
		v.Spec = broker.ReservationSpec{RequesterID: "rome", RequestedResources: &total, Namespaces: []string{"shop"},
			PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"tier": "batch"}}}
		v.Status = broker.ReservationStatus{Attempt: broker.Attempt{Number: 1}, Allocations: []broker.Allocation{{Cluster: "paris", Resources: total, Accepted: true}}}
	})
	in := &broker.ReservationInstruction{ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: "for-rome-paris"}}
	read := func() error { return f.c.Get(f.Context(), client.ObjectKeyFromObject(in), in) }
	f.eventually("the instruction", read)
	if !in.Spec.FromHub() || !slices.Equal(in.Spec.Namespaces, []string{"shop"}) || in.Spec.PodSelector == nil || in.Spec.RequestedResources.CPU.String() != "4" {
		t.Errorf("the instruction is %+v", in.Spec)
	}

	// setStatus writes what the controller of the virtual node does.
	setStatus := func(condition string, pods ...string) {
		t.Helper()
		f.eventually("the status to be written", func() error {
			if err := read(); err != nil {
				return err
			}
			in.Status.ObservedAttempt = in.Spec.Attempt
			in.Status.Used = &broker.Use{Count: int32(len(pods)), Pods: pods, Resources: broker.FromList(expect.Resources("cpu", fmt.Sprint(len(pods))))}
			meta.SetStatusCondition(&in.Status.Conditions, metav1.Condition{Type: condition, Status: metav1.ConditionTrue, Reason: "Done"})
			return f.c.Status().Update(f.Context(), in)
		})
	}
	acked := func(ready []string, used string) func() error {
		return func() error {
			calls := f.broker.Calls("AckRequester", "for-rome")
			if len(calls) == 0 {
				return fmt.Errorf("no call")
			}
			ack := calls[len(calls)-1].Argument.(protocol.RequesterAck)
			if ack.ReservationUID != "hub" || ack.Attempt != 1 || !slices.Equal(ack.Ready, ready) || ack.Used == nil || ack.Used.Summary != used {
				return fmt.Errorf("got %+v %+v", ack, ack.Used)
			}
			return nil
		}
	}
	setStatus(broker.ConditionVirtualNodeReady)
	f.eventually("the node to be reported", acked([]string{"paris"}, "0 pods, cpu 0 of 4, memory 0 of 8Gi"))
	setStatus(broker.ConditionVirtualNodeReady, "shop/a")
	f.eventually("its use to be reported", acked([]string{"paris"}, "1 pod, cpu 1 of 4, memory 0 of 8Gi"))

	f.broker.Update("for-rome", func(v *protocol.ConsumerView) {
		v.Status.Allocations, v.Status.Phase, v.Status.Used = nil, broker.ReservationReleased, in.Status.Used
	})
	f.eventually("the instruction to be released", func() error {
		if err := read(); err != nil || !in.Spec.Releasing {
			return fmt.Errorf("%+v %w", in.Spec, err)
		}
		return nil
	})
	setStatus(broker.ConditionRequesterReleased)
	f.eventually("the end of its use to be reported", acked(nil, "0 pods, cpu 0 of 4, memory 0 of 8Gi"))
	f.eventually("the instruction to be deleted", func() error {
		if err := read(); client.IgnoreNotFound(err) != nil || err == nil {
			return fmt.Errorf("it is there: %w", err)
		}
		return nil
	})
	if calls := f.broker.Calls("DeleteReservation", ""); len(calls) > 0 {
		t.Errorf("the agent has deleted a Reservation of the hub: %v", calls)
	}
}
