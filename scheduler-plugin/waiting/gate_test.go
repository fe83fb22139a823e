package waiting

import (
	"fmt"
	"reflect"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"
	"pgregory.net/rapid"

	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand/demandtest"
	"github.com/spillway-dev/spillway/scheduler-plugin/usage"
)

// due opens the gate for pods whose retry is due.
func (g *Gate) due() []*corev1.Pod {
	pods, _ := g.openDue()
	return pods
}

// TestGateOpensForPlaces: as many pods pass as there are places, the most important
// first, and a pod that was tried since a place became free is not tried again for it.
func TestGateOpensForPlaces(t *testing.T) {
	now := clocktesting.NewFakePassiveClock(time.Unix(10_000, 0))
	g := NewGate(now)
	key := demand.Key{Namespace: "shop", OwnerUID: "crunch", Shape: "s"}
	pods := map[string]*corev1.Pod{}
	for i, priority := range []int32{0, 0, 10} {
		pod := demandtest.JobPod("crunch", fmt.Sprint("p", i), "1")
		pod.CreationTimestamp = metav1.NewTime(time.Unix(int64(1000-i), 0))
		pod.Spec.Priority = ptr.To(priority)
		pod.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
		pods[pod.Name] = pod
		g.Close(pod, key, now.Now(), time.Time{})
	}
	passing := func() (names string) {
		for _, name := range []string{"p0", "p1", "p2"} {
			if g.Passes(pods[name]) {
				names += name + " "
			}
		}
		return names
	}
	expectPassing := func(what, want string) {
		t.Helper()
		if got := passing(); got != want {
			t.Errorf("%s: got %q, want %q", what, got, want)
		}
	}
	paris := nodeWith("paris").Node()
	home := nodeWith("").Node()
	home.Status.Allocatable = expect.Resources("cpu", "4", "pods", "10")
	later := func() time.Time {
		now.SetTime(now.Now().Add(time.Second))
		return now.Now()
	}
	expectPassing("at first", "")
	g.openForSlots(key, []slots{{node: paris, free: 1, changedAt: now.Now().Add(-time.Minute)}})
	expectPassing("a slot that was there before", "")
	granted := []slots{{node: paris, free: 1, changedAt: later()}}
	g.openForSlots(key, granted)
	expectPassing("one slot", "p2 ")
	g.openForSlots(key, granted)
	expectPassing("the same slot", "p2 ")
	// One CPU of room is free beside what the woken pod may still need elsewhere.
	room1 := func() []usage.Room {
		return []usage.Room{{RoomID: usage.RoomID{Node: home.Name}, Free: capacity.Vector{corev1.ResourceCPU: 1500, corev1.ResourcePods: 5 * capacity.Unit}, ChangedAt: later(), Need: func(pod *corev1.Pod) (capacity.Vector, bool) {
			return usage.PodAmounts(pod), usage.NodeAdmits(home, pod)
		}}}
	}
	g.OpenForRoom(room1())
	expectPassing("room for one at home: the oldest", "p1 p2 ")
	g.OpenForRoom(room1())
	expectPassing("the same room", "p1 p2 ")
	if unused := g.Close(pods["p1"], key, later(), time.Time{}); unused != (opening{room: usage.RoomID{Node: "home"}}) {
		t.Errorf("the place of a pod that did not fit: got %v", unused)
	}
	tainted := room1()
	home.Spec.Taints = []corev1.Taint{{Key: "dedicated", Effect: corev1.TaintEffectNoSchedule}}
	pods["p0"].Spec.Tolerations, pods["p1"].Spec.Tolerations = nil, nil
	g.OpenForRoom(tainted)
	expectPassing("a taint", "p2 ")
	changed := pods["p0"].DeepCopy()
	if changed.Generation++; !g.Passes(changed) {
		t.Error("a pod whose spec has changed does not pass")
	}
}

