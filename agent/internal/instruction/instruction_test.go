package instruction

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	"github.com/google/go-cmp/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/spillway-dev/spillway/agent/internal/transport"
	"github.com/spillway-dev/spillway/agent/internal/transport/transporttest"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestMain(m *testing.M) { controlplane.Main(m) }

// fixture runs both controllers with a real API server and a broker in memory.
type fixture struct {
	*testing.T
	c      client.Client
	broker *transporttest.Broker
	clock  *clocktesting.FakeClock
	// provider is reconciled by the manager and, where time matters, by the test.
	provider *Provider
}

func start(t *testing.T) fixture {
	restConfig := controlplane.Start(t)
	scheme := runtime.NewScheme()
	expect.NoError(t, broker.AddToScheme(scheme))
	c, err := client.New(restConfig, client.Options{Scheme: scheme})
	expect.NoError(t, err)
	mgr, err := manager.New(restConfig, manager.Options{
		Scheme: scheme, Logger: testr.New(t), Metrics: server.Options{BindAddress: "0"},
		Controller: config.Controller{UsePriorityQueue: ptr.To(false)},
	})
	expect.NoError(t, err)
	b := transporttest.New("rome")
	b.Down()
	consumers, providers := transport.NewConsumerMirror(b), transport.NewProviderMirror(b)
	f := fixture{T: t, c: c, broker: b, clock: clocktesting.NewFakeClock(time.Now()), provider: NewProvider(mgr.GetClient(), "default", b, providers, clock.RealClock{})}
	f.provider.clock = f.clock
	expect.NoError(t, errors.Join(
		SetupIndex(t.Context(), mgr), mgr.Add(consumers), mgr.Add(providers),
		NewConsumer(mgr.GetClient(), "default", consumers, f.clock).SetupWithManager(mgr), f.provider.SetupWithManager(mgr),
	))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- mgr.Start(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("running the manager: %v", err)
		}
	})
	return f
}

func (f fixture) in(t *testing.T) fixture { f.T = t; return f }

func (f fixture) eventually(what string, check func() error) {
	f.Helper()
	expect.Eventually(f.T, what, func() (bool, string) {
		err := check()
		return err == nil, fmt.Sprint(err)
	})
}

// get reads an object until check returns nil.
func get[T client.Object](f fixture, object T, name, what string, check func(T) error) T {
	f.Helper()
	f.eventually(what, func() error {
		if err := f.c.Get(f.Context(), types.NamespacedName{Namespace: "default", Name: name}, object); err != nil {
			return err
		}
		return check(object)
	})
	return object
}

func (f fixture) deleted(object client.Object, name, what string) {
	f.Helper()
	f.eventually(what, func() error {
		if err := f.c.Get(f.Context(), types.NamespacedName{Namespace: "default", Name: name}, object); !apierrors.IsNotFound(err) {
			return fmt.Errorf("%s still exists: %v", name, err)
		}
		return nil
	})
}

// view waits until the provider mirror satisfies check.
func (f fixture) view(id, what string, check func(protocol.ProviderView) bool) {
	f.Helper()
	expect.Eventually(f.T, what, func() (bool, string) {
		view, _ := f.provider.mirror.Get(id)
		return check(view), fmt.Sprintf("%+v", view)
	})
}

func pods(count int32) broker.HeldCapacity {
	cpu := resource.MustParse("300m")
	one := broker.ResourceQuantities{CPU: &cpu}
	return broker.HeldCapacity{
		Totals:  broker.FromList(broker.Times(one.List(), count)),
		PodSets: []broker.PodSet{{Name: "pods", Count: count, Requests: one}},
	}
}

func allocation(cluster string, count int32, accepted bool) broker.Allocation {
	held := pods(count)
	return broker.Allocation{Cluster: cluster, Resources: held.Totals, PodSets: held.PodSets, Accepted: accepted, Endpoint: "https://" + cluster + ":6443"}
}

