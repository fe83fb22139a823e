package hold_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/hold/verdict"
	"github.com/spillway-dev/spillway/agent/internal/instruction"
	"github.com/spillway-dev/spillway/agent/internal/peering"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestHoldIsJudgedAgain: what no longer fits of an accepted hold when a node is
// cordoned, or when local pods take its place, is given up and reported.
func TestHoldIsJudgedAgain(t *testing.T) {
	e := start(t)
	e.namespaces()
	e.node("a", expect.Resources("cpu", "3500m", "memory", "8Gi"))
	e.node("b", expect.Resources("cpu", "2", "memory", "8Gi"))
	e.hold("r1", "rome", 1, pods(set("pods", 2, expect.Resources("cpu", "1"))))
	e.decided("r1", 1, verdict.ReasonAccepted, "", 2)
	e.hold("r2", "rome", 1, pods(set("pods", 2, expect.Resources("cpu", "1"))))
	e.decided("r2", 1, verdict.ReasonAccepted, "", 2)
	e.guest("g1", "rome", "b", expect.Resources("cpu", "1"))

	// A guest on a cordoned node runs on for a while, and needs a place elsewhere as the
	// three that are not there yet: for one of them there is none.
	e.cordon("b", true)
	e.lowered("r2", 1, 1, "Holding only 1 pods of cpu 1: 1 of 2 pods of pod set \"pods\" fit. Insufficient cpu")
	e.granted("rome", "cpu 3", 3)
	in, c := e.get("r2")
	if want := e.clock.Now().Add(10 * time.Minute).Truncate(time.Second); in.Status.LeaveBy == nil || !in.Status.LeaveBy.Time.Equal(want) ||
		!strings.Contains(c.Message, "Guests beyond that must leave by "+want.UTC().Format(time.RFC3339)+".") {
		t.Errorf("the rest must go by %s: %v, %q", want, in.Status.LeaveBy, c.Message)
	}
	if in, c := e.get("r1"); c.Reason != verdict.ReasonAccepted || in.Status.Held.Pods() != 2 {
		t.Errorf("the older hold keeps its place: %+v", in.Status)
	}

	// The broker lowers its promise to what is left; that is accepted, and still says what is
	// lost. The time does not start again with it, and the guest is not touched.
	e.clock.SetTime(e.clock.Now().Add(time.Minute))
	e.hold("r2", "rome", 2, pods(set("pods", 1, expect.Resources("cpu", "1"))))
	e.decidedAs(true, "r2", 2, verdict.ReasonCapacityLost, "Holding 1 pods of cpu 1 for consumer rome. Guests beyond that must leave by ", 1)
	if now, _ := e.get("r2"); !now.Status.LeaveBy.Equal(in.Status.LeaveBy) {
		t.Errorf("the deadline was %s and is %s", in.Status.LeaveBy, now.Status.LeaveBy)
	}
	expect.NoError(t, e.Get(t.Context(), client.ObjectKey{Namespace: "guests-of-rome", Name: "g1"}, &corev1.Pod{}))

	// When the time is over, nothing is left to say.
	e.clock.SetTime(e.clock.Now().Add(10 * time.Minute))
	e.reconciler.Enqueue("rome")
	e.decided("r2", 2, verdict.ReasonAccepted, "Holding 1 pods of cpu 1 for consumer rome.", 1)
	if in, c := e.get("r2"); in.Status.LeaveBy != nil || strings.Contains(c.Message, "must leave") {
		t.Errorf("the time to leave is over: %+v", in.Status)
	}

	// Local pods take the rest.
	local := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "l1", Namespace: "home"},
		Spec:       corev1.PodSpec{NodeName: "a", Containers: []corev1.Container{{Name: "c", Image: "i", Resources: corev1.ResourceRequirements{Requests: expect.Resources("cpu", "1")}}}},
	}
	expect.NoError(t, e.Create(t.Context(), local))
	e.lowered("r2", 2, 0, "0 of 1 pods")
	e.granted("rome", "cpu 2", 2)
}

// lowered waits until a decided hold is lowered to a number of pods, and its
// acknowledgement says so.
func (e *env) lowered(name string, attempt int64, count int32, message string) {
	e.Helper()
	e.decided(name, attempt, verdict.ReasonCapacityLost, message, count)
	in, _ := e.get(name)
	ack, decided := instruction.Decision(in)
	if !decided || ack.Accepted || ack.Held == nil != (count == 0) || count > 0 && ack.Held.Pods() != count {
		e.Errorf("the broker does not learn that %d pods are held: %+v", count, ack)
	}
}