// TestGatePlacesAreExchanged: a pod that takes the place of another one of its key leaves it its
// own. Only a place that none needs is unused.
func TestGatePlacesAreExchanged(t *testing.T) {
	now := clocktesting.NewFakePassiveClock(time.Unix(10_000, 0))
	g, key := NewGate(now), demand.Key{Namespace: "shop", OwnerUID: "crunch", Shape: "s"}
	var rooms []usage.Room
	for _, name := range []string{"n0", "n1", "n2"} {
		rooms = append(rooms, usage.Room{
			RoomID: usage.RoomID{Node: name}, Free: capacity.Vector{corev1.ResourceCPU: 1000, corev1.ResourcePods: 5 * capacity.Unit}, ChangedAt: now.Now().Add(time.Minute),
			Need: func(pod *corev1.Pod) (capacity.Vector, bool) { return usage.PodAmounts(pod), true },
		})
	}
	for i := range rooms {
		g.Close(demandtest.JobPod("crunch", fmt.Sprint("p", i), "1"), key, now.Now(), time.Time{})
	}
	uid := map[string]types.UID{}
	for _, pod := range g.OpenForRoom(rooms) {
		uid[g.pods[pod.UID].Opening.room.Node] = pod.UID
	}
	if len(uid) != len(rooms) {
		t.Fatalf("pods are woken for %v, want one for each room", uid)
	}
	for _, step := range []struct {
		pod, room string
		want      opening
	}{
		{pod: "n0", room: "n1"},
		{pod: "n1", room: "n0"},
		{pod: "n2", room: "elsewhere", want: opening{room: usage.RoomID{Node: "n2"}}},
	} {
		if unused := g.Assumed(uid[step.pod], usage.RoomID{Node: step.room}); unused != step.want {
			t.Errorf("the pod for %s is on %s: %v is unused, want %v", step.pod, step.room, unused, step.want)
		}
	}
}

// TestGateAfterALostPlace: room at home that a pod of a gang had and lost is another
// pod's for some time. The gang's pod is woken for a grant, and by its retry.
func TestGateAfterALostPlace(t *testing.T) {
	now := clocktesting.NewFakePassiveClock(time.Unix(10_000, 0))
	g, key, other := NewGate(now), demand.Key{Namespace: "shop", OwnerUID: "gang-x", Shape: "s"}, demand.Key{Namespace: "shop", OwnerUID: "shared", Shape: "s"}
	home := nodeWith("").Node()
	home.Status.Allocatable = expect.Resources("cpu", "4", "pods", "10")
	member, younger := demandtest.JobPod("gang", "member", "1"), demandtest.JobPod("crunch", "younger", "1")
	member.CreationTimestamp, younger.CreationTimestamp = metav1.NewTime(time.Unix(1, 0)), metav1.NewTime(time.Unix(2, 0))
	member.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
	g.Retry(member, key, now.Now())
	g.Close(younger, other, now.Now(), time.Time{})
	wake := func() (names string) {
		now.SetTime(now.Now().Add(time.Second))
		for _, pod := range g.OpenForRoom([]usage.Room{{
			RoomID: usage.RoomID{Node: home.Name}, Free: capacity.Vector{corev1.ResourceCPU: 1000, corev1.ResourcePods: 5 * capacity.Unit}, ChangedAt: now.Now(),
			Need: func(pod *corev1.Pod) (capacity.Vector, bool) {
				return usage.PodAmounts(pod), usage.NodeAdmits(home, pod)
			},
		}}) {
			names += pod.Name
		}
		return names
	}
	if got := wake(); got != "younger" {
		t.Errorf("room wakes %q, want the younger pod", got)
	}
	now.SetTime(now.Now().Add(time.Second))
	if got := g.openForSlots(key, []slots{{node: nodeWith("paris").Node(), free: 1, changedAt: now.Now()}}); len(got) != 1 {
		t.Errorf("a grant wakes %d pods, want the member", len(got))
	}
	g.Retry(member, key, now.Now())
	g.Drop(younger.UID)
	now.SetTime(now.Now().Add(MinRetry))
	if got := g.due(); len(got) != 1 || got[0].Name != "member" {
		t.Errorf("the retry wakes %d pods, want the member", len(got))
	}
}