func TestInstructions(t *testing.T) {
	f := start(t)
	stale := &broker.ReservationInstruction{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "stale-paris"},
		Spec:       broker.ReservationInstructionSpec{ReservationName: "stale", TargetClusterID: "paris", Attempt: 1},
	}
	expect.NoError(t, f.c.Create(t.Context(), stale))
	f.broker.Update("rome-1", func(v *protocol.ConsumerView) {
		v.SourceNamespace, v.SourceName = "shop", "web"
		v.PeerKeys = map[string]string{"paris": "key"}
		v.Status.Attempt.Number = 1
		v.Status.Allocations = []broker.Allocation{allocation("paris", 2, true), allocation("berlin", 1, false)}
	})
	f.broker.UpdateHold("oslo-1", func(v *protocol.ProviderView) {
		v.Requester, v.RequesterPeerKey = "oslo", "key"
		v.Hold, v.AnswerWithin = broker.Hold{Attempt: 1, Promised: pods(2)}, &metav1.Duration{Duration: time.Minute}
	})
	t.Run("nothing is deleted before the first Relist", func(t *testing.T) {
		expect.NoError(t, f.c.Get(t.Context(), client.ObjectKeyFromObject(stale), stale))
		f.broker.Up()
		f.in(t).deleted(stale, stale.Name, "deletion of an instruction without a view")
	})
	t.Run("allocations become instructions", func(t *testing.T) { testAllocations(f.in(t)) })
	t.Run("manual changes are reverted", func(t *testing.T) { testManualChanges(f.in(t)) })
	t.Run("holds become instructions and are acknowledged", func(t *testing.T) { testHold(f.in(t)) })
	t.Run("a provider withdraws what it had granted", func(t *testing.T) { testWithdrawal(f.in(t)) })
	t.Run("what a provider withdraws is reported with the time", func(t *testing.T) { testLeaveWithin(f.in(t)) })
	t.Run("another Reservation of the same name", func(t *testing.T) { testAnotherReservation(f.in(t)) })
	// This one breaks the streams.
	t.Run("a broker that lost everything", func(t *testing.T) { testEmptyBroker(f.in(t)) })
}

func testAllocations(f fixture) {
	in := get(f, &broker.ReservationInstruction{}, "rome-1-paris", "instruction for an accepted allocation", func(in *broker.ReservationInstruction) error {
		s := in.Spec
		if s.ReservationName != "rome-1" || s.SourceNamespace != "shop" || s.SourceName != "web" || s.TargetClusterID != "paris" || s.RequestedCPU.String() != "600m" ||
			s.PodSets[0].Count != 2 || s.Endpoint != "https://paris:6443" || s.PeerKey != "key" || s.Attempt != 1 || in.Labels[broker.LabelManagedBy] != broker.ManagedBySpillway {
			return fmt.Errorf("have %+v", in)
		}
		return nil
	})
	if err := f.c.Get(f.Context(), types.NamespacedName{Namespace: "default", Name: "rome-1-berlin"}, &broker.ReservationInstruction{}); !apierrors.IsNotFound(err) {
		f.Errorf("an allocation that the provider has not accepted has an instruction: %v", err)
	}
	// amounts waits for the attempt and count of the instruction for berlin, and for whether
	// it is suspended.
	suspended := false
	amounts := func(what string, attempt int64, count int32) {
		f.Helper()
		get(f, &broker.ReservationInstruction{}, "rome-1-berlin", what, func(in *broker.ReservationInstruction) error {
			if in.Spec.Attempt != attempt || in.Spec.PodSets[0].Count != count || in.Spec.Suspended != suspended {
				return fmt.Errorf("have %+v", in.Spec)
			}
			return nil
		})
	}

	f.broker.Update("rome-1", func(v *protocol.ConsumerView) {
		v.Status.Attempt.Number = 2
		v.Status.Allocations[1].Accepted = true
	})
	amounts("instruction for the second provider", 2, 1)
	f.broker.Update("rome-1", func(v *protocol.ConsumerView) {
		v.Status.Attempt.Number = 5
		v.Status.Allocations[1] = allocation("berlin", 3, true)
		v.Status.Allocations[0].Endpoint = "https://paris.example:6443"
	})
	amounts("a new attempt for a larger grant", 5, 3)
	get(f, in, in.Name, "the former attempt for an unchanged amount", func(in *broker.ReservationInstruction) error {
		if in.Spec.Endpoint != "https://paris.example:6443" || in.Spec.Attempt != 1 {
			return fmt.Errorf("have %+v", in.Spec)
		}
		return nil
	})
	f.broker.Update("rome-1", func(v *protocol.ConsumerView) { v.Status.Allocations[1] = allocation("berlin", 1, true) })
	amounts("a higher attempt for a smaller grant", 6, 1)
	f.broker.Update("rome-1", func(v *protocol.ConsumerView) { v.Status.Allocations[1] = allocation("berlin", 4, false) })
	f.broker.Update("rome-1", func(v *protocol.ConsumerView) { v.Status.Summary = "seen" })
	get(f, in, in.Name, "the last event to be observed", func(in *broker.ReservationInstruction) error {
		if in.Spec.Message != "seen" {
			return fmt.Errorf("message %q", in.Spec.Message)
		}
		return nil
	})
	suspended = true
	amounts("the former grant, suspended while the provider decides", 6, 1)
	f.broker.Update("rome-1", func(v *protocol.ConsumerView) { v.Status.Allocations[1].Accepted = true })
	suspended = false
	amounts("the new grant once the provider has accepted it", 7, 4)

	f.broker.Update("rome-1", func(v *protocol.ConsumerView) { v.Status.Allocations = v.Status.Allocations[:1] })
	f.deleted(&broker.ReservationInstruction{}, "rome-1-berlin", "deletion with the allocation")
}

