package reservation_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/spillway-dev/spillway/agent/internal/instruction"
	"github.com/spillway-dev/spillway/agent/internal/reservation"
	"github.com/spillway-dev/spillway/agent/internal/transport"
	"github.com/spillway-dev/spillway/agent/internal/transport/transporttest"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/controlplane"
)

// world is an agent of cluster rome, a real API server, and a broker in memory.
type world struct {
	*testing.T
	c      client.Client
	broker *transporttest.Broker
}

func start(t *testing.T) world {
	config := controlplane.Start(t)
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), broker.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	c, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	mgr, err := manager.New(config, manager.Options{
		Scheme: scheme, Logger: testr.NewWithOptions(t, testr.Options{}), Metrics: server.Options{BindAddress: "0"},
	})
	if err != nil {
		t.Fatal(err)
	}
	b := transporttest.New("rome")
	mirror := transport.NewConsumerMirror(b)
	if err := errors.Join(
		instruction.SetupIndex(t.Context(), mgr),
		mgr.Add(mirror),
		instruction.NewConsumer(mgr.GetClient(), "default", mirror).SetupWithManager(mgr),
		reservation.New(mgr, reservation.Options{ClusterID: "rome", InstructionNamespace: "default", Broker: b, Mirror: mirror}).SetupWithManager(mgr),
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
	return world{T: t, c: c, broker: b}
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

func q(s string) *resource.Quantity { v := resource.MustParse(s); return &v }

func podSets(count int32) []broker.PodSet {
	return []broker.PodSet{{Name: "pods", Count: count, Requests: broker.ResourceQuantities{CPU: q("300m"), Memory: q("64Mi")}}}
}

func allocation(cluster string, count int32) broker.Allocation {
	sum := podSets(1)[0].Requests.List()
	return broker.Allocation{Cluster: cluster, Resources: broker.FromList(broker.Times(sum, count)), PodSets: podSets(count), Accepted: true, PricePerHour: "0.25 EUR"}
}

func (w world) create(name string, change ...func(*broker.Reservation)) (r *broker.Reservation, id string) {
	w.Helper()
	r = &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Spec: broker.ReservationSpec{PodSets: podSets(3)}}
	for _, f := range change {
		f(r)
	}
	if err := w.c.Create(w.Context(), r); err != nil {
		w.Fatal(err)
	}
	return r, protocol.ReservationID("rome", r.UID)
}

// expect reads a Reservation until it is as wanted.
func (w world) expect(r *broker.Reservation, what string, ok func() error) {
	w.Helper()
	w.eventually(what, func() error {
		if err := w.c.Get(w.Context(), client.ObjectKeyFromObject(r), r); err != nil {
			return err
		}
		return ok()
	})
}

// condition checks a condition of a Reservation, and that its message has a text
// in it.
func condition(r *broker.Reservation, kind string, status metav1.ConditionStatus, text string) error {
	c := meta.FindStatusCondition(r.Status.Conditions, kind)
	if c == nil || c.Status != status || !strings.Contains(c.Message, text) {
		return fmt.Errorf("want %s %s with %q, have %+v", kind, status, text, c)
	}
	return nil
}

func (w world) called(method, id string, atLeast int) func() error {
	return func() error {
		if n := len(w.broker.Calls(method, id)); n < atLeast {
			return fmt.Errorf("%s was called %d times", method, n)
		}
		return nil
	}
}

