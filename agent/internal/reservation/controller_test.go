package reservation_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/go-logr/logr/testr"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/spillway-dev/spillway/agent/internal/instruction"
	"github.com/spillway-dev/spillway/agent/internal/reservation"
	"github.com/spillway-dev/spillway/agent/internal/transport"
	"github.com/spillway-dev/spillway/agent/internal/transport/transporttest"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/events"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestMain(m *testing.M) { controlplane.Main(m) }

// fixture runs the controllers of cluster rome with a real API server and a broker
// in memory.
type fixture struct {
	*testing.T
	config *rest.Config
	c      client.Client
	broker *transporttest.Broker
}

func start(t *testing.T) fixture {
	restConfig := controlplane.Start(t)
	scheme := runtime.NewScheme()
	expect.NoError(t, errors.Join(clientgoscheme.AddToScheme(scheme), broker.AddToScheme(scheme)))
	c, err := client.New(restConfig, client.Options{Scheme: scheme})
	expect.NoError(t, err)
	expect.NoError(t, c.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: broker.SystemNamespace}}))
	mgr, err := manager.New(restConfig, manager.Options{
		Scheme: scheme, Logger: testr.New(t), Metrics: server.Options{BindAddress: "0"},
		Controller: config.Controller{UsePriorityQueue: ptr.To(false), SkipNameValidation: ptr.To(true)},
	})
	expect.NoError(t, err)
	b := transporttest.New("rome")
	mirror := transport.NewConsumerMirror(b)
	expect.NoError(t, errors.Join(
		instruction.SetupIndex(t.Context(), mgr),
		mgr.Add(mirror),
		instruction.NewConsumer(mgr.GetClient(), broker.SystemNamespace, mirror, clock.RealClock{}).SetupWithManager(mgr),
		reservation.New(mgr.GetClient(), mgr.GetAPIReader(), events.NewRecorder(mgr.GetEventRecorder("spillway-agent")), nil, reservation.Options{ClusterID: "rome", InstructionNamespace: broker.SystemNamespace, Namespace: broker.SystemNamespace, Broker: b, Mirror: mirror, Unmappable: unmappable}).SetupWithManager(mgr),
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
	return fixture{T: t, config: restConfig, c: c, broker: b}
}

// unmappable is the namespace whose pods can run at no provider.
func unmappable(_ context.Context, namespace string) (why string, err error) {
	if namespace == "unmappable" {
		return "namespace unmappable would be unmappable-rome at a provider; use a shorter name", nil
	}
	return "", nil
}

func (f fixture) in(t *testing.T) fixture { f.T = t; return f }

func (f fixture) eventually(what string, check func() error) {
	f.Helper()
	expect.Eventually(f.T, what, func() (bool, string) {
		err := check()
		return err == nil, fmt.Sprint(err)
	})
}

func podSets(count int32) []broker.PodSet {
	return []broker.PodSet{{Name: "pods", Count: count, Requests: broker.FromList(expect.Resources("cpu", "300m", "memory", "64Mi"))}}
}

func allocation(cluster string, count int32) broker.Allocation {
	return broker.Allocation{
		Cluster: cluster, Resources: capacity.OfPodSets(podSets(count)).Totals, PodSets: podSets(count), Accepted: true, PricePerHour: "0.25 EUR",
	}
}

func (f fixture) create(name string, change ...func(*broker.Reservation)) (r *broker.Reservation, id string) {
	f.Helper()
	r = &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Spec: broker.ReservationSpec{PodSets: podSets(3)}}
	for _, mutate := range change {
		mutate(r)
	}
	expect.NoError(f, f.c.Create(f.Context(), r))
	return r, protocol.ReservationID("rome", r.UID)
}

// get reads a Reservation until check returns nil.
func (f fixture) get(r *broker.Reservation, what string, check func() error) {
	f.Helper()
	f.eventually(what, func() error {
		if err := f.c.Get(f.Context(), client.ObjectKeyFromObject(r), r); err != nil {
			return err
		}
		return check()
	})
}