func testManualChanges(f fixture) {
	in := get(f, &broker.ReservationInstruction{}, "rome-1-paris", "an instruction", func(*broker.ReservationInstruction) error { return nil })
	before := in.UID
	expect.NoError(f, f.c.Delete(f.Context(), in))
	get(f, in, in.Name, "creation of a deleted instruction", func(in *broker.ReservationInstruction) error {
		if in.UID == before {
			return errors.New("still the former object")
		}
		return nil
	})
	in.Spec.TargetClusterID = "moscow"
	expect.NoError(f, f.c.Update(f.Context(), in))
	get(f, in, in.Name, "correction of a changed instruction", func(in *broker.ReservationInstruction) error {
		if in.Spec.TargetClusterID != "paris" {
			return fmt.Errorf("target %s", in.Spec.TargetClusterID)
		}
		return nil
	})
	f.broker.Remove("rome-1")
	f.deleted(in, in.Name, "deletion with the reservation")
}

// decide writes the status of an instruction, as the hold controller does.
func (f fixture) decide(name string, enforced bool, status metav1.ConditionStatus, reason, message string) {
	f.Helper()
	f.eventually("the decision about "+name, func() error {
		in := &broker.ProviderInstruction{}
		if err := f.c.Get(f.Context(), types.NamespacedName{Namespace: "default", Name: name}, in); err != nil {
			return err
		}
		in.Status.Enforced, in.Status.ObservedAttempt, in.Status.ObservedGeneration = enforced, in.Spec.Attempt, in.Generation
		meta.SetStatusCondition(&in.Status.Conditions, metav1.Condition{Type: broker.ConditionEnforced, Status: status, Reason: reason, Message: message, ObservedGeneration: in.Generation})
		return f.c.Status().Update(f.Context(), in)
	})
}

// acknowledged waits until the broker has received exactly these acknowledgements.
func (f fixture) acknowledged(id string, want ...protocol.ProviderAck) {
	f.Helper()
	f.eventually("acknowledgements of "+id, func() error {
		var got []protocol.ProviderAck
		for _, call := range f.broker.Calls("AckProvider", id) {
			got = append(got, call.Argument.(protocol.ProviderAck))
		}
		if diff := cmp.Diff(want, got); diff != "" {
			return errors.New(diff)
		}
		return nil
	})
}