// TestGateAfterAMissedPlace: a pod that was woken for a place and did not get it is tried
// again soon, because the scheduler may have seen the place later than the gate: some
// times, until it is woken for another place.
func TestGateAfterAMissedPlace(t *testing.T) {
	now := clocktesting.NewFakePassiveClock(time.Unix(10_000, 0))
	g, key := NewGate(now), demand.Key{Namespace: "shop", OwnerUID: "crunch", Shape: "s"}
	home := nodeWith("").Node()
	home.Status.Allocatable = expect.Resources("cpu", "4", "pods", "10")
	pod := demandtest.JobPod("crunch", "p0", "1")
	woken := func(after time.Duration) bool {
		now.SetTime(now.Now().Add(after))
		return len(g.due()) > 0
	}
	free := func(changedAt time.Time) []usage.Room {
		return []usage.Room{{RoomID: usage.RoomID{Node: home.Name}, Free: capacity.Vector{corev1.ResourceCPU: 1000, corev1.ResourcePods: 5 * capacity.Unit}, ChangedAt: changedAt, Need: func(pod *corev1.Pod) (capacity.Vector, bool) {
			return usage.PodAmounts(pod), usage.NodeAdmits(home, pod)
		}}}
	}
	g.Close(pod, key, now.Now(), time.Time{})
	for range 2 {
		now.SetTime(now.Now().Add(2 * SnapshotLag))
		changedAt := now.Now()
		if len(g.OpenForRoom(free(changedAt))) != 1 {
			t.Fatal("room does not wake the pod")
		}
		now.SetTime(now.Now().Add(2 * SnapshotLag))
		g.Close(pod, key, now.Now(), time.Time{})
		if len(g.OpenForRoom(free(changedAt))) != 0 {
			t.Fatal("the same room wakes the pod again at once")
		}
		for _, after := range []time.Duration{1, 4, 16} {
			if woken(after*time.Second-1) || !woken(1) {
				t.Fatalf("it is not woken %d s after the miss", after)
			}
			g.Close(pod, key, now.Now(), time.Time{})
		}
		if woken(MinRetry-1) || g.Passes(pod) {
			t.Fatal("it is woken soon for ever")
		}
	}
}

// TestGateWakesAgain: another plugin may keep a woken pod out of the queue, such as
// preemption until its API calls have ended, and nothing else wakes it then.
func TestGateWakesAgain(t *testing.T) {
	now := clocktesting.NewFakePassiveClock(time.Unix(10_000, 0))
	g, key := NewGate(now), demand.Key{Namespace: "shop", OwnerUID: "crunch", Shape: "s"}
	g.Close(demandtest.JobPod("crunch", "p0", "1"), key, now.Now(), now.Now().Add(time.Hour))
	if len(g.openDecided(key, 0, nil)) != 1 {
		t.Fatal("a decision does not wake the pod")
	}
	for range 3 {
		if len(g.due()) != 0 {
			t.Fatal("it is woken again at once")
		}
		now.SetTime(now.Now().Add(rewakeAfter))
		if len(g.due()) != 1 {
			t.Fatal("it is not woken again")
		}
	}
	g.Assumed("p0", usage.RoomID{Node: "home"})
	now.SetTime(now.Now().Add(rewakeAfter))
	if len(g.due()) != 0 {
		t.Fatal("it is woken though it has a place")
	}
}