// condition checks the status of a condition and that its message contains a text.
func condition(r *broker.Reservation, kind string, status metav1.ConditionStatus, text string) error {
	c := meta.FindStatusCondition(r.Status.Conditions, kind)
	if c == nil || c.Status != status || !strings.Contains(c.Message, text) {
		return fmt.Errorf("want %s %s with %q, have %+v", kind, status, text, c)
	}
	return nil
}

func (f fixture) called(method, id string, atLeast int) func() error {
	return func() error {
		if n := len(f.broker.Calls(method, id)); n < atLeast {
			return fmt.Errorf("%s was called %d times", method, n)
		}
		return nil
	}
}

func (f fixture) event(about, reason, text string) func() error {
	return func() error {
		var all eventsv1.EventList
		if err := f.c.List(f.Context(), &all, client.InNamespace("default")); err != nil {
			return err
		}
		for _, e := range all.Items {
			if e.Regarding.Name == about && e.Reason == reason && strings.Contains(e.Note, text) {
				return nil
			}
		}
		return fmt.Errorf("no event %s about %s with %q", reason, about, text)
	}
}

// instruction changes the status of an instruction, as the virtual node controller
// does.
func (f fixture) instruction(id, cluster string, change func(*broker.ReservationInstruction)) {
	f.Helper()
	f.eventually("changing the instruction for "+cluster, func() error {
		in := &broker.ReservationInstruction{}
		key := client.ObjectKey{Namespace: broker.SystemNamespace, Name: instruction.ReservationInstructionName(id, cluster)}
		if err := f.c.Get(f.Context(), key, in); err != nil {
			return err
		}
		change(in)
		return f.c.Status().Update(f.Context(), in)
	})
}

func is(kind string) func(*broker.ReservationInstruction) {
	return func(in *broker.ReservationInstruction) {
		in.Status.ObservedAttempt, in.Status.ObservedGeneration = in.Spec.Attempt, in.Generation
		meta.SetStatusCondition(&in.Status.Conditions, metav1.Condition{
			Type: kind, Status: metav1.ConditionTrue, Reason: "Done", Message: "done", ObservedGeneration: in.Generation,
		})
	}
}

func TestReservations(t *testing.T) {
	f := start(t)
	t.Run("from creation to deletion", func(t *testing.T) { testLifecycle(f.in(t)) })
	t.Run("growth", func(t *testing.T) { testGrowth(f.in(t)) })
	t.Run("insufficient capacity", func(t *testing.T) { testQueued(f.in(t)) })
	t.Run("invalid Reservations", func(t *testing.T) { testRejected(f.in(t)) })
	t.Run("a namespace that fits no provider", func(t *testing.T) { testUnmappable(f.in(t)) })
	t.Run("a provider that cannot be used", func(t *testing.T) { testUnusable(f.in(t)) })
	t.Run("who has made it", func(t *testing.T) { testByHand(f.in(t)) })
	t.Run("what kubectl prints", func(t *testing.T) { testColumns(f.in(t)) })
	t.Run("beside the broker", func(t *testing.T) { testBesideBroker(f.in(t)) })
	t.Run("deletion before the first report", func(t *testing.T) { testNeverReported(f.in(t)) })
	t.Run("an orphan at the broker", func(t *testing.T) { testOrphan(f.in(t)) })
	// These break the streams.
	t.Run("an unreachable broker", func(t *testing.T) { testUnreachableBroker(f.in(t)) })
	t.Run("a broker that lost everything", func(t *testing.T) { testEmptyBroker(f.in(t)) })
}