func testHold(f fixture) {
	const name = "oslo-1"
	in := get(f, &broker.ProviderInstruction{}, name, "instruction for a hold", func(in *broker.ProviderInstruction) error {
		s := in.Spec
		if s.RequesterClusterID != "oslo" || s.RequesterPeerKey != "key" || s.RequestedCPU.String() != "600m" || s.PodSets[0].Count != 2 || s.Releasing || s.Attempt != 1 ||
			s.AnswerWithin == nil || s.AnswerWithin.Duration != time.Minute {
			return fmt.Errorf("have %+v", s)
		}
		return nil
	})
	yes := protocol.ProviderAck{Attempt: 1, Accepted: true, Message: "set aside"}
	f.decide(name, true, metav1.ConditionTrue, "SetAside", "set aside")
	f.acknowledged(name, yes)
	// The broker has it before the agent takes note of that.
	f.eventually("the agent to know that it has acknowledged", func() error {
		if f.provider.acks.Wait(name, yes, f.clock.Now()) == 0 {
			return errors.New("it would send it again")
		}
		return nil
	})

	// A lost acknowledgement is sent again after ResendAfter, and not before.
	reconcileNow := func() {
		f.Helper()
		_, err := f.provider.Reconcile(f.Context(), reconcile.Request{NamespacedName: types.NamespacedName{Name: name}})
		expect.NoError(f, err)
	}
	reconcileNow()
	f.acknowledged(name, yes)
	f.clock.Step(transport.ResendAfter)
	reconcileNow()
	f.acknowledged(name, yes, yes)
	f.broker.UpdateHold(name, func(v *protocol.ProviderView) { v.Hold.AcceptedAttempt, v.AnswerWithin = 1, nil })
	f.view(name, "the acknowledgement in the view", func(v protocol.ProviderView) bool { return v.Hold.AcceptedAttempt == 1 })
	f.clock.Step(transport.ResendAfter)
	reconcileNow()
	f.acknowledged(name, yes, yes)
	// That the broker waits for nothing any more changes nothing of what was decided.
	decided := in.Generation
	expect.NoError(f, f.c.Get(f.Context(), client.ObjectKeyFromObject(in), in))
	if in.Generation != decided || in.Spec.AnswerWithin == nil {
		f.Errorf("the instruction is changed by its acknowledgement: %+v", in)
	}

	f.broker.UpdateHold(name, func(v *protocol.ProviderView) { v.Hold.Attempt, v.Hold.Promised = 2, pods(9) })
	get(f, in, name, "a larger hold", func(in *broker.ProviderInstruction) error {
		if in.Spec.Attempt != 2 || in.Spec.PodSets[0].Count != 9 || in.Spec.AnswerWithin != nil {
			return fmt.Errorf("have %+v", in.Spec)
		}
		return nil
	})
	f.decide(name, false, metav1.ConditionFalse, "InsufficientCapacity", "6 of 9 pods fit")
	no := protocol.ProviderAck{Attempt: 2, Message: "6 of 9 pods fit"}
	f.acknowledged(name, yes, yes, no)

	f.broker.UpdateHold(name, func(v *protocol.ProviderView) { v.Hold.Granted = ptr.To(pods(2)) })
	f.view(name, "the grant in the view", func(v protocol.ProviderView) bool { return v.Hold.Granted != nil })
	before := in.UID
	expect.NoError(f, f.c.Delete(f.Context(), in))
	get(f, in, name, "creation of a deleted instruction with what is held", func(in *broker.ProviderInstruction) error {
		if held := Held(in); in.UID == before || held == nil || held.Pods() != 2 {
			return fmt.Errorf("have %+v", in)
		}
		return nil
	})

	f.broker.UpdateHold(name, func(v *protocol.ProviderView) { v.Hold.Attempt, v.Hold.Promised = 3, broker.HeldCapacity{} })
	get(f, in, name, "a hold to release", func(in *broker.ProviderInstruction) error {
		if in.Spec.Attempt != 3 || !in.Spec.Releasing {
			return fmt.Errorf("have %+v", in.Spec)
		}
		return nil
	})
	f.decide(name, false, metav1.ConditionUnknown, "GuestsRemain", "waiting for guests")
	reconcileNow()
	f.acknowledged(name, yes, yes, no)
	f.decide(name, false, metav1.ConditionFalse, broker.ReasonReleased, "all gone")
	f.acknowledged(name, yes, yes, no, protocol.ProviderAck{Attempt: 3, Accepted: true, Message: "all gone"})
	f.broker.Remove(name)
	f.deleted(in, name, "deletion with the hold")
}

