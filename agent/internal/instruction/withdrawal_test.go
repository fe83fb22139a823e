package instruction

import (
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// testWithdrawal follows the instruction of a grant of which the provider withdraws a part,
// then all.
func testWithdrawal(f fixture) {
	const id, name = "rome-w", "rome-w-paris"
	withdrawal := func(attempt int64, within time.Duration) []broker.Withdrawal {
		return []broker.Withdrawal{{Cluster: "paris", Attempt: attempt, LeaveWithin: metav1.Duration{Duration: within}}}
	}
	f.broker.Update(id, func(v *protocol.ConsumerView) {
		v.SourceNamespace, v.SourceName, v.PeerKeys = "shop", "web", map[string]string{"paris": "key"}
		v.Status.Attempt.Number, v.Status.Allocations = 1, []broker.Allocation{allocation("paris", 5, true)}
	})
	in := &broker.ReservationInstruction{}
	expectGrant := func(what string, pods int32, attempt int64, by time.Time) {
		f.Helper()
		get(f, in, name, what, func(in *broker.ReservationInstruction) error {
			w := ptr.Deref(in.Spec.Withdrawal, broker.GrantWithdrawal{})
			if held := (broker.HeldCapacity{PodSets: in.Spec.PodSets}); held.Pods() != pods || w.Attempt != attempt || attempt > 0 && !w.LeaveBy.Time.Equal(by.Truncate(time.Second)) || in.Spec.PeerKey != "key" {
				return fmt.Errorf("have %+v", in.Spec)
			}
			return nil
		})
	}
	expectGrant("the grant", 5, 0, time.Time{})

	first := f.clock.Now().Add(10 * time.Minute)
	f.broker.Update(id, func(v *protocol.ConsumerView) {
		v.Status.Attempt.Number, v.Status.Allocations = 2, []broker.Allocation{allocation("paris", 3, true)}
		v.Status.Withdrawals = withdrawal(1, 10*time.Minute)
	})
	expectGrant("what remains, and by when the rest must go", 3, 1, first)
	// The same withdrawal again, as another broker repeats it, starts no other time.
	f.clock.Step(time.Minute)
	f.broker.Update(id, func(v *protocol.ConsumerView) {
		v.Status.Attempt.Number, v.Status.Allocations = 3, []broker.Allocation{allocation("paris", 4, true)}
	})
	expectGrant("a grant that grows again", 4, 1, first)

	// Of another one, nothing remains, and the provider is asked again at once.
	second := f.clock.Now().Add(5 * time.Minute)
	f.broker.Update(id, func(v *protocol.ConsumerView) {
		v.Status.Attempt.Number, v.Status.Allocations, v.PeerKeys = 4, []broker.Allocation{allocation("paris", 2, false)}, nil
		v.Status.Withdrawals = withdrawal(3, 5*time.Minute)
	})
	expectGrant("nothing before the provider has accepted again", 0, 3, second)
	f.broker.Update(id, func(v *protocol.ConsumerView) { v.Status.Attempt.Number, v.Status.Allocations = 5, nil })
	expectGrant("an instruction for nothing", 0, 3, second)
	// It stays until its pods have left, also if the provider has confirmed the release.
	f.broker.Update(id, func(v *protocol.ConsumerView) {
		v.Status.Withdrawals, v.Status.Allocations = nil, []broker.Allocation{allocation("berlin", 5, true)}
	})
	get(f, &broker.ReservationInstruction{}, "rome-w-berlin", "the last event to be observed", func(*broker.ReservationInstruction) error { return nil })
	expectGrant("the instruction for nothing", 0, 3, second)
	f.eventually("the status to say that the pods have left", func() error {
		if err := f.c.Get(f.Context(), client.ObjectKeyFromObject(in), in); err != nil {
			return err
		}
		in.Status.LeftAttempt = 3
		return f.c.Status().Update(f.Context(), in)
	})
	f.deleted(in, name, "deletion once the pods have left")
	f.broker.Remove(id)
	f.deleted(in, "rome-w-berlin", "deletion with the reservation")
}

// testLeaveWithin: an ack that withdraws says what is left of the time; one that refuses
// nothing that was accepted, or accepts, says nothing of it.
func testLeaveWithin(f fixture) {
	const name = "oslo-w"
	f.broker.UpdateHold(name, func(v *protocol.ProviderView) {
		v.Requester, v.Hold = "oslo", broker.Hold{Attempt: 1, Promised: pods(5)}
	})
	get(f, &broker.ProviderInstruction{}, name, "instruction for a hold", func(*broker.ProviderInstruction) error { return nil })
	f.decide(name, true, metav1.ConditionTrue, "Accepted", "yes")
	f.acknowledged(name, protocol.ProviderAck{Attempt: 1, Accepted: true, Message: "yes"})
	f.broker.UpdateHold(name, func(v *protocol.ProviderView) { v.Hold.AcceptedAttempt = 1 })
	f.view(name, "the acknowledgement in the view", func(v protocol.ProviderView) bool { return v.Hold.AcceptedAttempt == 1 })

	three := pods(3)
	for _, step := range []struct {
		by   time.Duration
		want time.Duration
	}{{10 * time.Minute, 10 * time.Minute}, {-time.Hour, 0}} {
		before := len(f.broker.Calls("AckProvider", name))
		f.eventually("the withdrawal", func() error {
			in := &broker.ProviderInstruction{}
			if err := f.c.Get(f.Context(), types.NamespacedName{Namespace: "default", Name: name}, in); err != nil {
				return err
			}
			in.Status.Enforced, in.Status.Held, in.Status.LeaveBy = false, &three, &metav1.Time{Time: f.clock.Now().Add(step.by)}
			in.Status.Conditions[0].Status, in.Status.Conditions[0].Reason, in.Status.Conditions[0].Message = metav1.ConditionFalse, "CapacityLost", step.by.String()
			return f.c.Status().Update(f.Context(), in)
		})
		f.eventually("its acknowledgement", func() error {
			calls := f.broker.Calls("AckProvider", name)
			if len(calls) <= before {
				return fmt.Errorf("%d acknowledgements", len(calls))
			}
			ack := calls[len(calls)-1].Argument.(protocol.ProviderAck)
			// The API server keeps whole seconds.
			if ack.Accepted || ack.Held.Pods() != 3 || ack.LeaveWithin == nil || (ack.LeaveWithin.Duration-step.want).Abs() > time.Second {
				return fmt.Errorf("acknowledged %+v", ack)
			}
			return nil
		})
	}
}
