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
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/spillway-dev/spillway/agent/internal/transport"
	"github.com/spillway-dev/spillway/agent/internal/transport/transporttest"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/controlplane"
)

type world struct {
	*testing.T
	c      client.Client
	broker *transporttest.Broker
	clock  *clocktesting.FakeClock
	// provider is reconciled by its controller, and by tests of time directly.
	provider *Provider
}

func start(t *testing.T) world {
	config := controlplane.Start(t)
	scheme := runtime.NewScheme()
	if err := broker.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	c, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	mgr, err := manager.New(config, manager.Options{Scheme: scheme, Logger: testr.New(t), Metrics: server.Options{BindAddress: "0"}})
	if err != nil {
		t.Fatal(err)
	}
	b := transporttest.New("rome")
	b.Down()
	consumers, providers := transport.NewConsumerMirror(b), transport.NewProviderMirror(b)
	w := world{T: t, c: c, broker: b, clock: clocktesting.NewFakeClock(time.Now()), provider: NewProvider(mgr.GetClient(), "default", b, providers)}
	w.provider.clock = w.clock
	if err := errors.Join(
		SetupIndex(t.Context(), mgr), mgr.Add(consumers), mgr.Add(providers),
		NewConsumer(mgr.GetClient(), "default", consumers).SetupWithManager(mgr), w.provider.SetupWithManager(mgr),
	); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- mgr.Start(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("running the manager: %v", err)
		}
	})
	return w
}

func (w world) in(t *testing.T) world { w.T = t; return w }