// A Reservation that is deleted and created again at the broker has the same name
// and another UID. The status of the former one must not count for it.
func testAnotherReservation(f fixture) {
	f.broker.Update("rome-3", func(v *protocol.ConsumerView) {
		v.UID, v.Status.Attempt.Number, v.Status.Allocations = "first", 4, []broker.Allocation{allocation("paris", 1, true)}
	})
	f.broker.UpdateHold("oslo-3", func(v *protocol.ProviderView) {
		v.Hold = broker.Hold{ReservationUID: "first", Attempt: 1, Promised: pods(1)}
	})
	reservation := get(f, &broker.ReservationInstruction{}, "rome-3-paris", "the consumer's instruction", func(*broker.ReservationInstruction) error { return nil })
	hold := get(f, &broker.ProviderInstruction{}, "oslo-3", "the provider's instruction", func(*broker.ProviderInstruction) error { return nil })
	f.decide("oslo-3", true, metav1.ConditionTrue, "SetAside", "set aside")
	yes := protocol.ProviderAck{ReservationUID: "first", Attempt: 1, Accepted: true, Message: "set aside"}
	f.acknowledged("oslo-3", yes)

	f.broker.Update("rome-3", func(v *protocol.ConsumerView) { v.UID, v.Status.Attempt.Number = "second", 1 })
	f.broker.UpdateHold("oslo-3", func(v *protocol.ProviderView) { v.Hold.ReservationUID = "second" })
	former, formerHold := reservation.UID, hold.UID
	get(f, reservation, reservation.Name, "a new instruction for the consumer", func(in *broker.ReservationInstruction) error {
		if in.UID == former || in.Spec.ReservationUID != "second" || in.Spec.Attempt != 1 {
			return fmt.Errorf("have %+v", in)
		}
		return nil
	})
	get(f, hold, hold.Name, "a new instruction for the provider", func(in *broker.ProviderInstruction) error {
		if in.UID == formerHold || in.Spec.ReservationUID != "second" || in.Status.Enforced {
			return fmt.Errorf("have %+v", in)
		}
		return nil
	})
	f.acknowledged("oslo-3", yes)
	// Nothing is granted to the third yet, not even what was to the second.
	f.broker.Update("rome-3", func(v *protocol.ConsumerView) {
		v.UID, v.Status.Allocations = "third", []broker.Allocation{allocation("paris", 1, false)}
	})
	f.deleted(reservation, reservation.Name, "deletion with the former reservation")
	f.broker.Remove("rome-3")
	f.broker.Remove("oslo-3")
	f.deleted(hold, hold.Name, "deletion with the hold")
}

func testEmptyBroker(f fixture) {
	f.broker.Update("rome-2", func(v *protocol.ConsumerView) {
		v.Status.Attempt.Number, v.Status.Allocations = 1, []broker.Allocation{allocation("paris", 1, true)}
	})
	f.broker.UpdateHold("oslo-2", func(v *protocol.ProviderView) { v.Hold = broker.Hold{Attempt: 1, Promised: pods(1)} })
	r, p := &broker.ReservationInstruction{}, &broker.ProviderInstruction{}
	get(f, r, "rome-2-paris", "an instruction", func(*broker.ReservationInstruction) error { return nil })
	get(f, p, "oslo-2", "an instruction", func(*broker.ProviderInstruction) error { return nil })
	f.broker.Down()
	// A write enqueues the object while the stream is down.
	r.Annotations = map[string]string{"touched": "true"}
	expect.NoError(f, f.c.Update(f.Context(), r))
	if !f.provider.mirror.Synced() {
		f.Error("a broken stream cleared the mirror")
	}
	if err := f.c.Get(f.Context(), client.ObjectKeyFromObject(r), r); err != nil {
		f.Errorf("a broken stream deleted an instruction: %v", err)
	}
	f.broker.Empty()
	f.broker.Up()
	f.deleted(r, r.Name, "deletion after the Relist of an empty broker")
	f.deleted(p, p.Name, "deletion after the Relist of an empty broker")
}

