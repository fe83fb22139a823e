package demand_test

import (
	"fmt"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
	"pgregory.net/rapid"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

var windows = demand.Windows{Quiet: 200 * time.Millisecond, Longest: time.Second}

func nobody(demand.Key) int32 { return 0 }

func TestBatcherMakesOneAskOfABurst(t *testing.T) {
	clock := clocktesting.NewFakePassiveClock(time.Unix(0, 0))
	b := demand.NewBatcher(clock, windows)
	key := demand.Key{Namespace: "shop", OwnerUID: "web", Shape: "s"}
	note := func(uid types.UID) {
		b.Note(uid, key, metav1.OwnerReference{Name: "web"}, broker.PodSet{Name: demand.PodSetName})
	}
	at := func(ms int) { clock.SetTime(time.Unix(0, 0).Add(time.Duration(ms) * time.Millisecond)) }
	expectNone := func() {
		t.Helper()
		if asks := b.Due(nobody); len(asks) > 0 {
			t.Fatalf("asked too soon: %+v", asks)
		}
	}
	expect := func(bound, count int32) {
		t.Helper()
		asks := b.Due(func(demand.Key) int32 { return bound })
		if len(asks) != 1 || asks[0].Key != key || asks[0].PodSet.Count != count || asks[0].Owner.Name != "web" {
			t.Fatalf("want one ask for %d pods, got %+v", count, asks)
		}
	}

	note("a")
	at(150)
	note("b")
	at(300)
	expectNone() // not quiet for long enough
	at(350)
	expect(0, 2)
	expectNone() // each ask once

	at(1000)
	for ms := 1000; ms < 2000; ms += 100 {
		at(ms)
		note(types.UID(fmt.Sprint(ms)))
		expectNone()
	}
	at(2000) // never quiet, but a second has passed
	expect(3, 2+10+3)

	b.Forget("a")
	b.Forget("unheard of")
	b.Again(key, time.Second)
	at(2900)
	expectNone()
	at(3000)
	expect(0, 11)

	if next, ok := b.Next(); ok {
		t.Errorf("nothing is due, Next says %s", next)
	}
}

// TestBatcherCounts: whatever happens, an ask is for exactly the pods that wait
// and the bound ones; a pod that was noted is asked for within the longest
// window; nothing is asked for nobody.
func TestBatcherCounts(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		clock := clocktesting.NewFakePassiveClock(time.Unix(0, 0))
		b := demand.NewBatcher(clock, windows)
		keys := []demand.Key{{Namespace: "a", OwnerUID: "x", Shape: "1"}, {Namespace: "a", OwnerUID: "x", Shape: "2"}, {Namespace: "b", OwnerUID: "y", Shape: "1"}}
		waiting := map[types.UID]demand.Key{}
		unasked := map[demand.Key]time.Time{} // since when
		bound := func(k demand.Key) int32 { return int32(len(k.OwnerUID)) }
		count := func(k demand.Key) (n int32) {
			for _, key := range waiting {
				if key == k {
					n++
				}
			}
			return n
		}
		settle := func() {
			for k := range unasked {
				if count(k) == 0 {
					delete(unasked, k)
				}
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"note": func(t *rapid.T) {
				uid := types.UID(rapid.StringMatching(`[a-f]`).Draw(t, "pod"))
				key := rapid.SampledFrom(keys).Draw(t, "key")
				waiting[uid] = key
				b.Note(uid, key, metav1.OwnerReference{}, broker.PodSet{})
				if _, since := unasked[key]; !since {
					unasked[key] = clock.Now()
				}
				settle()
			},
			"forget": func(t *rapid.T) {
				uid := types.UID(rapid.StringMatching(`[a-f]`).Draw(t, "pod"))
				delete(waiting, uid)
				b.Forget(uid)
				settle()
			},
			"pass time": func(t *rapid.T) {
				clock.SetTime(clock.Now().Add(time.Duration(rapid.IntRange(1, 600).Draw(t, "ms")) * time.Millisecond))
			},
			"ask": func(t *rapid.T) {
				for _, ask := range b.Due(bound) {
					if want := count(ask.Key) + bound(ask.Key); ask.PodSet.Count != want || count(ask.Key) == 0 {
						t.Fatalf("%s: asked for %d, want %d", ask.Key, ask.PodSet.Count, want)
					}
					delete(unasked, ask.Key)
				}
				for key, since := range unasked {
					if clock.Since(since) >= windows.Longest {
						t.Fatalf("%s has waited since %s", key, since)
					}
				}
			},
			"": func(t *rapid.T) {
				if _, due := b.Next(); due != (len(unasked) > 0) {
					t.Fatalf("Next says %t, %d keys are not asked for", due, len(unasked))
				}
			},
		})
	})
}
