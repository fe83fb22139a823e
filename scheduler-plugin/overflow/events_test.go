package overflow

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// TestCappedOnce: pods that arrive one by one under a limit do not make an event on all others
// each time, but a changed limit does.
func TestCappedOnce(t *testing.T) {
	pending, name := newPendingPods(), types.NamespacedName{Namespace: "shop", Name: "web-0"}
	pending.add("web-0", name)
	for _, tc := range []struct {
		pods, allowed int32
		short         corev1.ResourceName
		want          bool
	}{{4, 2, "cpu", true}, {5, 2, "cpu", false}, {6, 3, "cpu", true}, {6, 3, "memory", true}, {7, 3, "memory", false}} {
		request := demand.Request{Key: demand.Key{Namespace: "shop"}, PodSets: []broker.PodSet{{Count: tc.pods}}}
		if recorded := pending.announce("web-0", capped("team-a", request, tc.allowed, tc.short, nil)); recorded != tc.want {
			t.Errorf("%d of %d pods for %s: recorded %t, want %t", tc.allowed, tc.pods, tc.short, recorded, tc.want)
		}
	}
}