func TestDecision(t *testing.T) {
	condition := func(status metav1.ConditionStatus, reason string, generation int64) []metav1.Condition {
		return []metav1.Condition{{Type: broker.ConditionEnforced, Status: status, Reason: reason, Message: "why", ObservedGeneration: generation}}
	}
	two := pods(2)
	cases := map[string]struct {
		reason    string
		releasing bool
		status    broker.ProviderInstructionStatus
		want      protocol.ProviderAck
		decided   bool
	}{
		"no status yet":     {reason: "no status is no decision"},
		"earlier attempt":   {reason: "the former attempt was for another amount", status: broker.ProviderInstructionStatus{Enforced: true, ObservedAttempt: 1, ObservedGeneration: 1, Conditions: condition("True", "SetAside", 1)}},
		"set aside":         {status: broker.ProviderInstructionStatus{Enforced: true, ObservedAttempt: 2, ObservedGeneration: 2, Conditions: condition("True", "SetAside", 2)}, want: protocol.ProviderAck{Attempt: 2, Accepted: true, Message: "why"}, decided: true},
		"other content":     {reason: "a status of former content is no answer, whatever the attempt", status: broker.ProviderInstructionStatus{Enforced: true, ObservedAttempt: 2, ObservedGeneration: 1, Conditions: condition("True", "SetAside", 1)}},
		"refused growth":    {reason: "a refusal says what is still held", status: broker.ProviderInstructionStatus{ObservedAttempt: 2, ObservedGeneration: 2, Held: &two, Conditions: condition("False", "InsufficientCapacity", 2)}, want: protocol.ProviderAck{Attempt: 2, Message: "why", Held: &two}, decided: true},
		"refused":           {status: broker.ProviderInstructionStatus{ObservedAttempt: 2, ObservedGeneration: 2, Conditions: condition("False", "InsufficientCapacity", 2)}, want: protocol.ProviderAck{Attempt: 2, Message: "why"}, decided: true},
		"being repaired":    {reason: "a grant that is being repaired is not a refusal", status: broker.ProviderInstructionStatus{ObservedAttempt: 2, ObservedGeneration: 2, Conditions: condition("Unknown", "Granting", 2)}},
		"releasing, in use": {releasing: true, status: broker.ProviderInstructionStatus{ObservedAttempt: 2, ObservedGeneration: 2, Conditions: condition("False", "InsufficientCapacity", 2)}, want: protocol.ProviderAck{Attempt: 2, Message: "why"}},
		"released":          {releasing: true, status: broker.ProviderInstructionStatus{ObservedAttempt: 2, ObservedGeneration: 2, Conditions: condition("False", broker.ReasonReleased, 2)}, want: protocol.ProviderAck{Attempt: 2, Accepted: true, Message: "why"}, decided: true},
		"former condition":  {reason: "status and condition must be of the same generation", status: broker.ProviderInstructionStatus{ObservedAttempt: 2, ObservedGeneration: 2, Conditions: condition("True", "SetAside", 1)}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			got, decided := Decision(&broker.ProviderInstruction{ObjectMeta: metav1.ObjectMeta{Generation: 2}, Spec: broker.ProviderInstructionSpec{Attempt: 2, Releasing: tc.releasing}, Status: tc.status})
			if decided != tc.decided || (decided && got != tc.want) {
				t.Fatalf("%s: got %+v, %v", tc.reason, got, decided)
			}
		})
	}
}

func TestReservationInstructionName(t *testing.T) {
	if got := ReservationInstructionName("rome-1", "paris"); got != "rome-1-paris" {
		t.Errorf("got %s", got)
	}
	// The names of Reservations in the hub are anything.
	if a, b := ReservationInstructionName("for-rome", "paris"), ReservationInstructionName("for", "rome-paris"); a == b {
		t.Errorf("both are %s", a)
	}
	long := strings.Repeat("x", 300)
	a, b := ReservationInstructionName(long, "paris"), ReservationInstructionName(long, "berlin")
	if len(a) != 253 || a == b {
		t.Errorf("got %s and %s", a, b)
	}
}
