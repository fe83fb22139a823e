package handover_test

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/spillway-dev/spillway/agent/internal/hold/handover"
	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/placeholder"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity/capacitytest"
	"github.com/spillway-dev/spillway/broker/charge"
	"github.com/spillway-dev/spillway/broker/guest"
	"github.com/spillway-dev/spillway/e2e/expect"
)

var set, pods, total = capacitytest.Set, capacitytest.Pods, capacitytest.Total

// recognizer knows guests by their namespace's label.
var recognizer = inventory.Recognizer{
	Guest: func(pod *corev1.Pod, namespaceLabels func(string) map[string]string) (string, bool) {
		consumer := namespaceLabels(pod.Namespace)[broker.LabelGuestsOf]
		return consumer, consumer != ""
	},
	Placeholder: func(pod *corev1.Pod) (string, bool) { return placeholder.ConsumerOf(pod, "holds") },
}

// input is what the places of rome are planned on, which has one hold.
func input(tracker *inventory.Tracker, held broker.HeldCapacity, now time.Time) handover.Input {
	places := tracker.Places("rome")
	return handover.Input{
		Consumer: "rome", Promises: []charge.Promise{{UID: "r1", Name: "r1", Held: held}}, Guests: places, Placeholders: places.Placeholders,
		Nominated: func(types.UID) string { return "" }, Node: tracker.Node, Eligible: recognizer.Eligible, Options: placeholder.Options{Namespace: "holds"}, Now: now,
	}
}

// TestPlan: each guest that waits takes a place, and what the guests use is not held besides.
func TestPlan(t *testing.T) {
	for _, tc := range []struct{ bound, waiting, holds, handOvers, created, removed int }{
		{bound: 0, waiting: 0, holds: 0, created: 100},
		{bound: 0, waiting: 0, holds: 100},
		{bound: 40, waiting: 0, holds: 60},
		{bound: 40, waiting: 0, holds: 0, created: 60},
		{bound: 40, waiting: 20, holds: 60, handOvers: 20},
		{bound: 60, waiting: 20, holds: 60, handOvers: 20, removed: 20},
		{bound: 90, waiting: 20, holds: 10, handOvers: 10},
	} {
		handOvers, created, removed := planOf(100, tc.bound, tc.waiting, tc.holds)()
		if handOvers != tc.handOvers || created != tc.created || removed != tc.removed {
			t.Errorf("%+v: %d hand-overs, %d created, %d removed", tc, handOvers, created, removed)
		}
	}
}

// BenchmarkPlan measures what one event of a place costs with many guests and placeholders.
func BenchmarkPlan(b *testing.B) {
	for _, waiting := range []int{0, 100} {
		b.Run(fmt.Sprintf("waiting-%d", waiting), func(b *testing.B) {
			plan := planOf(1000, 500, waiting, 500)
			for b.Loop() {
				plan()
			}
		})
	}
}

// planOf plans the places of a hold of count pods, of which some guests are bound and some
// wait, with a number of placeholders that have a place.
func planOf(count, bound, waiting, holding int) (plan func() (handOvers, created, removed int)) {
	options := placeholder.Options{Namespace: "holds"}
	tracker := inventory.NewTracker(recognizer)
	tracker.Set(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "guests-of-rome", Labels: map[string]string{broker.LabelGuestsOf: "rome"}}})
	const nodes = 80
	for i := range nodes {
		tracker.Set(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("n", i), Labels: map[string]string{corev1.LabelArchStable: guest.Arch, corev1.LabelOSStable: guest.OS}},
			Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}}})
	}
	requests := expect.Resources("cpu", "100m", "memory", "64Mi")
	for i := range bound + waiting {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "guests-of-rome", Name: fmt.Sprint("g", i), UID: types.UID(fmt.Sprint("g", i))}}
		pod.Spec.Containers = []corev1.Container{{Name: "c", Resources: corev1.ResourceRequirements{Requests: requests}}}
		if i < bound {
			pod.Spec.NodeName = fmt.Sprint("n", i%nodes)
		} else {
			pod.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: broker.GateHandOver}}
		}
		tracker.Set(pod)
	}
	held := pods(set("pods", int32(count), requests))
	for i, pod := range placeholder.Make(placeholder.Input{Holds: []placeholder.Hold{{UID: "r1", Name: "r1", Consumer: "rome", Unused: held}}, Options: options}).Create[:holding] {
		pod.UID, pod.Spec.NodeName = types.UID(pod.Name), fmt.Sprint("n", i%nodes)
		tracker.Set(pod)
	}
	return func() (handOvers, created, removed int) {
		plan := handover.Make(input(tracker, held, time.Now()))
		return len(plan.Taken), len(plan.Create), len(plan.Remove)
	}
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
		tracker := inventory.NewTracker(recognizer)
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
		for after, want := range map[time.Duration]int{0: 0, 5 * time.Second: 0, time.Hour: 1} {
			plan := handover.Make(input(tracker, tc.held, created.Add(after)))
			ungated, reported := len(plan.Ungate), len(plan.Unplaced)
			if tc.ungated {
				want = 0
			}
			if (ungated > 0) != tc.ungated || reported != want {
				t.Errorf("%s: after %s, %d are let go and %d are said to have no place; want %t, %d", name, after, ungated, reported, tc.ungated, want)
			}
		}
	}
}