// testUnmappable: the broker is not asked for pods that can run at no provider. The Reservation
// says why, and what to do, and the scheduler does not wait for it.
func testUnmappable(f fixture) {
	expect.NoError(f, f.c.Create(f.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "unmappable"}}))
	r, id := f.create("long", func(r *broker.Reservation) { r.Namespace = "unmappable" })
	const why = "namespace unmappable would be unmappable-rome at a provider; use a shorter name."
	f.get(r, "the Reservation to fail", func() error {
		if r.Status.Phase != broker.ReservationFailed {
			return fmt.Errorf("phase %s", r.Status.Phase)
		}
		return errors.Join(condition(r, broker.ConditionReported, metav1.ConditionFalse, why), condition(r, broker.ConditionReady, metav1.ConditionFalse, why))
	})
	f.eventually("an event", func() error {
		var all eventsv1.EventList
		expect.NoError(f, f.c.List(f.Context(), &all, client.InNamespace("unmappable")))
		for _, e := range all.Items {
			if e.Reason != "ReservationRejected" {
				return fmt.Errorf("event %s: %s", e.Reason, e.Note)
			}
			if strings.Contains(e.Note, why) {
				return nil
			}
		}
		return errors.New("no event")
	})
	if calls := f.broker.Calls("PutReservation", id); len(calls) > 0 {
		f.Errorf("the broker is asked: %v", calls)
	}
	expect.NoError(f, f.c.Delete(f.Context(), r))
	f.eventually("the Reservation to be deleted", func() error { return deleted(f, r) })
}

// testUnusable: the broker learns which provider's allocation no pod can use, and why, until
// it does not show it any more.
func testUnusable(f fixture) {
	r, id := f.create("unusable")
	f.eventually("the report", f.called("PutReservation", id, 1))
	f.broker.Update(id, func(v *protocol.ConsumerView) {
		v.Status.Phase, v.Status.Attempt.Number = broker.ReservationReserved, 1
		v.Status.Allocations = []broker.Allocation{allocation("paris", 3)}
	})
	f.instruction(id, "paris", is(broker.ConditionUnusable))
	f.eventually("the acknowledgement", func() error {
		acks := f.broker.Calls("AckRequester", id)
		if len(acks) == 0 {
			return errors.New("no acknowledgement")
		}
		if last := acks[len(acks)-1].Argument.(protocol.RequesterAck); last.Attempt != 1 || len(last.Ready) > 0 || len(last.Unusable) != 1 || last.Unusable["paris"] != "done" {
			return fmt.Errorf("have %+v", last)
		}
		return nil
	})
	f.broker.Update(id, func(v *protocol.ConsumerView) { v.Status.Phase, v.Status.Allocations = broker.ReservationPending, nil })
	f.eventually("the instruction to be deleted", func() error {
		in := &broker.ReservationInstruction{}
		err := f.c.Get(f.Context(), client.ObjectKey{Namespace: broker.SystemNamespace, Name: instruction.ReservationInstructionName(id, "paris")}, in)
		if !apierrors.IsNotFound(err) {
			return fmt.Errorf("%+v, %v", in, err)
		}
		return nil
	})
	expect.NoError(f, f.c.Delete(f.Context(), r))
	f.eventually("the Reservation to be deleted", func() error { return deleted(f, r) })
}

// testByHand: the broker learns which Reservations are not those of the scheduler plugin.
func testByHand(f fixture) {
	_, byHand := f.create("by-hand")
	_, owned := f.create("owned", func(r *broker.Reservation) {
		r.Labels = map[string]string{broker.LabelOwnerUID: "owner", broker.LabelShape: "shape"}
	})
	for id, want := range map[string]bool{byHand: true, owned: false} {
		f.eventually("the Reservation to be reported", f.called("PutReservation", id, 1))
		if put := f.broker.Calls("PutReservation", id)[0].Argument.(protocol.ReservationRequest); put.ByHand != want {
			f.Errorf("%s is reported with byHand %v", put.SourceName, put.ByHand)
		}
	}
}

