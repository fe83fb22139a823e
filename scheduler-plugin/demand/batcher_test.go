package demand_test

import (
	"fmt"
	"slices"
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

func noOthers(_ demand.Key, pending broker.PodSet) []broker.PodSet { return []broker.PodSet{pending} }

func allValid(types.UID, demand.Key) bool { return true }

func TestBatcherMakesOneRequestOfABurst(t *testing.T) {
	clock := clocktesting.NewFakePassiveClock(time.Unix(0, 0))
	b := demand.NewBatcher(clock, windows)
	key := demand.Key{Namespace: "shop", OwnerUID: "web", Shape: "s"}
	add := func(uid types.UID) {
		b.Add(uid, key, metav1.OwnerReference{Name: "web"}, broker.PodSet{Name: demand.PodSetName}, clock.Now())
	}
	at := func(ms int) { clock.SetTime(time.Unix(0, 0).Add(time.Duration(ms) * time.Millisecond)) }
	expectNone := func() {
		t.Helper()
		if requests := b.Due(allValid, noOthers); len(requests) > 0 {
			t.Fatalf("requested too early: %+v", requests)
		}
	}
	expect := func(bound, count int32) {
		t.Helper()
		requests := b.Due(allValid, func(_ demand.Key, pending broker.PodSet) []broker.PodSet {
			pending.Count += bound
			return []broker.PodSet{pending}
		})
		if len(requests) != 1 || requests[0].Key != key || requests[0].Pods() != count || requests[0].Owner.Name != "web" {
			t.Fatalf("want one request for %d pods, got %+v", count, requests)
		}
	}

	add("a")
	at(150)
	add("b")
	at(300)
	expectNone() // not quiet for long enough
	at(350)
	expect(0, 2)
	expectNone() // each request once

	at(1000)
	for ms := 1000; ms < 2000; ms += 100 {
		at(ms)
		add(types.UID(fmt.Sprint(ms)))
		expectNone()
	}
	at(2000) // never quiet, but a second has passed
	expect(3, 2+10+3)

	b.Remove("a")
	b.Remove("unknown")
	b.RequeueAfter(key, time.Second)
	at(2900)
	expectNone()
	at(3000)
	expect(0, 11)

	if next, ok := b.Next(); ok {
		t.Errorf("nothing is due, Next says %s", next)
	}
}

// TestOnlyArrivalsDelayARequest: capacity is requested at once for pods that were there long
// before one of them was found to be unschedulable, since the total has them. Those that are
// found to be so later make at most one request in the longest window, and only pods that
// arrive delay it.
func TestOnlyArrivalsDelayARequest(t *testing.T) {
	start := time.Unix(100, 0)
	clock := clocktesting.NewFakePassiveClock(start)
	b, key := demand.NewBatcher(clock, windows), demand.Key{Namespace: "shop", OwnerUID: "web", Shape: "s"}
	var requested []int
	for ms := range 2000 {
		clock.SetTime(start.Add(time.Duration(ms) * time.Millisecond))
		if ms < 500 && ms%10 == 0 { // tried one after the other
			b.Add(types.UID(fmt.Sprint("old-", ms)), key, metav1.OwnerReference{}, broker.PodSet{}, start.Add(-time.Second))
		}
		if ms == 1000 || ms == 1150 {
			b.Add(types.UID(fmt.Sprint("new-", ms)), key, metav1.OwnerReference{}, broker.PodSet{}, clock.Now())
		}
		if len(b.Due(allValid, noOthers)) > 0 {
			requested = append(requested, ms)
		}
	}
	if want := []int{0, 1010, 1350}; !slices.Equal(requested, want) {
		t.Errorf("requested after %v ms, want %v", requested, want)
	}
}

// TestRequestsOfPodsThatAreCounted: pods that were all there before are tried for 10 s, while
// each write fails and is to be retried: no more than one request in the longest window.
func TestRequestsOfPodsThatAreCounted(t *testing.T) {
	start := time.Unix(100, 0)
	clock := clocktesting.NewFakePassiveClock(start)
	b, key := demand.NewBatcher(clock, windows), demand.Key{Namespace: "shop", OwnerUID: "web", Shape: "s"}
	n := 0
	for ms := range 10_000 {
		clock.SetTime(start.Add(time.Duration(ms) * time.Millisecond))
		if ms%10 == 0 {
			b.Add(types.UID(fmt.Sprint("old-", ms)), key, metav1.OwnerReference{}, broker.PodSet{}, start.Add(-time.Second))
		}
		if len(b.Due(allValid, noOthers)) > 0 {
			n++
			b.RequeueAfter(key, 2*time.Second)
		}
	}
	if n > 11 {
		t.Errorf("%d requests in 10 s, want at most 11", n)
	}
}

// TestRequestedBeforeItsPodsWereGone: a key whose pods come and go one by one is not requested
// each time.
func TestRequestedBeforeItsPodsWereGone(t *testing.T) {
	start := time.Unix(100, 0)
	clock := clocktesting.NewFakePassiveClock(start)
	b, key := demand.NewBatcher(clock, windows), demand.Key{Namespace: "shop", OwnerUID: "web", Shape: "s"}
	n := 0
	for ms := range 200 {
		clock.SetTime(start.Add(time.Duration(ms) * time.Millisecond))
		b.Add("pod", key, metav1.OwnerReference{}, broker.PodSet{}, start.Add(-time.Second))
		n += len(b.Due(allValid, noOthers))
		b.Remove("pod")
	}
	if n > 1 {
		t.Errorf("%d requests in a quiet time", n)
	}
}

// TestBatcherCounts: in any sequence of calls, a request is for exactly the
// pending and the other pods; a pod that was added is requested within the longest
// window; no request is made for a key without pending pods.
func TestBatcherCounts(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		clock := clocktesting.NewFakePassiveClock(time.Unix(0, 0))
		b := demand.NewBatcher(clock, windows)
		keys := []demand.Key{{Namespace: "a", OwnerUID: "x", Shape: "1"}, {Namespace: "a", OwnerUID: "x", Shape: "2"}, {Namespace: "b", OwnerUID: "y", Shape: "1"}}
		pending := map[types.UID]demand.Key{}
		unrequested := map[demand.Key]time.Time{} // since when
		total := func(k demand.Key, pending broker.PodSet) []broker.PodSet {
			return []broker.PodSet{pending, {Name: "others", Count: int32(len(k.OwnerUID))}}
		}
		count := func(k demand.Key) (n int32) {
			for _, key := range pending {
				if key == k {
					n++
				}
			}
			return n
		}
		prune := func() {
			for k := range unrequested {
				if count(k) == 0 {
					delete(unrequested, k)
				}
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"add": func(t *rapid.T) {
				uid := types.UID(rapid.StringMatching(`[a-f]`).Draw(t, "pod"))
				key := rapid.SampledFrom(keys).Draw(t, "key")
				pending[uid] = key
				arrived := clock.Now().Add(-time.Duration(rapid.IntRange(0, 600).Draw(t, "ms since it arrived")) * time.Millisecond)
				b.Add(uid, key, metav1.OwnerReference{}, broker.PodSet{}, arrived)
				if _, since := unrequested[key]; !since {
					unrequested[key] = clock.Now()
				}
				prune()
			},
			"remove": func(t *rapid.T) {
				uid := types.UID(rapid.StringMatching(`[a-f]`).Draw(t, "pod"))
				delete(pending, uid)
				b.Remove(uid)
				prune()
			},
			"pass time": func(t *rapid.T) {
				clock.SetTime(clock.Now().Add(time.Duration(rapid.IntRange(1, 600).Draw(t, "ms")) * time.Millisecond))
			},
			"request": func(t *rapid.T) {
				for _, request := range b.Due(allValid, total) {
					if want := count(request.Key) + int32(len(request.Key.OwnerUID)); request.Pods() != want || count(request.Key) == 0 {
						t.Fatalf("%s: requested %d, want %d", request.Key, request.Pods(), want)
					}
					delete(unrequested, request.Key)
				}
				for key, since := range unrequested {
					if clock.Since(since) >= windows.Longest {
						t.Fatalf("%s has waited since %s", key, since)
					}
				}
			},
			"": func(t *rapid.T) {
				if _, due := b.Next(); due != (len(unrequested) > 0) {
					t.Fatalf("Next says %t, %d keys are not requested", due, len(unrequested))
				}
			},
		})
	})
}

// Pods that do not need the capacity any more are not requested for, nor their key
// without others.
func TestBatcherDropsInvalidPods(t *testing.T) {
	clock := clocktesting.NewFakePassiveClock(time.Unix(0, 0))
	b := demand.NewBatcher(clock, windows)
	key := demand.Key{Namespace: "shop", OwnerUID: "web", Shape: "s"}
	for _, pod := range []types.UID{"a", "b"} {
		b.Add(pod, key, metav1.OwnerReference{Name: "web"}, broker.PodSet{}, clock.Now())
	}
	due := func(valid func(types.UID, demand.Key) bool) []demand.Request {
		b.RequeueAfter(key, 0)
		return b.Due(valid, noOthers)
	}
	if requests := due(func(pod types.UID, _ demand.Key) bool { return pod == "a" }); len(requests) != 1 || requests[0].Pods() != 1 {
		t.Errorf("one of two is valid: got %+v", requests)
	}
	if requests := due(func(types.UID, demand.Key) bool { return false }); len(requests) != 0 || len(b.Pending(key)) != 0 {
		t.Errorf("none is valid: got %+v, pending %v", requests, b.Pending(key))
	}
}
