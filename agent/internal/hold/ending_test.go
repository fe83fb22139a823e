package hold_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/hold"
	"github.com/spillway-dev/spillway/agent/internal/hold/verdict"
	"github.com/spillway-dev/spillway/agent/internal/inventory"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/guest"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// A consumer does not have more running than it is promised by deleting guests that terminate for
// long, and creating others.
func TestEndingGuestsCount(t *testing.T) {
	e := startPlaces(t, true)
	e.amd64("a", expect.Resources("cpu", "8", "memory", "8Gi"))
	e.hold("r1", "rome", 1, pods(set("pods", 2, expect.Resources("cpu", "500m"))))
	e.decided("r1", 1, verdict.ReasonAccepted, "", 2)
	for i, tc := range []struct {
		name  string
		first []string
		next  string
	}{
		{"of the held shape", []string{"500m", "500m"}, "500m"},
		{"of a smaller shape", []string{"400m", "300m"}, "500m"},
		{"then one of a smaller shape", []string{"500m", "500m"}, "300m"},
	} {
		if !t.Run(tc.name, func(t *testing.T) {
			in := *e
			in.T = t
			in.endingCount(fmt.Sprint("b", i), tc.first, tc.next)
		}) {
			return
		}
	}
}

// endingCount lets a guest come while the first ones, which are bound, are being deleted.
func (e *env) endingCount(other string, first []string, next string) {
	const guests = "guests-of-rome"
	waits := func(s *corev1.PodSpec) {
		s.PriorityClassName, s.TerminationGracePeriodSeconds = guest.PriorityClass, ptr.To[int64](3600)
		s.SchedulingGates = []corev1.PodSchedulingGate{{Name: broker.GateHandOver}}
	}
	var names []string
	for i, cpu := range first {
		names = append(names, fmt.Sprint("first-", i))
		e.pod(guests, names[i], cpu, waits)
	}
	e.eventuallyBound(guests, len(first))
	for _, name := range names {
		expect.NoError(e, e.Delete(e.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: guests, Name: name}}))
		e.known("that "+name+" is being deleted", func() error {
			pod := &corev1.Pod{}
			if err := e.cached.Get(e.Context(), client.ObjectKey{Namespace: guests, Name: name}, pod); err != nil || pod.DeletionTimestamp != nil {
				return err
			}
			return errors.New("it is not")
		})
	}
	e.pod(guests, "next", next, waits)
	e.known("the next guest", func() error {
		return e.cached.Get(e.Context(), client.ObjectKey{Namespace: guests, Name: "next"}, &corev1.Pod{})
	})
	// The agent goes on meanwhile.
	e.hold(other, "berlin", 1, pods(set("pods", 1, expect.Resources("cpu", "100m"))))
	e.decided(other, 1, verdict.ReasonAccepted, "", 1)
	if bound, _ := e.bound(guests); bound != len(first) {
		e.Errorf("%d guests have a node, which are more than the promise: those that are being deleted still run", bound)
	}
	for _, name := range names {
		expect.NoError(e, e.Delete(e.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: guests, Name: name}}, client.GracePeriodSeconds(0)))
	}
	e.eventuallyBound(guests, 1)
	expect.NoError(e, e.Delete(e.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: guests, Name: "next"}}, client.GracePeriodSeconds(0)))
	e.eventuallyBound(guests, 0)
}

// A guest that has no place waits, however long, and an event says so once it has waited for some
// seconds. One that requests nothing of a divisible total needs none.
func TestNoneWithoutPlace(t *testing.T) {
	both, nothing := expect.Resources("cpu", "2", "nvidia.com/gpu", "1"), expect.Resources("memory", "0")
	divisible, shapes := total(both), pods(set("pods", 2, expect.Resources("cpu", "1")))
	for name, tc := range map[string]struct {
		held            broker.HeldCapacity
		running, ending []corev1.ResourceList
		next            corev1.ResourceList
		// ungated says whether the next guest is let go at once.
		ungated bool
	}{
		"before its placeholder":    {held: shapes, next: expect.Resources("cpu", "1")},
		"larger than all":           {held: shapes, next: expect.Resources("cpu", "1500m")},
		"beyond":                    {held: shapes, running: []corev1.ResourceList{expect.Resources("cpu", "1"), expect.Resources("cpu", "1")}, next: expect.Resources("cpu", "1")},
		"while others end":          {held: divisible, ending: []corev1.ResourceList{expect.Resources("cpu", "2")}, next: expect.Resources("cpu", "1")},
		"of one resource of two":    {held: divisible, ending: []corev1.ResourceList{expect.Resources("cpu", "1", "nvidia.com/gpu", "1")}, next: expect.Resources("cpu", "1", "nvidia.com/gpu", "1")},
		"of what is not promised":   {held: divisible, next: expect.Resources("memory", "1Gi")},
		"nothing of a total":        {held: divisible, running: []corev1.ResourceList{expect.Resources("cpu", "2")}, next: nothing, ungated: true},
		"nothing, and none is left": {held: shapes, running: []corev1.ResourceList{expect.Resources("cpu", "1"), expect.Resources("cpu", "1")}, next: nothing},
		"nothing of nothing":        {next: nothing},
	} {
		created := time.Unix(10_000, 0)
		clock := clocktesting.NewFakePassiveClock(created)
		recognizer := inventory.Recognizer{Guest: guestOf}
		reconciler, tracker := hold.New(nil, nil, nil, nil, hold.Options{Recognizer: recognizer, Clock: clock}), inventory.NewTracker(recognizer)
		tracker.Set(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "guests-of-rome", Labels: map[string]string{broker.LabelGuestsOf: "rome"}}})
		tracker.Set(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}, Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}}})
		add := func(name string, requests corev1.ResourceList, change func(*corev1.Pod)) {
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "guests-of-rome", Name: name, UID: types.UID(name), CreationTimestamp: metav1.NewTime(created)}}
			pod.Spec.Containers = []corev1.Container{{Name: "c", Resources: corev1.ResourceRequirements{Requests: requests}}}
			change(pod)
			tracker.Set(pod)
		}
		for i, requests := range tc.running {
			add(fmt.Sprint("running-", i), requests, func(p *corev1.Pod) { p.Spec.NodeName = "n" })
		}
		for i, requests := range tc.ending {
			add(fmt.Sprint("ending-", i), requests, func(p *corev1.Pod) { p.Spec.NodeName, p.DeletionTimestamp = "n", ptr.To(metav1.Unix(20_000, 0)) })
		}
		add("next", tc.next, func(p *corev1.Pod) {
			p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: broker.GateHandOver}}
		})
		in := &broker.ProviderInstruction{ObjectMeta: metav1.ObjectMeta{Name: "r1", UID: "r1"}, Spec: broker.ProviderInstructionSpec{ReservationName: "r1", RequesterClusterID: "rome"}}
		for after, want := range map[time.Duration]int{0: 0, 5 * time.Second: 0, time.Hour: 1} {
			clock.SetTime(created.Add(after))
			ungated, reported := reconciler.Waiting(tracker, in, tc.held)
			if tc.ungated {
				want = 0
			}
			if (ungated > 0) != tc.ungated || reported != want {
				t.Errorf("%s: after %s, %d are let go and %d are said to have no place; want %t, %d", name, after, ungated, reported, tc.ungated, want)
			}
		}
	}
}
