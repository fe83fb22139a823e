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

	"github.com/spillway-dev/spillway/agent/internal/hold"
	"github.com/spillway-dev/spillway/agent/internal/instruction"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestHoldIsJudgedAgain: what no longer fits of an accepted hold when a node is
// cordoned, or when local pods take its place, is given up and reported.
func TestHoldIsJudgedAgain(t *testing.T) {
	e := start(t)
	for _, name := range []string{"guests-of-rome", "home"} {
		labels := map[string]string{}
		if name != "home" {
			labels[broker.LabelGuestsOf] = "rome"
		}
		expect.NoError(t, e.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}))
		expect.NoError(t, e.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default", Namespace: name}}))
	}
	e.node("a", expect.Resources("cpu", "3500m", "memory", "8Gi"))
	e.node("b", expect.Resources("cpu", "2", "memory", "8Gi"))
	e.hold("r1", "rome", 1, pods(set("pods", 2, expect.Resources("cpu", "1"))))
	e.decided("r1", 1, hold.ReasonAccepted, "", 2)
	e.hold("r2", "rome", 1, pods(set("pods", 2, expect.Resources("cpu", "1"))))
	e.decided("r2", 1, hold.ReasonAccepted, "", 2)
	e.guest("g1", "rome", "b", expect.Resources("cpu", "1"))

	// A guest on a cordoned node runs on for a while, and needs a place elsewhere as the
	// three that are not there yet: for one of them there is none.
	node := &corev1.Node{}
	expect.NoError(t, e.Get(t.Context(), client.ObjectKey{Name: "b"}, node))
	node.Spec.Unschedulable = true
	expect.NoError(t, e.Update(t.Context(), node))
	e.lowered("r2", 1, 1, "Holding only 1 pods of cpu 1 for consumer rome: 1 of 2 pods of pod set \"pods\" fit. Insufficient cpu")
	e.granted("rome", "cpu 3", 3)
	in, c := e.get("r2")
	if want := e.clock.Now().Add(10 * time.Minute).Truncate(time.Second); in.Status.LeaveBy == nil || !in.Status.LeaveBy.Time.Equal(want) ||
		!strings.Contains(c.Message, "Guests beyond that must leave by "+want.UTC().Format(time.RFC3339)+".") {
		t.Errorf("the rest must go by %s: %v, %q", want, in.Status.LeaveBy, c.Message)
	}
	if in, c := e.get("r1"); c.Reason != hold.ReasonAccepted || in.Status.Held.Pods() != 2 {
		t.Errorf("the older hold keeps its place: %+v", in.Status)
	}

	// The broker lowers its promise to what is left; that is accepted.
	// The time does not start again with it, and the guest is not touched.
	e.clock.SetTime(e.clock.Now().Add(time.Minute))
	e.hold("r2", "rome", 2, pods(set("pods", 1, expect.Resources("cpu", "1"))))
	e.decided("r2", 2, hold.ReasonAccepted, "Holding 1 pods", 1)
	if now, _ := e.get("r2"); !now.Status.LeaveBy.Equal(in.Status.LeaveBy) {
		t.Errorf("the deadline was %s and is %s", in.Status.LeaveBy, now.Status.LeaveBy)
	}
	expect.NoError(t, e.Get(t.Context(), client.ObjectKey{Namespace: "guests-of-rome", Name: "g1"}, &corev1.Pod{}))

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
	e.decided(name, attempt, hold.ReasonCapacityLost, message, count)
	in, _ := e.get(name)
	ack, decided := instruction.Decision(in)
	if !decided || ack.Accepted || ack.Held == nil != (count == 0) || count > 0 && ack.Held.Pods() != count {
		e.Errorf("the broker does not learn that %d pods are held: %+v", count, ack)
	}
}

// TestGuestsThatMustLeave: those on a cordoned node for which nothing is held any more are
// marked, others are not; the marks go when the node runs pods again.
func TestGuestsThatMustLeave(t *testing.T) {
	e := start(t)
	for _, name := range []string{"guests-of-rome", "home"} {
		labels := map[string]string{}
		if name != "home" {
			labels[broker.LabelGuestsOf] = "rome"
		}
		expect.NoError(t, e.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}))
		expect.NoError(t, e.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default", Namespace: name}}))
	}
	e.node("a", expect.Resources("cpu", "2500m", "memory", "8Gi"))
	e.node("b", expect.Resources("cpu", "3", "memory", "8Gi"))
	one := expect.Resources("cpu", "1")
	e.hold("r1", "rome", 1, pods(set("pods", 4, one)))
	e.decided("r1", 1, hold.ReasonAccepted, "", 4)
	e.guest("a1", "rome", "a", one)
	for _, name := range []string{"b1", "b2", "b3"} {
		e.guest(name, "rome", "b", one)
	}
	cordon := func(unschedulable bool) {
		node := &corev1.Node{}
		expect.NoError(t, e.Get(t.Context(), client.ObjectKey{Name: "b"}, node))
		node.Spec.Unschedulable = unschedulable
		expect.NoError(t, e.Update(t.Context(), node))
	}
	marked := func() (names []string, versions string) {
		var list corev1.PodList
		expect.NoError(t, e.List(t.Context(), &list, client.InNamespace("guests-of-rome")))
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
	// One of the three on the node has a place beside a1.
	cordon(true)
	e.lowered("r1", 1, 2, "Holding only 2 pods")
	expect.Eventually(t, "two guests to be marked", func() (bool, string) {
		names, _ := marked()
		return len(names) == 2 && !slices.Contains(names, "a1"), fmt.Sprint(names)
	})
	before, versions := marked()
	e.hold("r1", "rome", 2, pods(set("pods", 2, one)))
	e.decided("r1", 2, hold.ReasonAccepted, "Guests beyond that must leave by ", 2)
	expect.Consistently(t, 3*time.Second, "the same guests to be marked, without a write", func() (bool, string) {
		names, now := marked()
		return slices.Equal(names, before) && now == versions, fmt.Sprint(names)
	})
	cordon(false)
	expect.Eventually(t, "no guest to be marked", func() (bool, string) {
		names, _ := marked()
		return len(names) == 0, fmt.Sprint(names)
	})
}