// TestGateOpensForAKnownOwner: preemption waits while the owner of a pod is unknown. The pod is tried
// again once it is known.
func TestGateOpensForAKnownOwner(t *testing.T) {
	now := clocktesting.NewFakePassiveClock(time.Unix(1000, 0))
	g, pod := NewGate(now), demandtest.JobPod("crunch", "crunch-0", "1")
	key := demand.Key{Namespace: pod.Namespace, OwnerUID: "crunch", Shape: "1"}
	if g.Resolve(pod, key) {
		t.Error("a pod that does not wait was woken")
	}
	g.Close(pod, UnresolvedKey(pod), now.Now(), now.Now().Add(10*time.Second))
	if g.Passes(pod) {
		t.Error("the gate is open while the owner is unknown")
	}
	if !g.Resolve(pod, key) || !g.Passes(pod) {
		t.Error("the gate is closed although the owner is known")
	}
	first := g.Since(pod.UID)
	now.SetTime(now.Now().Add(time.Second))
	g.Close(pod, key, now.Now(), time.Time{})
	if g.Resolve(pod, key) || g.Passes(pod) {
		t.Error("a pod was woken whose key is known")
	}
	if !g.Since(pod.UID).Equal(first) {
		t.Error("the time in which it did not fit began again")
	}
}

// TestGateKnowsTheLatestSpec: a pod whose spec changes is tried with the new spec, also
// if the queue of the scheduler has tried the former one again in between.
func TestGateKnowsTheLatestSpec(t *testing.T) {
	now := clocktesting.NewFakePassiveClock(time.Unix(10_000, 0))
	g, key := NewGate(now), demand.Key{Namespace: "shop", OwnerUID: "crunch", Shape: "s"}
	former := demandtest.JobPod("crunch", "p0", "1")
	tolerant := former.DeepCopy()
	tolerant.Generation++
	g.Close(former, key, now.Now(), time.Time{})
	if g.Observe(former) || g.Passes(former) {
		t.Error("the same spec opens the gate")
	}
	if !g.Observe(tolerant) || !g.Passes(former) {
		t.Error("another spec does not open the gate")
	}
	g.Close(former, key, now.Now(), time.Time{})
	if !g.Stale(former.UID) || !g.Passes(former) {
		t.Error("a cycle of the former spec closes the gate for the new one")
	}
	g.Close(tolerant, key, now.Now(), time.Time{})
	if g.Stale(former.UID) || g.Passes(tolerant) {
		t.Error("a cycle of the new spec does not close the gate")
	}
}