// testColumns: kubectl get reservations says whose pods it is for and what is wanted before the broker
// has answered; of what it answers the rest.
func testColumns(f fixture) {
	_, id := f.create("owned-line", func(r *broker.Reservation) {
		r.Labels = map[string]string{broker.LabelOwnerUID: "owner", broker.LabelShape: "shape"}
		r.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "Deployment", Name: "web", UID: "owner"}}
	})
	f.create("by-hand-line")
	line := func(name, part string) {
		f.Helper()
		f.eventually("the line of "+name, func() error {
			line, err := controlplane.Line(f.Context(), f.config, false, "reservations", "default", name)
			if err == nil && !strings.Contains(line, part) {
				err = fmt.Errorf("it is %q, want %q", line, part)
			}
			return err
		})
	}
	line("owned-line", "Name=owned-line, Owner=Deployment/web, Wanted=3 pods, Granted=, Where=, Price/H=, Queue=, State=")
	line("by-hand-line", "Owner=by hand, Wanted=3 pods, ")
	f.broker.Update(id, func(v *protocol.ConsumerView) {
		v.Status.Phase, v.Status.Attempt.Number = broker.ReservationReserved, 1
		v.Status.Owner, v.Status.Granted, v.Status.Where, v.Status.PricePerHour = "rome/default/owned-line", "3 pods", "paris", "0.25 EUR"
		v.Status.Allocations = []broker.Allocation{allocation("paris", 3)}
	})
	line("owned-line", "Owner=Deployment/web, Wanted=3 pods, Granted=3 pods, Where=paris, Price/H=0.25 EUR, Queue=, State=")
	f.instruction(id, "paris", is(broker.ConditionVirtualNodeReady))
	line("owned-line", ", State=Ready, ")
}

// testBesideBroker: in the namespace of Spillway's programs, Reservations are the broker's,
// also those for the hub's own cluster. Where no broker takes one, it says so.
func testBesideBroker(f fixture) {
	beside := func(r *broker.Reservation) { r.Namespace, r.Spec.RequesterID = broker.SystemNamespace, "rome" }
	taken, takenID := f.create("taken", beside, func(r *broker.Reservation) { controllerutil.AddFinalizer(r, broker.FinalizerLedger) })
	alone, aloneID := f.create("alone", beside)
	f.get(alone, "the Reservation to be refused", func() error {
		return condition(alone, broker.ConditionReported, metav1.ConditionFalse, "create it in the namespace of its pods")
	})
	f.get(taken, "the Reservation", func() error { return nil })
	if len(alone.Finalizers) != 0 || len(taken.Finalizers) != 1 || len(taken.Status.Conditions) != 0 {
		f.Errorf("finalizers %v and %v, status %+v", alone.Finalizers, taken.Finalizers, taken.Status)
	}
	for _, id := range []string{takenID, aloneID} {
		if calls := f.broker.Calls("PutReservation", id); len(calls) != 0 {
			f.Errorf("the agent has reported a Reservation of the broker: %v", calls)
		}
	}
}

