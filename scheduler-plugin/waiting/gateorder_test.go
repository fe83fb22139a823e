package waiting

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand/demandtest"
	"github.com/spillway-dev/spillway/scheduler-plugin/usage"
)

// crowdAtGate returns a gate that is closed for many pods of some keys, the oldest first.
func crowdAtGate(pods, keys int) (*Gate, *clocktesting.FakePassiveClock) {
	now := clocktesting.NewFakePassiveClock(time.Unix(100_000, 0))
	g := NewGate(now)
	for i := range pods {
		pod := demandtest.JobPod("crunch", fmt.Sprintf("p%05d", i), "1")
		pod.CreationTimestamp = metav1.NewTime(time.Unix(int64(i), 0))
		g.Close(pod, demand.Key{Namespace: "shop", OwnerUID: types.UID(fmt.Sprint("owner-", i%keys)), Shape: "s"}, now.Now(), time.Time{})
	}
	now.SetTime(now.Now().Add(time.Second))
	return g, now
}

// roomFor returns the room for some pods of one CPU each. asked counts what is computed.
func roomFor(pods int64, changedAt time.Time, asked *int) []usage.Room {
	return []usage.Room{{RoomID: usage.RoomID{Node: "home-1"}, Free: capacity.Vector{corev1.ResourceCPU: pods * 1000, corev1.ResourcePods: 110 * capacity.Unit}, ChangedAt: changedAt, Need: func(pod *corev1.Pod) (capacity.Vector, bool) {
		*asked++
		return usage.PodAmounts(pod), true
	}}}
}

// forbid makes the gate fail if it looks at some of its pods.
func forbid(g *Gate, line []*waitingPod) {
	for i, w := range line {
		g.pods[w.Pod.UID], line[i] = nil, nil
	}
}

// TestRoomConcernsFewPods: for room on a node, the gate looks at the pods that get it, and at
// the next of each key, however many wait.
func TestRoomConcernsFewPods(t *testing.T) {
	const keys = 10
	for name, tc := range map[string]struct{ free, asked int }{
		"for none": {0, keys}, "for one": {1, 1 + keys}, "for twelve": {12, 12 + keys},
	} {
		t.Run(name, func(t *testing.T) {
			g, now := crowdAtGate(1000, keys)
			// Of each key, it may look at those that get a place, one that gets none, and the next one.
			mayLook := tc.free/keys + 1 + 2
			for _, line := range g.byKey {
				forbid(g, line[mayLook:])
			}
			asked := 0
			woken := g.OpenForRoom(roomFor(int64(tc.free), now.Now(), &asked))
			if len(woken) != tc.free || asked != tc.asked {
				t.Errorf("%d pods are woken and %d are looked at, want %d and %d", len(woken), asked, tc.free, tc.asked)
			}
			for i, pod := range woken {
				if want := fmt.Sprintf("p%05d", i); pod.Name != want {
					t.Errorf("%s is woken, want %s", pod.Name, want)
				}
			}
		})
	}
}

// TestSlotConcernsFewPods: for a slot of a grant, the gate looks at the pod that gets it.
func TestSlotConcernsFewPods(t *testing.T) {
	g, now := crowdAtGate(1000, 1)
	for key, line := range g.byKey {
		line[0].Pod.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
		forbid(g, line[1:])
		if woken := g.openForSlots(key, []slots{{node: nodeWith("paris").Node(), free: 1, changedAt: now.Now()}}); len(woken) != 1 || woken[0].Name != "p00000" {
			t.Errorf("%d pods are woken, want the oldest", len(woken))
		}
	}
}

// BenchmarkOpenForRoom: what a node costs that has become free for one pod, or for none, while
// pods wait.
func BenchmarkOpenForRoom(b *testing.B) {
	for _, size := range []struct{ pods, keys int }{{1000, 1}, {10000, 1}, {10000, 1000}} {
		for _, free := range []int64{0, 1} {
			b.Run(fmt.Sprintf("%d pods of %d keys, room for %d", size.pods, size.keys, free), func(b *testing.B) {
				g, now := crowdAtGate(size.pods, size.keys)
				b.ReportAllocs()
				for asked := 0; b.Loop(); {
					for _, pod := range g.OpenForRoom(roomFor(free, now.Now(), &asked)) {
						g.Close(pod, g.pods[pod.UID].Key, now.Now().Add(-time.Second), time.Time{})
					}
				}
			})
		}
	}
}
