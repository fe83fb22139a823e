package hold_test

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"

	"github.com/spillway-dev/spillway/agent/internal/hold"
	"github.com/spillway-dev/spillway/agent/internal/hold/verdict"
	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/placeholder"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/guest"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/e2e/playground/cluster"
)

// TestWrites counts what the API server writes for each guest from its hold until it is
// bound, and when a hold grows. For one guest:
//
//	POST pods, POST pods/binding, POST events   its placeholder: agent, scheduler, scheduler
//	POST pods                                   the guest: the consumer's virtual node
//	PATCH pods/status                           its nomination, which keeps the place: agent
//	DELETE pods                                 its placeholder: agent
//	PATCH pods                                  its scheduling gate: agent
//	POST pods/binding, POST events              the guest: scheduler
//
// A kubelet, which there is none here, adds the status of both pods.
func TestWrites(t *testing.T) {
	const guests, grown = 40, 50
	e := startPlaces(t, true)
	e.amd64("a", expect.Resources("cpu", fmt.Sprintf("%dm", grown*100), "memory", "8Gi"))
	api := discovery.NewDiscoveryClientForConfigOrDie(e.config).RESTClient()
	count := func() cluster.Counts {
		writes, err := cluster.Writes(e.Context(), api, "pods", "events")
		expect.NoError(e, err)
		return writes
	}
	expectAtMost := func(what string, before cluster.Counts, want cluster.Counts) {
		e.Helper()
		writes := count().Minus(before)
		for name, n := range writes {
			if n > want[name] {
				e.Errorf("%s: %v %s, want at most %v", what, n, name, want[name])
			}
		}
		e.Logf("%s: %v writes: %v", what, writes.Sum(), writes)
	}
	// A dry run, the event of the hold, and what a busy machine may make a few of them repeat:
	// far less than one more write for each guest.
	const others = guests / 4
	before := count()
	e.hold("r1", "rome", 1, pods(set("pods", guests, expect.Resources("cpu", "100m"))))
	e.decided("r1", 1, verdict.ReasonAccepted, "", guests)
	expectAtMost("a hold", before, cluster.Counts{"POST pods": guests + others, "POST pods/binding": guests + others, "POST events": guests + others})

	before = count()
	for i := range guests {
		e.pod("guests-of-rome", fmt.Sprintf("g%d", i), "100m", func(s *corev1.PodSpec) {
			s.PriorityClassName = guest.PriorityClass
			s.SchedulingGates = []corev1.PodSchedulingGate{{Name: broker.GateHandOver}}
		})
	}
	e.eventuallyBound("guests-of-rome", guests)
	e.eventuallyBound(holds, 0)
	expectAtMost("hand-overs", before, cluster.Counts{
		"POST pods": guests + others, "PATCH pods/status": guests + others, "DELETE pods": guests + others, "PATCH pods": guests + others,
		"POST pods/binding": guests + others, "POST events": 2*guests + others,
	})

	before = count()
	e.hold("r1", "rome", 2, pods(set("pods", grown, expect.Resources("cpu", "100m"))))
	e.decided("r1", 2, verdict.ReasonAccepted, "", grown)
	e.eventuallyBound(holds, grown-guests)
	const more = grown - guests
	expectAtMost("growth", before, cluster.Counts{
		"POST pods": more + others, "POST pods/binding": more + others, "POST events": more + guests + others,
	})
	if most := e.inFlight.most.Load(); most < 2 || most > 16 {
		e.Errorf("the agent had up to %d writes in flight, want some at a time, and at most 16", most)
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
	recognizer := inventory.Recognizer{Guest: guestOf, Placeholder: func(pod *corev1.Pod) (string, bool) { return placeholder.ConsumerOf(pod, holds) }}
	options := placeholder.Options{Namespace: holds}
	reconciler := hold.New(nil, nil, nil, nil, hold.Options{Recognizer: recognizer, Placeholders: options})
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
	in := &broker.ProviderInstruction{ObjectMeta: metav1.ObjectMeta{Name: "r1", UID: "r1"}, Spec: broker.ProviderInstructionSpec{ReservationName: "r1", RequesterClusterID: "rome"}}
	held := pods(set("pods", int32(count), requests))
	for i, pod := range placeholder.Make(placeholder.Input{Holds: []placeholder.Hold{{UID: "r1", Name: "r1", Consumer: "rome", Unused: held}}, Options: options}).Create[:holding] {
		pod.UID, pod.Spec.NodeName = types.UID(pod.Name), fmt.Sprint("n", i%nodes)
		tracker.Set(pod)
	}
	return func() (handOvers, created, removed int) { return reconciler.PlanPlaces(tracker, in, held) }
}