// TestGateHoldsUntriedPods: a pod is not tried, for a short time, if another one of its key
// and of no lower priority has just not fit and waits. A place opens the gate for it.
func TestGateHoldsUntriedPods(t *testing.T) {
	key, other := demand.Key{Namespace: "shop", OwnerUID: "crunch", Shape: "s"}, demand.Key{Namespace: "shop", OwnerUID: "crunch", Shape: "l"}
	home := nodeWith("").Node()
	home.Status.Allocatable = expect.Resources("cpu", "4", "pods", "10")
	for name, tc := range map[string]struct {
		of       demand.Key
		after    time.Duration
		priority int32
		before   func(*Gate)
		holds    bool
	}{
		"just now":            {of: key, holds: true},
		"a moment ago":        {of: key, after: MaxHold - 1, holds: true},
		"before":              {of: key, after: MaxHold},
		"of another shape":    {of: other},
		"more important":      {of: key, priority: 1},
		"less important":      {of: key, priority: -1, holds: true},
		"the other is gone":   {of: key, before: func(g *Gate) { g.Drop("tried") }},
		"it was tried itself": {of: key, before: func(g *Gate) { g.Track(demandtest.JobPod("crunch", "untried", "1"), key) }},
	} {
		t.Run(name, func(t *testing.T) {
			now := clocktesting.NewFakePassiveClock(time.Unix(10_000, 0))
			g, pod := NewGate(now), demandtest.JobPod("crunch", "untried", "1")
			pod.Spec.Priority = &tc.priority
			began := now.Now()
			now.SetTime(began.Add(10 * time.Millisecond))
			g.Close(demandtest.JobPod("crunch", "tried", "1"), key, began, time.Time{})
			now.SetTime(now.Now().Add(tc.after))
			if tc.before != nil {
				tc.before(g)
			}
			if held := g.Hold(pod, tc.of); held != tc.holds || g.Passes(pod) == held {
				t.Fatalf("held: %t, want %t; passes: %t", held, tc.holds, g.Passes(pod))
			} else if !held {
				return
			}
			heldAt := now.Now()
			// Room since the other pod was tried is seen, whenever that was.
			free := usage.Room{RoomID: usage.RoomID{Node: home.Name}, Free: capacity.Vector{corev1.ResourceCPU: 1000, corev1.ResourcePods: 5 * capacity.Unit}, ChangedAt: began,
				Selects: func(pod *corev1.Pod) bool { return pod.Name == "untried" },
				Need: func(pod *corev1.Pod) (capacity.Vector, bool) {
					return usage.PodAmounts(pod), usage.NodeAdmits(home, pod)
				}}
			if got := g.OpenForRoom([]usage.Room{free}); len(got) != 1 || !g.Passes(pod) {
				t.Errorf("room wakes %d pods, want the one that is held", len(got))
			}
			g.Drop(pod.UID)
			g.Hold(pod, tc.of)
			if now.SetTime(heldAt.Add(MaxHold - 1)); len(g.due()) != 0 {
				t.Error("it is woken too early")
			}
			if now.SetTime(heldAt.Add(MaxHold)); len(g.due()) != 1 || !g.Passes(pod) {
				t.Error("it is held for longer")
			}
			if cycles := g.pods[pod.UID].cycles(); cycles != 0 {
				t.Errorf("%d cycles, and it was not tried", cycles)
			}
			g.Close(pod, tc.of, now.Now(), time.Time{})
			if w := g.pods[pod.UID]; w.cycles() != 1 || w.untried || !w.since.Equal(heldAt) || !w.retryAt.Equal(now.Now().Add(MinRetry)) {
				t.Errorf("after its first cycle: %+v", w)
			}
		})
	}
}