func (w world) eventually(what string, ok func() error) {
	w.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for {
		err := ok()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			w.Fatalf("%s: %v", what, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// get reads an object until it is as wanted.
func get[T client.Object](w world, object T, name, what string, ok func(T) error) T {
	w.Helper()
	w.eventually(what, func() error {
		if err := w.c.Get(w.Context(), types.NamespacedName{Namespace: "default", Name: name}, object); err != nil {
			return err
		}
		return ok(object)
	})
	return object
}

func (w world) gone(object client.Object, name, what string) {
	w.Helper()
	w.eventually(what, func() error {
		if err := w.c.Get(w.Context(), types.NamespacedName{Namespace: "default", Name: name}, object); !apierrors.IsNotFound(err) {
			return fmt.Errorf("still there: %v", err)
		}
		return nil
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
	w := start(t)
	stale := &broker.ReservationInstruction{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "stale-paris"},
		Spec:       broker.ReservationInstructionSpec{ReservationName: "stale", TargetClusterID: "paris", Attempt: 1},
	}
	if err := w.c.Create(t.Context(), stale); err != nil {
		t.Fatal(err)
	}
	w.broker.Update("rome-1", func(v *protocol.ConsumerView) {
		v.SourceNamespace, v.SourceName = "shop", "web"
		v.PeerKeys = map[string]string{"paris": "key"}
		v.Status.Attempt.Number = 1
		v.Status.Allocations = []broker.Allocation{allocation("paris", 2, true), allocation("berlin", 1, false)}
	})
	w.broker.UpdateHold("oslo-1", func(v *protocol.ProviderView) {
		v.Requester, v.RequesterPeerKey = "oslo", "key"
		v.Hold = broker.Hold{Attempt: 1, Promised: pods(2)}
	})
	t.Run("nothing is believed to be gone before the broker has said so", func(t *testing.T) {
		if err := w.c.Get(t.Context(), client.ObjectKeyFromObject(stale), stale); err != nil {
			t.Fatal(err)
		}
		w.broker.Up(false)
		w.in(t).gone(stale, stale.Name, "what the broker does not know goes with its Relist")
	})
	t.Run("for the consumer", func(t *testing.T) { forTheConsumer(w.in(t)) })
	t.Run("for the provider", func(t *testing.T) { forTheProvider(w.in(t)) })
	t.Run("an empty broker", func(t *testing.T) { emptyBroker(w.in(t)) })
}

func forTheConsumer(w world) {
	in := &broker.ReservationInstruction{}
	const name = "rome-1-paris"
	get(w, in, name, "an accepted allocation becomes an instruction", func(in *broker.ReservationInstruction) error {
		s := in.Spec
		if s.ReservationName != "rome-1" || s.SourceNamespace != "shop" || s.SourceName != "web" || s.TargetClusterID != "paris" || s.RequestedCPU.String() != "600m" ||
			s.PodSets[0].Count != 2 || s.Endpoint != "https://paris:6443" || s.PeerKey != "key" || s.Attempt != 1 || in.Labels[broker.LabelManagedBy] != broker.ManagedBySpillway {
			return fmt.Errorf("have %+v", in)
		}
		return nil
	})
	if err := w.c.Get(w.Context(), types.NamespacedName{Namespace: "default", Name: "rome-1-berlin"}, &broker.ReservationInstruction{}); !apierrors.IsNotFound(err) {
		w.Errorf("an allocation that the provider has not accepted became an instruction: %v", err)
	}

	w.broker.Update("rome-1", func(v *protocol.ConsumerView) {
		v.Status.Attempt.Number = 2
		v.Status.Allocations[1].Accepted = true
	})
	get(w, &broker.ReservationInstruction{}, "rome-1-berlin", "the second provider accepts", func(in *broker.ReservationInstruction) error {
		if in.Spec.Attempt != 2 {
			return fmt.Errorf("have %+v", in.Spec)
		}
		return nil
	})
	w.broker.Update("rome-1", func(v *protocol.ConsumerView) {
		v.Status.Attempt.Number = 5
		v.Status.Allocations[1] = allocation("berlin", 3, true)
		v.Status.Allocations[0].Endpoint = "https://paris.example:6443"
	})
	get(w, &broker.ReservationInstruction{}, "rome-1-berlin", "a larger grant has a new generation", func(in *broker.ReservationInstruction) error {
		if in.Spec.Attempt != 5 || in.Spec.PodSets[0].Count != 3 {
			return fmt.Errorf("have %+v", in.Spec)
		}
		return nil
	})
	get(w, in, name, "an unchanged amount has none", func(in *broker.ReservationInstruction) error {
		if in.Spec.Endpoint != "https://paris.example:6443" || in.Spec.Attempt != 1 {
			return fmt.Errorf("have %+v", in.Spec)
		}
		return nil
	})
	w.broker.Update("rome-1", func(v *protocol.ConsumerView) { v.Status.Allocations[1] = allocation("berlin", 1, true) })
	get(w, &broker.ReservationInstruction{}, "rome-1-berlin", "generations only grow", func(in *broker.ReservationInstruction) error {
		if in.Spec.Attempt != 6 || in.Spec.PodSets[0].Count != 1 {
			return fmt.Errorf("have %+v", in.Spec)
		}
		return nil
	})
	w.broker.Update("rome-1", func(v *protocol.ConsumerView) { v.Status.Allocations[1] = allocation("berlin", 4, false) })
	w.broker.Update("rome-1", func(v *protocol.ConsumerView) { v.Status.Summary = "seen" })
	get(w, in, name, "the last event is taken in", func(in *broker.ReservationInstruction) error {
		if in.Spec.Message != "seen" {
			return errors.New("not yet")
		}
		return nil
	})
	get(w, &broker.ReservationInstruction{}, "rome-1-berlin", "what is in force stays while a change is considered", func(in *broker.ReservationInstruction) error {
		if in.Spec.PodSets[0].Count != 1 {
			return fmt.Errorf("have %+v", in.Spec)
		}
		return nil
	})

	before := in.UID
	if err := w.c.Delete(w.Context(), in); err != nil {
		w.Fatal(err)
	}
	get(w, in, name, "one deleted by hand comes back", func(in *broker.ReservationInstruction) error {
		if in.UID == before {
			return errors.New("still the old one")
		}
		return nil
	})
	in.Spec.TargetClusterID = "moscow"
	if err := w.c.Update(w.Context(), in); err != nil {
		w.Fatal(err)
	}
	get(w, in, name, "one changed by hand is put right", func(in *broker.ReservationInstruction) error {
		if in.Spec.TargetClusterID != "paris" {
			return errors.New("not yet")
		}
		return nil
	})

	w.broker.Update("rome-1", func(v *protocol.ConsumerView) { v.Status.Allocations = v.Status.Allocations[:1] })
	w.gone(&broker.ReservationInstruction{}, "rome-1-berlin", "an allocation that is gone takes its instruction along")
	w.broker.Forget("rome-1")
	w.gone(in, name, "so does a reservation")
}

// decide plays the provider's side.
func (w world) decide(name string, enforced bool, status metav1.ConditionStatus, reason, message string) {
	w.Helper()
	w.eventually("deciding about "+name, func() error {
		in := &broker.ProviderInstruction{}
		if err := w.c.Get(w.Context(), types.NamespacedName{Namespace: "default", Name: name}, in); err != nil {
			return err
		}
		in.Status.Enforced, in.Status.ObservedAttempt = enforced, in.Spec.Attempt
		meta.SetStatusCondition(&in.Status.Conditions, metav1.Condition{Type: broker.ConditionEnforced, Status: status, Reason: reason, Message: message, ObservedGeneration: in.Spec.Attempt})
		return w.c.Status().Update(w.Context(), in)
	})
}

func (w world) answered(id string, want ...protocol.ProviderAck) {
	w.Helper()
	w.eventually("the broker is answered", func() error {
		var got []protocol.ProviderAck
		for _, call := range w.broker.Calls("Ack", id) {
			got = append(got, call.Argument.(protocol.ProviderAck))
		}
		if diff := cmp.Diff(want, got); diff != "" {
			return errors.New(diff)
		}
		return nil
	})
}

func forTheProvider(w world) {
	const name = "oslo-1"
	in := get(w, &broker.ProviderInstruction{}, name, "a hold becomes an instruction", func(in *broker.ProviderInstruction) error {
		s := in.Spec
		if s.RequesterClusterID != "oslo" || s.RequesterPeerKey != "key" || s.RequestedCPU.String() != "600m" || s.PodSets[0].Count != 2 || s.Releasing || s.Attempt != 1 {
			return fmt.Errorf("have %+v", s)
		}
		return nil
	})
	yes := protocol.ProviderAck{Attempt: 1, Accepted: true, Message: "set aside"}
	w.decide(name, true, metav1.ConditionTrue, "SetAside", "set aside")
	w.answered(name, yes)

	// The answer got lost: it is sent again after a while, and no sooner.
	again := func() {
		if _, err := w.provider.Reconcile(w.Context(), reconcile.Request{NamespacedName: types.NamespacedName{Name: name}}); err != nil {
			w.Fatal(err)
		}
	}
	again()
	w.answered(name, yes)
	w.clock.Step(ackAgain)
	again()
	w.answered(name, yes, yes)
	w.broker.UpdateHold(name, func(v *protocol.ProviderView) { v.Hold.AcceptedAttempt = 1 })
	w.eventually("the view shows the answer", func() error {
		if v, _ := w.provider.mirror.Get(name); v.Hold.AcceptedAttempt != 1 {
			return errors.New("not yet")
		}
		return nil
	})
	w.clock.Step(ackAgain)
	again()
	w.answered(name, yes, yes)

	w.broker.UpdateHold(name, func(v *protocol.ProviderView) { v.Hold.Attempt, v.Hold.Promised = 2, pods(9) })
	get(w, in, name, "a larger hold shows", func(in *broker.ProviderInstruction) error {
		if in.Spec.Attempt != 2 || in.Spec.PodSets[0].Count != 9 {
			return fmt.Errorf("have %+v", in.Spec)
		}
		return nil
	})
	w.decide(name, false, metav1.ConditionFalse, "NoRoom", "6 of 9 pods fit")
	no := protocol.ProviderAck{Attempt: 2, Message: "6 of 9 pods fit"}
	w.answered(name, yes, yes, no)

	granted := pods(2)
	w.broker.UpdateHold(name, func(v *protocol.ProviderView) { v.Hold.Granted = &granted })
	w.eventually("the view shows what was granted", func() error {
		if v, _ := w.provider.mirror.Get(name); v.Hold.Granted == nil {
			return errors.New("not yet")
		}
		return nil
	})
	before := in.UID
	if err := w.c.Delete(w.Context(), in); err != nil {
		w.Fatal(err)
	}
	get(w, in, name, "one deleted by hand comes back and knows what was agreed to", func(in *broker.ProviderInstruction) error {
		if in.UID == before || in.Status.Held == nil || in.Status.Held.Pods() != 2 {
			return fmt.Errorf("have %+v", in.Status)
		}
		return nil
	})

	w.broker.UpdateHold(name, func(v *protocol.ProviderView) { v.Hold.Attempt, v.Hold.Promised = 3, broker.HeldCapacity{} })
	get(w, in, name, "a hold to be released shows", func(in *broker.ProviderInstruction) error {
		if in.Spec.Attempt != 3 || !in.Spec.Releasing {
			return fmt.Errorf("have %+v", in.Spec)
		}
		return nil
	})
	w.decide(name, false, metav1.ConditionUnknown, "GuestsRemain", "waiting for guests")
	again()
	w.answered(name, yes, yes, no)
	w.decide(name, false, metav1.ConditionFalse, broker.ReasonReleased, "all gone")
	w.answered(name, yes, yes, no, protocol.ProviderAck{Attempt: 3, Accepted: true, Message: "all gone"})
	w.broker.Forget(name)
	w.gone(in, name, "the hold is gone")
}

func emptyBroker(w world) {
	w.broker.Update("rome-2", func(v *protocol.ConsumerView) {
		v.Status.Attempt.Number, v.Status.Allocations = 1, []broker.Allocation{allocation("paris", 1, true)}
	})
	w.broker.UpdateHold("oslo-2", func(v *protocol.ProviderView) { v.Hold = broker.Hold{Attempt: 1, Promised: pods(1)} })
	r, p := &broker.ReservationInstruction{}, &broker.ProviderInstruction{}
	get(w, r, "rome-2-paris", "an instruction", func(*broker.ReservationInstruction) error { return nil })
	get(w, p, "oslo-2", "an instruction", func(*broker.ProviderInstruction) error { return nil })
	w.broker.Down()
	// An object that is written while the stream is down gets looked at.
	r.Annotations = map[string]string{"touched": "true"}
	if err := w.c.Update(w.Context(), r); err != nil {
		w.Fatal(err)
	}
	if !w.provider.mirror.Synced() {
		w.Error("a broken stream forgot what it had told")
	}
	if err := w.c.Get(w.Context(), client.ObjectKeyFromObject(r), r); err != nil {
		w.Errorf("gone with a broken stream: %v", err)
	}
	w.broker.Up(true)
	w.gone(r, r.Name, "an empty broker has said so itself")
	w.gone(p, p.Name, "an empty broker has said so itself")
}

func TestDecision(t *testing.T) {
	condition := func(status metav1.ConditionStatus, reason string, generation int64) []metav1.Condition {
		return []metav1.Condition{{Type: broker.ConditionEnforced, Status: status, Reason: reason, Message: "why", ObservedGeneration: generation}}
	}
	cases := map[string]struct {
		reason    string
		releasing bool
		status    broker.ProviderInstructionStatus
		want      protocol.ProviderAck
		decided   bool
	}{
		"nothing yet":          {reason: "no status is no decision"},
		"earlier generation":   {reason: "that was another amount", status: broker.ProviderInstructionStatus{Enforced: true, ObservedAttempt: 1, Conditions: condition("True", "SetAside", 1)}},
		"set aside":            {status: broker.ProviderInstructionStatus{Enforced: true, ObservedAttempt: 2, Conditions: condition("True", "SetAside", 2)}, want: protocol.ProviderAck{Attempt: 2, Accepted: true, Message: "why"}, decided: true},
		"refused":              {status: broker.ProviderInstructionStatus{ObservedAttempt: 2, Conditions: condition("False", "NoRoom", 2)}, want: protocol.ProviderAck{Attempt: 2, Message: "why"}, decided: true},
		"in doubt again":       {reason: "a grant that is being repaired is no refusal", status: broker.ProviderInstructionStatus{ObservedAttempt: 2, Conditions: condition("Unknown", "Granting", 2)}},
		"releasing, in use":    {releasing: true, status: broker.ProviderInstructionStatus{ObservedAttempt: 2, Conditions: condition("False", "NoRoom", 2)}, want: protocol.ProviderAck{Attempt: 2, Message: "why"}},
		"releasing, all gone":  {releasing: true, status: broker.ProviderInstructionStatus{ObservedAttempt: 2, Conditions: condition("False", broker.ReasonReleased, 2)}, want: protocol.ProviderAck{Attempt: 2, Accepted: true, Message: "why"}, decided: true},
		"old condition, alone": {reason: "both must be of this generation", status: broker.ProviderInstructionStatus{ObservedAttempt: 2, Conditions: condition("True", "SetAside", 1)}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			got, decided := Decision(&broker.ProviderInstruction{Spec: broker.ProviderInstructionSpec{Attempt: 2, Releasing: tc.releasing}, Status: tc.status})
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
	long := strings.Repeat("x", 300)
	a, b := ReservationInstructionName(long, "paris"), ReservationInstructionName(long, "berlin")
	if len(a) != 253 || a == b {
		t.Errorf("got %s and %s", a, b)
	}
}
