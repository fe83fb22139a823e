package virtualnode

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	testclock "k8s.io/utils/clock/testing"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/fake"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// A virtual node counts as shrunk only a while after it was last known or asked to
// carry more.
func TestCarriesAtMost(t *testing.T) {
	const delay = 2 * time.Second
	done, waiting := peering.Done("Done", ""), peering.Waiting("Resizing", "")
	ready, resizing := progress{peered: done, node: done}, progress{peered: done, node: waiting}
	type step struct {
		pods     int32
		progress progress
		noNode   bool
	}
	for name, tc := range map[string]struct {
		reason string
		steps  []step
		after  time.Duration
		want   bool
	}{
		"unknown":          {reason: "nothing is known after a restart", after: time.Hour},
		"carries one":      {reason: "the delay is over", steps: []step{{1, ready, false}}, after: delay, want: true},
		"just shrunk":      {reason: "a pod may be on its way", steps: []step{{3, ready, false}, {1, ready, false}}, after: delay - 1},
		"carries three":    {reason: "that is more", steps: []step{{3, ready, false}}, after: delay},
		"shrinking":        {reason: "it still carries three", steps: []step{{3, ready, false}, {1, resizing, false}}, after: delay},
		"growing":          {reason: "the node may carry three already", steps: []step{{1, ready, false}, {3, resizing, false}}, after: delay},
		"unknown, resized": {reason: "what it carried before a restart is not known", steps: []step{{1, resizing, false}}, after: delay},
		"no node":          {reason: "carries nothing", steps: []step{{3, resizing, true}}, after: delay, want: true},
	} {
		t.Run(name, func(t *testing.T) {
			clock := testclock.NewFakePassiveClock(time.Unix(1000, 0))
			r := New(nil, nil, nil, nil, Options{ShrinkDelay: delay, Clock: clock})
			in := &broker.ReservationInstruction{ObjectMeta: metav1.ObjectMeta{UID: "in"}, Spec: broker.ReservationInstructionSpec{TargetClusterID: "paris"}}
			for _, s := range tc.steps {
				clock.SetTime(clock.Now().Add(time.Hour))
				in.Spec.PodSets = []broker.PodSet{{Count: s.pods}}
				snapshot := &Snapshot{Provider: "paris", Node: &corev1.Node{}, Grants: []Grant{{Instruction: in, Reservation: &broker.Reservation{}, Limit: -1}}}
				if s.noNode {
					snapshot.Node = nil
				}
				r.recordCarried(snapshot, s.progress)
			}
			clock.SetTime(clock.Now().Add(tc.after))
			if got := r.carriesAtMost(in, 1); got != tc.want {
				t.Errorf("%s: got %v", tc.reason, got)
			}
		})
	}
}

// A release ends with its Reservation, also if another has taken its name.
func TestReleaseOfReplacedReservation(t *testing.T) {
	r := New(nil, nil, nil, nil, Options{})
	name := types.NamespacedName{Namespace: "shop", Name: "web"}
	of := func(uid types.UID) *broker.Reservation {
		return &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name, UID: uid}}
	}
	r.SetRelease(name, "old", []broker.RetainedPods{{Cluster: "paris"}})
	if r.releaseOf(of("old")) == nil || r.releaseOf(of("new")) != nil {
		t.Error("a release counts for its own Reservation only")
	}
	r.SetRelease(name, "new", nil)
	if r.releaseOf(of("old")) != nil {
		t.Error("the release of the Reservation that is gone is still remembered")
	}
}

// TestDriverIsSkipped: the driver is not called again while the same plan is in effect and
// nothing has changed that it observes.
func TestDriverIsSkipped(t *testing.T) {
	driver := fake.NewDriver()
	r := New(nil, nil, nil, driver, Options{})
	pods := func(count int32) []Grant {
		return []Grant{{Limit: -1, Reservation: &broker.Reservation{}, Instruction: &broker.ReservationInstruction{
			Spec: broker.ReservationInstructionSpec{SourceName: "web", PodSets: []broker.PodSet{{Name: "pods", Count: count}}}}}}
	}
	node := func(ready corev1.ConditionStatus, heartbeat int64) *corev1.Node {
		return &corev1.Node{ObjectMeta: metav1.ObjectMeta{UID: "node"}, Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{
			{Type: corev1.NodeReady, Status: ready, LastHeartbeatTime: metav1.Unix(heartbeat, 0)}}}}
	}
	state, s := r.state("paris"), &Snapshot{Provider: "paris", Grants: pods(2)}
	for _, step := range []struct {
		name   string
		change func()
		called bool
	}{
		{"the first time", func() {}, true},
		{"nothing has changed", func() {}, false},
		{"the node appears", func() { s.Node = node(corev1.ConditionTrue, 1) }, true},
		{"its heartbeat", func() { s.Node = node(corev1.ConditionTrue, 2) }, false},
		{"it is not ready", func() { s.Node = node(corev1.ConditionFalse, 3) }, true},
		{"the plan grows", func() { s.Grants = pods(3) }, true},
		{"the driver observed a change", func() { r.Enqueue("paris") }, true},
		{"another provider changed", func() { r.Enqueue("berlin") }, false},
		{"another peer key", func() { state.peer.PeerKey = "other" }, true},
		{"a change while the driver waits", func() { driver.Hold("EnsureCapacity", peering.Waiting("Growing", "")); r.Enqueue("paris") }, true},
		{"it still waits", func() {}, true},
		{"it is done", func() { driver.Free("EnsureCapacity") }, true},
		{"nothing has changed since", func() {}, false},
	} {
		step.change()
		before := len(driver.Calls("EnsureCapacity"))
		p := r.ensure(t.Context(), state, s)
		if called := len(driver.Calls("EnsureCapacity")) > before; called != step.called {
			t.Errorf("%s: the driver is called: %t, want %t", step.name, called, step.called)
		}
		if waits := len(driver.Calls("EnsureCapacity")) > 0 && p.node.Reason == "Growing"; !waits && !p.ready() {
			t.Errorf("%s: not ready: %+v", step.name, p)
		}
	}
}

// TestResyncCallsTheDriver: tokens are renewed without any other event.
func TestResyncCallsTheDriver(t *testing.T) {
	driver := fake.NewDriver()
	_, err := driver.EnsurePeering(t.Context(), peering.Peer{ClusterID: "paris"})
	expect.NoError(t, err)
	r := New(nil, nil, nil, driver, Options{})
	go r.resync(t.Context())
	expect.Eventually(t, "paris to be enqueued", func() (bool, string) { return len(r.providers) == 1, "" })
	if !r.takeChanged("paris") {
		t.Error("the driver is not called while the same plan is in effect")
	}
}