func (w world) event(about, reason, text string) func() error {
	return func() error {
		var all eventsv1.EventList
		if err := w.c.List(w.Context(), &all, client.InNamespace("default")); err != nil {
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

// instruction plays the part of the agent that sets up virtual nodes.
func (w world) instruction(id, cluster string, change func(*broker.ReservationInstruction)) {
	w.Helper()
	w.eventually("changing the instruction for "+cluster, func() error {
		in := &broker.ReservationInstruction{}
		key := client.ObjectKey{Namespace: "default", Name: instruction.ReservationInstructionName(id, cluster)}
		if err := w.c.Get(w.Context(), key, in); err != nil {
			return err
		}
		change(in)
		return w.c.Status().Update(w.Context(), in)
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
	w := start(t)
	t.Run("the life of one", func(t *testing.T) { theLifeOfOne(w.in(t)) })
	t.Run("growing", func(t *testing.T) { growing(w.in(t)) })
	t.Run("waiting for room", func(t *testing.T) { waitingForRoom(w.in(t)) })
	t.Run("wrong ones", func(t *testing.T) { wrongOnes(w.in(t)) })
	t.Run("deletion before the broker knows", func(t *testing.T) { neverReported(w.in(t)) })
	t.Run("an orphan at the broker", func(t *testing.T) { orphan(w.in(t)) })
	// These break the streams.
	t.Run("an unreachable broker", func(t *testing.T) { unreachable(w.in(t)) })
	t.Run("a broker that forgot", func(t *testing.T) { forgetful(w.in(t)) })
}

func theLifeOfOne(w world) {
	r, id := w.create("web")
	w.expect(r, "it is claimed and reported", func() error {
		if r.Spec.RequesterID != "rome" || !controllerutil.ContainsFinalizer(r, broker.FinalizerRequest) || r.Status.ID != id || r.Status.Phase != broker.ReservationPending {
			return fmt.Errorf("have %+v", r)
		}
		return condition(r, broker.ConditionReported, metav1.ConditionTrue, "")
	})
	put := w.broker.Calls("PutReservation", id)[0].Argument.(protocol.ReservationRequest)
	if put.SourceName != "web" || put.SourceNamespace != "default" || put.SourceUID != r.UID || put.Spec.PodSets[0].Count != 3 {
		w.Fatalf("put %+v", put)
	}

	w.broker.Update(id, func(v *protocol.ConsumerView) {
		v.Status.Phase, v.Status.Attempt.Number, v.Status.Summary = broker.ReservationReserved, 1, "3 of 3 pods in paris"
		v.Status.Allocations = []broker.Allocation{allocation("paris", 3)}
		v.Status.Conditions = []metav1.Condition{{Type: broker.ConditionLocked, Status: metav1.ConditionTrue, Reason: "Held", LastTransitionTime: metav1.Now()}}
	})
	w.expect(r, "the grant shows, but cannot be used yet", func() error {
		if r.Status.Phase != broker.ReservationReserved || len(r.Status.Allocations) != 1 || r.Status.Allocations[0].VirtualNodeReady || r.Status.Summary == "" {
			return fmt.Errorf("have %+v", r.Status)
		}
		return errors.Join(condition(r, broker.ConditionLocked, metav1.ConditionTrue, ""), condition(r, broker.ConditionReady, metav1.ConditionFalse, "paris"))
	})
	w.eventually("the grant is told", w.event("web", "Granted", "paris grants room for 3 pods (cpu 900m, memory 192Mi), 0.25 EUR per hour"))

	w.instruction(id, "paris", is(broker.ConditionPeered))
	w.expect(r, "peering shows", func() error { return condition(r, broker.ConditionPeered, metav1.ConditionTrue, "paris") })
	w.instruction(id, "paris", is(broker.ConditionVirtualNodeReady))
	w.expect(r, "it can be used", func() error {
		if !r.Status.Allocations[0].VirtualNodeReady {
			return errors.New("not ready")
		}
		return condition(r, broker.ConditionReady, metav1.ConditionTrue, "3 of 3 pods may run in paris")
	})
	w.eventually("being ready is told", w.event("web", "Ready", "3 of 3"))
	w.eventually("the broker is told", func() error {
		acks := w.broker.Calls("Ack", id)
		if len(acks) == 0 {
			return errors.New("no acknowledgement")
		}
		if last := acks[len(acks)-1].Argument.(protocol.RequesterAck); last.Attempt != 1 || !slices.Equal(last.Ready, []string{"paris"}) {
			return fmt.Errorf("have %+v", last)
		}
		return nil
	})
	w.broker.Update(id, func(v *protocol.ConsumerView) {
		v.Status.Phase, v.Status.Allocations[0].VirtualNodeReady = broker.ReservationActive, true
	})

	puts := len(w.broker.Calls("PutReservation", id))
	w.expect(r, "the count is lowered", func() error {
		r.Spec.PodSets[0].Count = 2
		r.Spec.Retained = []broker.RetainedPods{{Cluster: "paris", Count: 2}}
		return w.c.Update(w.Context(), r)
	})
	w.eventually("the broker is asked for less", w.called("PutReservation", id, puts+1))
	if put := w.broker.Calls("PutReservation", id)[puts].Argument.(protocol.ReservationRequest); put.Spec.PodSets[0].Count != 2 || put.Spec.RetainedCount() != 2 {
		w.Fatalf("put %+v", put)
	}

	w.broker.SlowDelete(true)
	defer w.broker.SlowDelete(false)
	if err := w.c.Delete(w.Context(), r); err != nil {
		w.Fatal(err)
	}
	w.expect(r, "it waits for its pods", func() error {
		return condition(r, broker.ConditionReady, metav1.ConditionFalse, "waiting for its pods")
	})
	if n := len(w.broker.Calls("DeleteReservation", id)); n != 0 {
		w.Fatal("given back while in use")
	}
	w.instruction(id, "paris", is(broker.ConditionRequesterReleased))
	w.eventually("it is given back", w.called("DeleteReservation", id, 1))
	// It is released at the broker, which still waits for the provider: that may
	// be silent, and is no reason to stay here.
	w.eventually("it is gone", func() error { return gone(w, r) })
	w.broker.Forget(id)
	w.eventually("so is its instruction", func() error {
		var all broker.ReservationInstructionList
		if err := w.c.List(w.Context(), &all); err != nil || len(all.Items) > 0 {
			return fmt.Errorf("have %v, %v", all.Items, err)
		}
		return nil
	})
	if n := len(w.broker.Calls("DeleteReservation", id)); n != 1 {
		w.Errorf("given back %d times", n)
	}
}

func gone(w world, r *broker.Reservation) error {
	if err := w.c.Get(w.Context(), client.ObjectKeyFromObject(r), r.DeepCopy()); !apierrors.IsNotFound(err) {
		return fmt.Errorf("still there: %v", err)
	}
	return nil
}

func growing(w world) {
	r, id := w.create("growing", func(r *broker.Reservation) { r.Spec.PodSets[0].Count = 5 })
	w.eventually("it is put", w.called("PutReservation", id, 1))
	w.broker.Update(id, func(v *protocol.ConsumerView) {
		v.Status.Phase, v.Status.Attempt.Number = broker.ReservationReserved, 1
		v.Status.Allocations = []broker.Allocation{allocation("paris", 3)}
	})
	w.instruction(id, "paris", is(broker.ConditionVirtualNodeReady))
	w.expect(r, "a part can be used", func() error {
		return condition(r, broker.ConditionReady, metav1.ConditionFalse, "3 of 5 pods may run in paris")
	})

	w.broker.Update(id, func(v *protocol.ConsumerView) {
		v.Status.Attempt.Number = 2
		v.Status.Allocations = []broker.Allocation{allocation("berlin", 2), allocation("paris", 3)}
	})
	w.expect(r, "what was there stays usable while another provider joins", func() error {
		if a := r.Status.Allocations; len(a) != 2 || a[0].VirtualNodeReady || !a[1].VirtualNodeReady {
			return fmt.Errorf("have %+v", a)
		}
		return condition(r, broker.ConditionReady, metav1.ConditionFalse, "berlin")
	})
	w.instruction(id, "berlin", is(broker.ConditionVirtualNodeReady))
	w.expect(r, "all can be used", func() error {
		return condition(r, broker.ConditionReady, metav1.ConditionTrue, "5 of 5 pods may run in berlin, paris")
	})

	w.broker.Update(id, func(v *protocol.ConsumerView) {
		v.Status.Attempt.Number = 3
		v.Status.Allocations = []broker.Allocation{allocation("berlin", 2), allocation("paris", 4)}
	})
	w.expect(r, "a larger grant cannot be used before the node has grown", func() error {
		if a := r.Status.Allocations; !a[0].VirtualNodeReady || a[1].VirtualNodeReady || a[1].PodSets[0].Count != 4 {
			return fmt.Errorf("have %+v", a)
		}
		return nil
	})
}

func waitingForRoom(w world) {
	r, id := w.create("queued")
	w.eventually("it is put", w.called("PutReservation", id, 1))
	w.broker.Update(id, func(v *protocol.ConsumerView) {
		v.Status.Conditions = []metav1.Condition{{Type: broker.ConditionQueued, Status: metav1.ConditionTrue, Reason: "NoRoom", LastTransitionTime: metav1.Now()}}
		v.Status.Decision = &broker.Decision{Rejections: []broker.ClusterRejection{
			{Cluster: "berlin", Reason: "Inactive", Message: "has not advertised for 5m"},
			{Cluster: "paris", Reason: "InsufficientCPU", Message: "the largest free slot has cpu 200m, a pod needs 300m"},
		}}
	})
	const reasons = "berlin: has not advertised for 5m; paris: the largest free slot has cpu 200m, a pod needs 300m"
	w.expect(r, "the reasons show", func() error { return condition(r, broker.ConditionReady, metav1.ConditionFalse, reasons) })
	w.eventually("the reasons are told", w.event("queued", "Queued", reasons))
	w.broker.Update(id, func(v *protocol.ConsumerView) { v.Status.Phase = broker.ReservationFailed })
	w.eventually("a failure is told", w.event("queued", "Failed", reasons))
}

func wrongOnes(w world) {
	other, _ := w.create("other", func(r *broker.Reservation) { r.Spec.RequesterID = "berlin" })
	w.expect(other, "another cluster's name is refused", func() error {
		return condition(other, broker.ConditionReported, metav1.ConditionFalse, `requesterID is "berlin", but this cluster is "rome"`)
	})
	self, _ := w.create("self", func(r *broker.Reservation) { r.Spec.TargetClusterID = "rome" })
	w.expect(self, "a pin on oneself is refused", func() error {
		return condition(self, broker.ConditionReported, metav1.ConditionFalse, "must not be the requester itself")
	})
	copied, _ := w.create("rome-copy", func(r *broker.Reservation) { r.Labels = map[string]string{broker.LabelRequester: "rome"} })
	w.broker.Fail("PutReservation", &protocol.Error{Code: protocol.CodeInvalid, Message: "nobody has such a GPU"})
	refused, id := w.create("refused")
	w.expect(refused, "the broker's no is passed on", func() error {
		return errors.Join(condition(refused, broker.ConditionReported, metav1.ConditionFalse, "nobody has such a GPU"),
			condition(refused, broker.ConditionReady, metav1.ConditionFalse, "nobody has such a GPU"))
	})
	w.eventually("the no is told", w.event("refused", "NotReported", "nobody has such a GPU"))
	if n := len(w.broker.Calls("PutReservation", id)); n != 1 {
		w.Errorf("asked %d times at once", n)
	}
	w.broker.Fail("PutReservation", nil)
	if err := w.c.Get(w.Context(), client.ObjectKeyFromObject(copied), copied); err != nil || len(copied.Finalizers) > 0 || len(copied.Status.Conditions) > 0 {
		w.Errorf("the broker's own copy was touched: %+v, %v", copied, err)
	}
}

func neverReported(w world) {
	w.broker.Fail("PutReservation", errors.New("connection refused"))
	w.broker.Fail("DeleteReservation", errors.New("connection refused"))
	defer w.broker.Fail("PutReservation", nil)
	defer w.broker.Fail("DeleteReservation", nil)
	r, _ := w.create("never")
	w.expect(r, "the failure shows", func() error {
		return condition(r, broker.ConditionReported, metav1.ConditionFalse, "connection refused")
	})
	if err := w.c.Delete(w.Context(), r); err != nil {
		w.Fatal(err)
	}
	w.eventually("it goes at once", func() error { return gone(w, r) })
}

func orphan(w world) {
	id := protocol.ReservationID("rome", "11111111-2222-3333-4444-555555555555")
	w.broker.Update(id, func(v *protocol.ConsumerView) {
		v.SourceUID, v.SourceNamespace, v.SourceName = "11111111-2222-3333-4444-555555555555", "default", "vanished"
	})
	w.eventually("it is given back", w.called("DeleteReservation", id, 1))
}

func unreachable(w world) {
	w.broker.Down()
	w.broker.Fail("PutReservation", errors.New("connection refused"))
	r, id := w.create("patient")
	w.expect(r, "the failure shows", func() error {
		return errors.Join(condition(r, broker.ConditionReported, metav1.ConditionFalse, "connection refused"),
			condition(r, broker.ConditionReady, metav1.ConditionFalse, "the broker does not have this request"))
	})
	w.eventually("it is tried again", w.called("PutReservation", id, 3))
	w.broker.Fail("PutReservation", nil)
	w.broker.Up(false)
	w.expect(r, "it is reported", func() error { return condition(r, broker.ConditionReported, metav1.ConditionTrue, "") })
}

func forgetful(w world) {
	r, id := w.create("remembered")
	w.eventually("it is put", w.called("PutReservation", id, 1))
	w.broker.Update(id, func(v *protocol.ConsumerView) {
		v.Status.Phase, v.Status.Allocations = broker.ReservationReserved, []broker.Allocation{allocation("paris", 3)}
	})
	w.instruction(id, "paris", is(broker.ConditionVirtualNodeReady))
	w.expect(r, "it can be used", func() error { return condition(r, broker.ConditionReady, metav1.ConditionTrue, "") })
	puts := len(w.broker.Calls("PutReservation", id))
	w.broker.Down()
	w.broker.Up(true)
	w.eventually("it is put again", w.called("PutReservation", id, puts+1))
	w.expect(r, "it is pending again", func() error {
		if r.Status.Phase != broker.ReservationPending || len(r.Status.Allocations) > 0 {
			return fmt.Errorf("have %+v", r.Status)
		}
		return nil
	})
}