func testLifecycle(f fixture) {
	r, id := f.create("web")
	f.get(r, "the Reservation to be claimed and reported", func() error {
		if r.Spec.RequesterID != "rome" || !controllerutil.ContainsFinalizer(r, broker.FinalizerRequest) || r.Status.ID != id || r.Status.Phase != broker.ReservationPending {
			return fmt.Errorf("have %+v", r)
		}
		return condition(r, broker.ConditionReported, metav1.ConditionTrue, "")
	})
	put := f.broker.Calls("PutReservation", id)[0].Argument.(protocol.ReservationRequest)
	if put.SourceName != "web" || put.SourceNamespace != "default" || put.SourceUID != r.UID || put.Spec.PodSets[0].Count != 3 {
		f.Fatalf("put %+v", put)
	}

	f.broker.Update(id, func(v *protocol.ConsumerView) {
		v.Status.Phase, v.Status.Attempt.Number, v.Status.Summary = broker.ReservationReserved, 1, "3 of 3 pods in paris"
		v.Status.Allocations = []broker.Allocation{allocation("paris", 3)}
		v.Status.Conditions = []metav1.Condition{{Type: broker.ConditionLocked, Status: metav1.ConditionTrue, Reason: "Held", LastTransitionTime: metav1.Now()}}
	})
	f.get(r, "the grant without a virtual node", func() error {
		if r.Status.Phase != broker.ReservationReserved || len(r.Status.Allocations) != 1 || r.Status.Allocations[0].VirtualNodeReady || r.Status.Summary == "" {
			return fmt.Errorf("have %+v", r.Status)
		}
		return errors.Join(condition(r, broker.ConditionLocked, metav1.ConditionTrue, ""), condition(r, broker.ConditionReady, metav1.ConditionFalse, "paris"))
	})
	f.eventually("an event about the grant", f.event("web", "CapacityGranted", "Provider paris granted capacity for 3 pods (cpu 900m, memory 192Mi) at 0.25 EUR per hour."))

	f.instruction(id, "paris", is(broker.ConditionPeered))
	f.get(r, "condition Peered", func() error { return condition(r, broker.ConditionPeered, metav1.ConditionTrue, "paris") })
	f.instruction(id, "paris", is(broker.ConditionVirtualNodeReady))
	f.get(r, "the virtual node to be ready", func() error {
		if !r.Status.Allocations[0].VirtualNodeReady {
			return errors.New("not ready")
		}
		return condition(r, broker.ConditionReady, metav1.ConditionTrue, "3 of 3 pods can run in paris")
	})
	f.eventually("an event about the Reservation being ready", f.event("web", "ReservationReady", "3 of 3"))
	f.eventually("the acknowledgement", func() error {
		acks := f.broker.Calls("AckRequester", id)
		if len(acks) == 0 {
			return errors.New("no acknowledgement")
		}
		if last := acks[len(acks)-1].Argument.(protocol.RequesterAck); last.Attempt != 1 || !slices.Equal(last.Ready, []string{"paris"}) {
			return fmt.Errorf("have %+v", last)
		}
		return nil
	})
	f.broker.Update(id, func(v *protocol.ConsumerView) {
		v.Status.Phase, v.Status.Allocations[0].VirtualNodeReady = broker.ReservationActive, true
	})

	puts := len(f.broker.Calls("PutReservation", id))
	f.get(r, "the lower count", func() error {
		r.Spec.PodSets[0].Count = 2
		r.Spec.Retained = []broker.RetainedPods{{Cluster: "paris", Count: 2}}
		return f.c.Update(f.Context(), r)
	})
	f.eventually("a report of the lower count", f.called("PutReservation", id, puts+1))
	if put := f.broker.Calls("PutReservation", id)[puts].Argument.(protocol.ReservationRequest); put.Spec.PodSets[0].Count != 2 || put.Spec.RetainedCount() != 2 {
		f.Fatalf("put %+v", put)
	}

	f.broker.SlowDelete(true)
	defer f.broker.SlowDelete(false)
	expect.NoError(f, f.c.Delete(f.Context(), r))
	f.get(r, "the Reservation to wait for its pods", func() error {
		return condition(r, broker.ConditionReady, metav1.ConditionFalse, "waiting for pods on the virtual node")
	})
	if n := len(f.broker.Calls("DeleteReservation", id)); n != 0 {
		f.Fatal("released while in use")
	}
	f.instruction(id, "paris", is(broker.ConditionRequesterReleased))
	f.eventually("deletion at the broker", f.called("DeleteReservation", id, 1))
	// The broker has released it and still waits for the provider, which may be
	// unreachable: the Reservation does not wait for that.
	f.eventually("the Reservation to be deleted", func() error { return deleted(f, r) })
	f.broker.Remove(id)
	f.eventually("deletion of its instruction", func() error {
		var all broker.ReservationInstructionList
		if err := f.c.List(f.Context(), &all); err != nil || len(all.Items) > 0 {
			return fmt.Errorf("have %v, %v", all.Items, err)
		}
		return nil
	})
	if n := len(f.broker.Calls("DeleteReservation", id)); n != 1 {
		f.Errorf("deleted %d times at the broker", n)
	}
}

func deleted(f fixture, r *broker.Reservation) error {
	if err := f.c.Get(f.Context(), client.ObjectKeyFromObject(r), r.DeepCopy()); !apierrors.IsNotFound(err) {
		return fmt.Errorf("still exists: %v", err)
	}
	return nil
}

