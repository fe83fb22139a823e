package virtualnode

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	testclock "k8s.io/utils/clock/testing"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
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
