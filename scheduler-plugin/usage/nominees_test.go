package usage

import (
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"
	"pgregory.net/rapid"
)

// TestNominees: after any events, the nominees are those of a recount of the pods.
func TestNominees(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		now := clocktesting.NewFakePassiveClock(time.Unix(1000, 0))
		n := newNominees(now)
		truth, boundAt := map[types.UID]*corev1.Pod{}, map[types.UID]time.Time{}
		nodes := []string{"home", "away"}
		node, uid := rapid.SampledFrom(append(nodes, "")), rapid.SampledFrom([]types.UID{"a", "b", "c"})
		keeps := func(uid types.UID) (node string) {
			pod := truth[uid]
			switch at, bound := boundAt[uid]; {
			case pod == nil:
			case bound && now.Now().Before(at.Add(SettleFor)):
				return pod.Spec.NodeName
			case IsNominee(pod):
				return pod.Status.NominatedNodeName
			}
			return ""
		}
		// freed is what a change reports: never the expiry of a pod that is bound.
		change := func(t *rapid.T, uid types.UID, apply func() string) {
			before := keeps(uid)
			got := apply()
			if want := before; before != "" && keeps(uid) == before {
				if got != "" {
					t.Fatalf("freed %q, and %s still keeps its room on %s", got, uid, want)
				}
			} else if got != want {
				t.Fatalf("freed %q, want %q", got, want)
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"set": func(t *rapid.T) {
				id := uid.Draw(t, "pod")
				pod := podOf("guests", string(id), rapid.SampledFrom([]string{"1", "2"}).Draw(t, "cpu"))
				pod.Spec.Priority = ptr.To(rapid.Int32Range(0, 2).Draw(t, "priority"))
				pod.Status.NominatedNodeName, pod.Spec.NodeName = node.Draw(t, "nominated"), node.Draw(t, "node")
				if before := truth[id]; before != nil && before.Spec.NodeName != "" {
					pod.Spec.NodeName = before.Spec.NodeName // it never changes
				}
				if rapid.IntRange(0, 3).Draw(t, "ends") == 0 {
					pod.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)}
				}
				if rapid.IntRange(0, 3).Draw(t, "ended") == 0 {
					pod.Status.Phase = corev1.PodSucceeded
				}
				change(t, id, func() string {
					kept, terminal := keeps(id), pod.Status.Phase == corev1.PodSucceeded
					_, bound := boundAt[id]
					truth[id] = pod
					switch {
					case kept == "" || terminal || pod.Spec.NodeName != kept:
						delete(boundAt, id)
					case !bound:
						boundAt[id] = now.Now()
					}
					return n.Set(pod)
				})
			},
			"remove": func(t *rapid.T) {
				id := uid.Draw(t, "pod")
				change(t, id, func() string {
					delete(truth, id)
					delete(boundAt, id)
					return n.Remove(id)
				})
			},
			"time passes": func(t *rapid.T) {
				now.SetTime(now.Now().Add(time.Duration(rapid.IntRange(1, 6).Draw(t, "seconds")) * time.Second))
			},
			"": func(t *rapid.T) {
				some := false
				for _, name := range nodes {
					var want []string
					for id := range truth {
						if keeps(id) == name {
							want = append(want, fmt.Sprint(*truth[id].Spec.Priority, " ", PodAmounts(truth[id])))
						}
					}
					var got []string
					for _, other := range n.On(name, func(types.UID) bool { return false }) {
						got = append(got, fmt.Sprint(other.priority, " ", other.amounts))
					}
					slices.Sort(got)
					if slices.Sort(want); !slices.Equal(got, want) {
						t.Fatalf("on %s: got %v, want %v", name, got, want)
					}
					some = some || len(want) > 0
				}
				if some && !n.Some.Load() {
					t.Fatal("Filter does not look at them")
				}
				n.Set(podOf("guests", "d", "1"))
				if n.Some.Load() != some || len(n.bound) > len(n.pods) {
					t.Fatalf("there are some: %t, want %t; %d bound of %d", n.Some.Load(), some, len(n.bound), len(n.pods))
				}
			},
		})
	})
}