func testGrowth(f fixture) {
	r, id := f.create("growing", func(r *broker.Reservation) { r.Spec.PodSets[0].Count = 5 })
	f.eventually("the report", f.called("PutReservation", id, 1))
	f.broker.Update(id, func(v *protocol.ConsumerView) {
		v.Status.Phase, v.Status.Attempt.Number = broker.ReservationReserved, 1
		v.Status.Allocations = []broker.Allocation{allocation("paris", 3)}
	})
	f.instruction(id, "paris", is(broker.ConditionVirtualNodeReady))
	f.get(r, "a partial grant to be usable", func() error {
		return condition(r, broker.ConditionReady, metav1.ConditionFalse, "3 of 5 pods can run in paris")
	})

	f.broker.Update(id, func(v *protocol.ConsumerView) {
		v.Status.Attempt.Number = 2
		v.Status.Allocations = []broker.Allocation{allocation("berlin", 2), allocation("paris", 3)}
	})
	f.get(r, "the former grant to remain usable while another provider is added", func() error {
		if a := r.Status.Allocations; len(a) != 2 || a[0].VirtualNodeReady || !a[1].VirtualNodeReady {
			return fmt.Errorf("have %+v", a)
		}
		return condition(r, broker.ConditionReady, metav1.ConditionFalse, "berlin")
	})
	f.instruction(id, "berlin", is(broker.ConditionVirtualNodeReady))
	f.get(r, "both grants to be usable", func() error {
		return condition(r, broker.ConditionReady, metav1.ConditionTrue, "5 of 5 pods can run in berlin, paris")
	})

	f.broker.Update(id, func(v *protocol.ConsumerView) {
		v.Status.Attempt.Number = 3
		v.Status.Allocations = []broker.Allocation{allocation("berlin", 2), allocation("paris", 4)}
	})
	f.get(r, "a larger grant to wait for the virtual node to grow", func() error {
		if a := r.Status.Allocations; !a[0].VirtualNodeReady || a[1].VirtualNodeReady || a[1].PodSets[0].Count != 4 {
			return fmt.Errorf("have %+v", a)
		}
		return nil
	})
}

func testQueued(f fixture) {
	r, id := f.create("queued")
	f.eventually("the report", f.called("PutReservation", id, 1))
	// The broker words the reasons, because it knows the providers.
	const reasons = "3 pods are waiting for capacity. paris: the largest free slot has cpu 200m, a pod needs 300m."
	because := func(kind string, status metav1.ConditionStatus) metav1.Condition {
		return metav1.Condition{Type: kind, Status: status, Reason: "InsufficientCapacity", Message: reasons, LastTransitionTime: metav1.Now()}
	}
	f.broker.Update(id, func(v *protocol.ConsumerView) {
		v.Status.Conditions = []metav1.Condition{because(broker.ConditionQueued, metav1.ConditionTrue)}
	})
	f.get(r, "the reasons in the condition", func() error { return condition(r, broker.ConditionReady, metav1.ConditionFalse, reasons) })
	f.eventually("an event with the reasons", f.event("queued", "ReservationQueued", reasons))
	f.broker.Update(id, func(v *protocol.ConsumerView) {
		v.Status.Phase = broker.ReservationFailed
		v.Status.Conditions = []metav1.Condition{because(broker.ConditionLocked, metav1.ConditionFalse)}
	})
	f.eventually("an event about the failure", f.event("queued", "ReservationFailed", reasons))
}