// TestGateNeverKeepsAPod: whatever happens, a pod passes and is woken at the latest maxRetry
// after its last cycle, one that waits for a decision as soon as that is due, and one that
// was not tried yet after maxHold.
func TestGateNeverKeepsAPod(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		now := clocktesting.NewFakePassiveClock(time.Unix(10_000, 0))
		g := NewGate(now)
		pods, former := map[types.UID]*corev1.Pod{}, map[types.UID]*corev1.Pod{}
		// due is when a pod that waits must pass and have been woken.
		due, woken := map[types.UID]time.Time{}, map[types.UID]bool{}
		for i := range 3 {
			pod := demandtest.JobPod("crunch", fmt.Sprint("p", i), "1")
			pod.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
			pods[pod.UID], former[pod.UID] = pod, pod
		}
		any := rapid.SampledFrom([]types.UID{"p0", "p1", "p2"})
		key := demand.Key{Namespace: "shop", OwnerUID: "crunch", Shape: "s"}
		waits := func(uid types.UID, longest time.Duration) { due[uid], woken[uid] = now.Now().Add(longest), false }
		wake := func(all []*corev1.Pod) {
			for _, pod := range all {
				woken[pod.UID] = true
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"close": func(t *rapid.T) {
				uid, decision, of := any.Draw(t, "pod"), time.Time{}, key
				waits(uid, MaxRetry)
				if rapid.Bool().Draw(t, "undecided") {
					waits(uid, 10*time.Second)
					decision = due[uid]
				}
				pod := rapid.SampledFrom([]*corev1.Pod{pods[uid], former[uid]}).Draw(t, "spec")
				if rapid.Bool().Draw(t, "owner unknown") {
					of = UnresolvedKey(pod)
				}
				g.Close(pod, of, now.Now(), decision)
				woken[uid] = g.Stale(uid)
			},
			"hold": func(t *rapid.T) {
				if uid := any.Draw(t, "pod"); g.Hold(pods[uid], key) {
					waits(uid, MaxHold)
				}
			},
			"track": func(t *rapid.T) {
				uid := any.Draw(t, "pod")
				if g.pods[uid] == nil {
					waits(uid, MinRetry)
				}
				g.Track(pods[uid], key)
			},
			"drop": func(t *rapid.T) {
				uid := any.Draw(t, "pod")
				g.Drop(uid)
				delete(due, uid)
			},
			"assumed": func(t *rapid.T) {
				uid := any.Draw(t, "pod")
				if w := g.pods[uid]; w != nil && w.open {
					waits(uid, MaxRetry)
				}
				g.Assumed(uid, usage.RoomID{Node: rapid.SampledFrom([]string{"home", ""}).Draw(t, "room")})
			},
			"retry": func(t *rapid.T) {
				uid := any.Draw(t, "pod")
				if w := g.pods[uid]; w == nil || w.open {
					waits(uid, MinRetry)
				}
				g.Retry(pods[uid], key, now.Now())
			},
			"observe": func(t *rapid.T) {
				uid := any.Draw(t, "pod")
				former[uid], pods[uid] = pods[uid], pods[uid].DeepCopy()
				pods[uid].Generation++
				if g.Observe(pods[uid]) {
					woken[uid] = true
				}
			},
			"resolve": func(t *rapid.T) {
				if uid := any.Draw(t, "pod"); g.Resolve(pods[uid], key) {
					woken[uid] = true
				}
			},
			"slots": func(t *rapid.T) {
				wake(g.openForSlots(key, []slots{{node: nodeWith("paris").Node(), free: int32(rapid.IntRange(-1, 3).Draw(t, "free")), changedAt: now.Now()}}))
			},
			"room": func(t *rapid.T) {
				free := capacity.Vector{corev1.ResourceCPU: int64(rapid.IntRange(0, 3000).Draw(t, "free")), corev1.ResourcePods: 5 * capacity.Unit}
				wake(g.OpenForRoom([]usage.Room{{RoomID: usage.RoomID{Node: "home"}, Free: free, ChangedAt: now.Now(), Need: func(pod *corev1.Pod) (capacity.Vector, bool) { return usage.PodAmounts(pod), true }}}))
			},
			"decided": func(*rapid.T) { wake(g.openDecided(key, 0, nil)) },
			"time passes": func(t *rapid.T) {
				now.SetTime(now.Now().Add(time.Duration(rapid.SampledFrom([]int{1, 2, 10, 100}).Draw(t, "seconds")) * time.Second))
				wake(g.due())
			},
			"": func(t *rapid.T) {
				for uid, at := range due {
					if !now.Now().Before(at) && (!woken[uid] || !g.Passes(pods[uid])) {
						t.Fatalf("%s was woken: %t, and passes: %t, at %s, due at %s", uid, woken[uid], g.Passes(pods[uid]), now.Now(), at)
					}
				}
				if got, want := g.opened, recountOpened(t, g); !reflect.DeepEqual(got, want) {
					t.Fatalf("places are kept for %v, want %v", got, want)
				}
			},
		})
	})
}

// recountOpened returns the pods that the gate was opened for a place for, from those that it
// knows.
func recountOpened(t *rapid.T, g *Gate) map[opening]map[*waitingPod]struct{} {
	opened := map[opening]map[*waitingPod]struct{}{}
	for _, w := range g.pods {
		if w.Opening == (opening{}) {
			continue
		}
		if !w.open || w.Opening.room == (usage.RoomID{}) && w.Opening.key != w.Key {
			t.Fatalf("a place is kept for %+v", w)
		}
		if opened[w.Opening] == nil {
			opened[w.Opening] = map[*waitingPod]struct{}{}
		}
		opened[w.Opening][w] = struct{}{}
	}
	return opened
}