// namespaces makes one for guests of rome, and one for pods of this cluster.
func (e *env) namespaces() {
	e.Helper()
	for _, name := range []string{"guests-of-rome", "home"} {
		labels := map[string]string{}
		if name != "home" {
			labels[broker.LabelGuestsOf] = "rome"
		}
		expect.NoError(e, e.Create(e.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}))
		expect.NoError(e, e.Create(e.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default", Namespace: name}}))
	}
}

// cordon makes a node run no more pods, or lets it run pods again.
func (e *env) cordon(name string, unschedulable bool) {
	e.Helper()
	node := &corev1.Node{}
	expect.NoError(e, e.Get(e.Context(), client.ObjectKey{Name: name}, node))
	node.Spec.Unschedulable = unschedulable
	expect.NoError(e, e.Update(e.Context(), node))
}

// marked are the guests of rome with the mark, and versions those of all of them.
func (e *env) marked() (names []string, versions string) {
	e.Helper()
	var list corev1.PodList
	expect.NoError(e, e.List(e.Context(), &list, client.InNamespace("guests-of-rome")))
	for _, pod := range list.Items {
		versions += pod.ResourceVersion + " "
		for _, c := range pod.Status.Conditions {
			if c.Type == broker.PodMustLeave && c.Status == corev1.ConditionTrue {
				names = append(names, pod.Name)
			}
		}
	}
	return names, versions
}

// TestLossOfTheHoldOnTheNode: of holds with equal requests, the one is lowered whose guests are
// on the node that runs no more pods, although the other one is newer.
func TestLossOfTheHoldOnTheNode(t *testing.T) {
	e := start(t)
	e.namespaces()
	e.node("a", expect.Resources("cpu", "3", "memory", "8Gi"))
	e.node("b", expect.Resources("cpu", "2500m", "memory", "8Gi"))
	one := expect.Resources("cpu", "1")
	for _, h := range []struct{ name, node string }{{"r1", "b"}, {"r2", "a"}} {
		e.hold(h.name, "rome", 1, pods(set("pods", 2, one)))
		e.decided(h.name, 1, verdict.ReasonAccepted, "", 2)
		for _, guest := range []string{"x", "y"} {
			e.guest(h.name+guest, "rome", h.node, one, func(pod *corev1.Pod) { pod.Labels = map[string]string{broker.LabelHold: h.name} })
		}
	}
	e.cordon("b", true)
	e.lowered("r1", 1, 0, "0 of 2 pods")
	expect.Eventually(t, "the guests on the node to be marked", func() (bool, string) {
		names, _ := e.marked()
		return slices.Equal(names, []string{"r1x", "r1y"}), fmt.Sprint(names)
	})
	if in, c := e.get("r2"); c.Reason != verdict.ReasonAccepted || in.Status.Held.Pods() != 2 {
		t.Errorf("the newer hold, whose guests stay, is changed: %+v", in.Status)
	}
}

// TestGuestsThatMustLeave: those on a cordoned node for which nothing is held any more are
// marked, others are not; the marks go when the node runs pods again.
func TestGuestsThatMustLeave(t *testing.T) {
	e := start(t)
	e.namespaces()
	e.node("a", expect.Resources("cpu", "2500m", "memory", "8Gi"))
	e.node("b", expect.Resources("cpu", "3", "memory", "8Gi"))
	one := expect.Resources("cpu", "1")
	e.hold("r1", "rome", 1, pods(set("pods", 4, one)))
	e.decided("r1", 1, verdict.ReasonAccepted, "", 4)
	e.guest("a1", "rome", "a", one)
	for _, name := range []string{"b1", "b2", "b3"} {
		e.guest(name, "rome", "b", one)
	}
	// One of the three on the node has a place beside a1.
	e.cordon("b", true)
	e.lowered("r1", 1, 2, "Holding only 2 pods")
	expect.Eventually(t, "two guests to be marked", func() (bool, string) {
		names, _ := e.marked()
		return len(names) == 2 && !slices.Contains(names, "a1"), fmt.Sprint(names)
	})
	before, versions := e.marked()
	e.hold("r1", "rome", 2, pods(set("pods", 2, one)))
	e.decidedAs(true, "r1", 2, verdict.ReasonCapacityLost, "Guests beyond that must leave by ", 2)
	expect.Consistently(t, 3*time.Second, "the same guests to be marked, without a write", func() (bool, string) {
		names, now := e.marked()
		return slices.Equal(names, before) && now == versions, fmt.Sprint(names)
	})
	noneMarked := func() {
		t.Helper()
		expect.Eventually(t, "no guest to be marked", func() (bool, string) {
			names, _ := e.marked()
			return len(names) == 0, fmt.Sprint(names)
		})
	}
	// A larger hold changes nothing while it is tried: it may be refused.
	e.node("c", expect.Resources("cpu", "3", "memory", "8Gi"))
	e.provider.Hold("EnsureGrant", peering.Waiting("QuotaPending", "waiting for the quota"))
	e.hold("r1", "rome", 3, pods(set("pods", 4, one)))
	expect.Eventually(t, "the larger hold to be recorded", func() (bool, string) {
		in, c := e.get("r1")
		return c.Reason == verdict.ReasonGrantPending && in.Status.Held.Pods() == 4, fmt.Sprintf("%+v", in.Status)
	})
	expect.Consistently(t, 3*time.Second, "the same guests to be marked while a larger hold is tried", func() (bool, string) {
		names, now := e.marked()
		return slices.Equal(names, before) && now == versions, fmt.Sprint(names)
	})
	e.provider.Free("EnsureGrant")
	e.reconciler.Enqueue("rome")
	e.decided("r1", 3, verdict.ReasonAccepted, "Holding 4 pods", 4)
	noneMarked()
	expect.NoError(t, e.Delete(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "c"}}))
	e.lowered("r1", 3, 2, "Holding only 2 pods")
	e.cordon("b", false)
	noneMarked()
	// If the broker promises nothing any more, the reason stays until the guests have left.
	e.hold("r1", "rome", 4, broker.HeldCapacity{})
	expect.Eventually(t, "the condition to say that guests have to leave", func() (bool, string) {
		in, c := e.get("r1")
		return c.Reason == verdict.ReasonCapacityLost && in.Status.LeaveBy != nil && in.Status.ObservedAttempt == 3 &&
			strings.Contains(c.Message, "4 pods with cpu 4 are running, the hold is reduced to nothing. Guests beyond that must leave by "), fmt.Sprintf("%+v", in.Status)
	})
	for _, name := range []string{"a1", "b1", "b2", "b3"} {
		expect.NoError(t, e.Delete(t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "guests-of-rome", Name: name}}))
	}
	e.decided("r1", 4, broker.ReasonReleased, "", 0)
}