func testRejected(f fixture) {
	other, _ := f.create("other", func(r *broker.Reservation) { r.Spec.RequesterID = "berlin" })
	f.get(other, "another cluster's ID to be rejected", func() error {
		return condition(other, broker.ConditionReported, metav1.ConditionFalse, `spec.requesterID is "berlin", but this cluster is "rome"`)
	})
	self, _ := f.create("self", func(r *broker.Reservation) { r.Spec.TargetClusterID = "rome" })
	f.get(self, "the own cluster as target to be rejected", func() error {
		return condition(self, broker.ConditionReported, metav1.ConditionFalse, "must not be the requester itself")
	})
	copied, _ := f.create("rome-copy", func(r *broker.Reservation) { r.Labels = map[string]string{broker.LabelRequester: "rome"} })
	placed, _ := f.create("placed-in-hub", func(r *broker.Reservation) {
		r.Spec.RequesterID, r.Finalizers = "berlin", []string{broker.FinalizerLedger}
	})
	f.broker.Fail("PutReservation", &protocol.Error{Code: protocol.CodeInvalid, Message: "no cluster has such a GPU"})
	refused, id := f.create("refused")
	f.get(refused, "the broker's rejection in the conditions", func() error {
		return errors.Join(condition(refused, broker.ConditionReported, metav1.ConditionFalse, "no cluster has such a GPU"),
			condition(refused, broker.ConditionReady, metav1.ConditionFalse, "no cluster has such a GPU"))
	})
	f.eventually("an event with the rejection", f.event("refused", "ReservationRejected", "no cluster has such a GPU"))
	if n := len(f.broker.Calls("PutReservation", id)); n != 1 {
		f.Errorf("reported %d times without a pause", n)
	}
	f.broker.Fail("PutReservation", nil)
	if err := f.c.Get(f.Context(), client.ObjectKeyFromObject(copied), copied); err != nil || len(copied.Finalizers) > 0 || len(copied.Status.Conditions) > 0 {
		f.Errorf("the broker's own copy was changed: %+v, %v", copied, err)
	}
	if err := f.c.Get(f.Context(), client.ObjectKeyFromObject(placed), placed); err != nil || len(placed.Finalizers) != 1 || len(placed.Status.Conditions) > 0 {
		f.Errorf("a Reservation that was created in the hub was changed: %+v, %v", placed, err)
	}
}

func testNeverReported(f fixture) {
	f.broker.Fail("PutReservation", errors.New("connection refused"))
	f.broker.Fail("DeleteReservation", errors.New("connection refused"))
	defer f.broker.Fail("PutReservation", nil)
	defer f.broker.Fail("DeleteReservation", nil)
	r, _ := f.create("never")
	f.get(r, "the failure in the conditions", func() error {
		return condition(r, broker.ConditionReported, metav1.ConditionFalse, "connection refused")
	})
	expect.NoError(f, f.c.Delete(f.Context(), r))
	f.eventually("the Reservation to be deleted without the broker", func() error { return deleted(f, r) })
}

func testOrphan(f fixture) {
	id := protocol.ReservationID("rome", "11111111-2222-3333-4444-555555555555")
	f.broker.Update(id, func(v *protocol.ConsumerView) {
		v.SourceUID, v.SourceNamespace, v.SourceName = "11111111-2222-3333-4444-555555555555", "default", "vanished"
	})
	f.eventually("deletion at the broker", f.called("DeleteReservation", id, 1))
}

func testUnreachableBroker(f fixture) {
	f.broker.Down()
	f.broker.Fail("PutReservation", errors.New("connection refused"))
	r, id := f.create("patient")
	f.get(r, "the failure in the conditions", func() error {
		return errors.Join(condition(r, broker.ConditionReported, metav1.ConditionFalse, "connection refused"),
			condition(r, broker.ConditionReady, metav1.ConditionFalse, "The broker has no copy of this Reservation"))
	})
	f.eventually("retries", f.called("PutReservation", id, 3))
	f.broker.Fail("PutReservation", nil)
	f.broker.Up()
	f.get(r, "the report", func() error { return condition(r, broker.ConditionReported, metav1.ConditionTrue, "") })
}

func testEmptyBroker(f fixture) {
	r, id := f.create("remembered")
	f.eventually("the report", f.called("PutReservation", id, 1))
	f.broker.Update(id, func(v *protocol.ConsumerView) {
		v.Status.Phase, v.Status.Allocations = broker.ReservationReserved, []broker.Allocation{allocation("paris", 3)}
	})
	f.instruction(id, "paris", is(broker.ConditionVirtualNodeReady))
	f.get(r, "the virtual node to be ready", func() error { return condition(r, broker.ConditionReady, metav1.ConditionTrue, "") })
	puts := len(f.broker.Calls("PutReservation", id))
	f.broker.Down()
	f.broker.Empty()
	f.broker.Up()
	f.eventually("a new report", f.called("PutReservation", id, puts+1))
	f.get(r, "phase Pending", func() error {
		if r.Status.Phase != broker.ReservationPending || len(r.Status.Allocations) > 0 {
			return fmt.Errorf("have %+v", r.Status)
		}
		return nil
	})
}
