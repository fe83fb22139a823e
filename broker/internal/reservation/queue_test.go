package reservation

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/commit"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
	"github.com/spillway-dev/spillway/broker/internal/plan"
	"github.com/spillway-dev/spillway/broker/internal/queue"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// nodes makes a cluster of several nodes of one size.
func nodes(count int32, cpu string) func(*broker.ClusterAdvertisement) {
	return func(ad *broker.ClusterAdvertisement) {
		total := cpus(cpu)
		total.CPU.Mul(int64(count))
		ad.Spec.Resources.Allocatable = total
		ad.Spec.NodeClasses[0].FreeShapes = []broker.FreeShape{{Nodes: count, Free: cpus(cpu), Pods: 100}}
	}
}

// A request that could not be placed if everything reserved were free holds back no other.
func TestUnplaceableHoldsBackNobody(t *testing.T) {
	for name, ask := range map[string]func(h *hub){
		"a pod that is larger than any node": func(h *hub) { h.ask("large", 1, "8") },
		"a gang that is larger than all clusters": func(h *hub) {
			h.ask("large", 9, "4", func(s *broker.ReservationSpec) { s.MinAvailable = 9 })
		},
		"a thousand of them": func(h *hub) {
			for i := range 100 {
				h.ask(fmt.Sprint("large-", i), 1, "8")
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHub(t)
			for _, id := range []string{"berlin", "paris"} {
				h.advertise(id, "16")
				h.change(id, nodes(4, "4"))
			}
			ask(h)
			h.advertise("berlin", "16")
			h.advertise("paris", "16")
			h.ask("small", 8, "4")
			if got := h.reservations["small"].Status.Summary; got != "8 of 8 pods: 4 in berlin, 4 in paris" {
				t.Errorf("the small one has %s", got)
			}
		})
	}
}

// Room is kept for the first of the queue that could be placed. Those behind it may be overtaken
// until they are the first.
func TestRoomIsKeptForTheFirst(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "16")
	h.change("paris", holdings(3))
	h.advertise("berlin", "4")
	h.change("berlin", holdings(2))
	h.ask("unplaceable", 1, "20")
	h.ask("first", 1, "4", func(s *broker.ReservationSpec) { s.TargetClusterID = "berlin" })
	h.ask("second", 1, "14")
	h.ask("small", 1, "2")
	h.expectPods("paris", "small", 1, 0)
	h.change("berlin", holdings(0))
	h.reconcile("first")
	h.expectPods("berlin", "first", 1, 0)
	h.ask("later", 1, "2")
	h.expectPods("paris", "later", 0, 0)
}

// What is held of a cluster: that many holds of another consumer, of 2 CPUs each.
func holdings(count int) func(*broker.ClusterAdvertisement) {
	return func(ad *broker.ClusterAdvertisement) {
		ad.Status.Holds = slices.DeleteFunc(ad.Status.Holds, func(h broker.Hold) bool { return h.Requester == "oslo" })
		for i := range count {
			name := fmt.Sprint("held-", i)
			ad.Status.Holds = append(ad.Status.Holds, broker.Hold{
				ReservationUID: types.UID(name), ReservationName: name, Requester: "oslo", Attempt: 1,
				Promised: capacity.OfPodSets([]broker.PodSet{{Name: "pods", Count: 1, Requests: cpus("2")}}),
			})
		}
	}
}

// A request does not keep capacity free for longer than keepFreeFor, however large and urgent
// it is.
func TestIdleCapacityIsNotKeptIndefinitely(t *testing.T) {
	gang := func(s *broker.ReservationSpec) { s.MinAvailable, s.Priority = 16, 1000 }
	h := newHub(t)
	h.settings.KeepFreeFor = 10 * time.Minute
	h.advertise("paris", "16")
	h.change("paris", holdings(2)) // they stay
	h.ask("gang", 16, "1", gang)
	h.ask("small", 1, "1")
	h.expectPods("paris", "small", 0, 0)
	for range 9 {
		h.clock.Step(time.Minute)
		h.advertise("paris", "16")
		h.reconcile("gang")
		h.reconcile("small")
		h.expectPods("paris", "small", 0, 0)
	}
	h.clock.Step(time.Minute)
	h.advertise("paris", "16")
	h.reconcile("gang")
	h.reconcile("small")
	h.expectPods("paris", "small", 1, 0)
	h.answer("paris", "small", true)
	if in := h.input(h.reservations["gang"], h.settings); in.Position != 1 {
		t.Errorf("the gang is number %d", in.Position)
	}
}

// A large request for which capacity becomes free now and then is not overtaken, however
// long it takes.
func TestLargeRequestIsNotOvertakenWhileCapacityIsFreed(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "16")
	h.change("paris", holdings(8))
	h.ask("large", 1, "12")
	for held := 7; held >= 2; held-- {
		for range 8 {
			h.clock.Step(time.Minute)
			h.advertise("paris", "16")
			h.reconcile("large")
		}
		h.expectPods("paris", "large", 0, 0)
		h.change("paris", holdings(held))
		small := fmt.Sprint("small-", held)
		h.ask(small, 1, "2")
		h.expectPods("paris", small, 0, 0)
	}
	h.reconcile("large")
	h.expectPods("paris", "large", 1, 0)
}

// An old Reservation that grows again and again is no way around the queue: what it grows
// by is as old as its growth, for another leader, too.
func TestGrowthDoesNotOvertake(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "18")
	h.change("paris", holdings(8))
	h.ask("old", 1, "2")
	h.answer("paris", "old", true)
	h.ask("large", 1, "12")
	for held := 7; held >= 2; held-- {
		h.advertise("paris", "18")
		h.change("paris", holdings(held))
		h.grow("old", 1)
		h.expectPods("paris", "old", 1, 0)
		h.failOver()
		h.reconcile("large")
		h.advertise("paris", "18")
		h.reconcile("old")
		h.expectPods("paris", "old", 1, 0)
	}
	h.reconcile("large")
	h.expectPods("paris", "large", 1, 0)
}

// A new leader queues all that waits before it places anything: a request that it sees first
// does not pass.
func TestNewLeaderKnowsTheQueue(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "16")
	h.change("paris", holdings(4))
	h.ask("large", 1, "12")
	h.ask("gang", 5, "1", func(s *broker.ReservationSpec) { s.MinAvailable = 5 })
	h.failOver()
	h.advertise("paris", "16")
	h.takeOver(t.Context())
	h.ask("small", 1, "1")
	h.expectPods("paris", "small", 0, 0)
	if got := h.input(h.reservations["small"], h.settings).Position; got != 3 {
		t.Errorf("it is number %d", got)
	}
}

// waiting is what is in the queue.
func (h *hub) waiting() []*queue.Entry {
	return h.queue.Next(1_000_000, func(*queue.Entry) bool { return true })
}

// A new leader that keeps no capacity free compares what waits with no cluster before it places
// anything.
func TestNewLeaderWithoutQueueComparesNothing(t *testing.T) {
	h := newHub(t)
	const clusters, waiting = 40, 20
	for i := range clusters {
		h.advertise(fmt.Sprint("c", i), "1")
	}
	for i := range waiting {
		h.ask(fmt.Sprint("r", i), 1, "12")
	}
	h.settings.Queueing = broker.QueueingNone
	h.failOver()
	h.configure()
	looked := 0
	h.looks.seen = func() { looked++ }
	h.takeOver(t.Context())
	if len(h.waiting()) != waiting || looked > 2*waiting {
		t.Errorf("of %d, %d wait, and %d clusters were looked at", waiting, len(h.waiting()), looked)
	}
}

// A growth that waits keeps its age when its counts are lowered, when a provider refuses it,
// and for another leader. What a provider gives up is as old as before.
func TestAgeOfGrowth(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "4")
	h.ask("r", 2, "1")
	h.answer("paris", "r", true)
	h.grow("r", 4)
	h.answer("paris", "r", true)
	h.expectPods("paris", "r", 4, 0)
	h.ask("between", 1, "1")
	position := func(want int32) {
		t.Helper()
		h.reconcile("r")
		h.reconcile("between")
		if got := h.input(h.reservations["r"], h.settings).Position; got != want {
			t.Errorf("it is number %d, want %d", got, want)
		}
	}
	position(1)
	h.grow("r", -1)
	position(1)
	h.failOver()
	position(1)
	h.change("paris", func(ad *broker.ClusterAdvertisement) {
		ad.Spec.Resources.Allocatable = cpus("8")
		ad.Spec.NodeClasses[0].FreeShapes[0].Free = cpus("8")
	})
	h.advertise("paris", "8")
	h.reconcile("r")
	h.expectPods("paris", "r", 5, 0)
	h.answer("paris", "r", false)
	position(1)
	// It has been placed: what it grows by queues again.
	h.grow("r", 1)
	position(2)
}

// A request without any capacity keeps its place before one that came later while it grows step
// by step. Once a part has been placed, it queues again when it grows.
func TestGrowthKeepsThePlace(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "16")
	h.change("paris", holdings(8))
	h.ask("growing", 4, "2")
	h.ask("later", 4, "2")
	positions := func(growing, later int32) {
		t.Helper()
		// After a fail-over, the queue knows each only once it was reconciled.
		h.reconcile("growing")
		h.reconcile("later")
		for name, want := range map[string]int32{"growing": growing, "later": later} {
			if got := h.input(h.reservations[name], h.settings).Position; got != want {
				t.Errorf("%s is number %d, want %d", name, got, want)
			}
		}
	}
	for range 4 {
		h.grow("growing", 1)
		positions(1, 2)
	}
	h.failOver()
	h.advertise("paris", "16")
	positions(1, 2)
	h.change("paris", holdings(4))
	h.reconcile("growing")
	h.expectPods("paris", "growing", 4, 0)
	positions(1, 2) // it may be refused yet
	h.answer("paris", "growing", true)
	positions(1, 2)
	h.grow("growing", 1)
	positions(2, 1)
	h.change("paris", holdings(0))
	h.advertise("paris", "16")
	h.reconcile("growing")
	h.expectPods("paris", "growing", 4, 0)
	h.reconcile("later")
	h.expectPods("paris", "later", 4, 0)
}

// What could be placed if guests ended still holds back those behind it.
func TestGuestsDoNotMakeItUnplaceable(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "16")
	h.change("paris", func(ad *broker.ClusterAdvertisement) {
		ad.Spec.NodeClasses[0].FreeShapes[0].Free = cpus("6")
		ad.Spec.ObservedHolds = []broker.ObservedHold{{Requester: "oslo", Used: cpus("10"), Pods: 1}}
	})
	h.ask("large", 1, "12")
	h.ask("small", 1, "1")
	h.expectPods("paris", "small", 0, 0)
}

// The ledger of the best cluster has no room for another hold: the next one is asked. What
// is kept free for others does not count as holds.
func TestFullLedgerIsNotTheEnd(t *testing.T) {
	fill := func(ad *broker.ClusterAdvertisement, holds int) {
		for i := range holds {
			name := fmt.Sprint("held-", i)
			ad.Status.Holds = append(ad.Status.Holds, broker.Hold{
				ReservationUID: types.UID(name), ReservationName: name, Requester: fmt.Sprint("oslo-", i%200), Attempt: 1,
				Promised: capacity.OfPodSets([]broker.PodSet{{Name: "pods", Count: 1, Requests: cpus("1m")}}),
			})
		}
	}
	for name, tc := range map[string]struct {
		holds, waiting int
		want           string
	}{
		"others wait, the ledger has room": {ledger.MaxHolds - 5, 10, "1 of 1 pods in paris"},
		"the ledger is full":               {ledger.MaxHolds, 0, "1 of 1 pods in berlin"},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHub(t)
			h.advertise("berlin", "8")
			h.change("berlin", func(ad *broker.ClusterAdvertisement) { ad.Spec.Resources.Allocated = cpus("7") })
			h.advertise("paris", "110") // the better score
			h.change("paris", func(ad *broker.ClusterAdvertisement) {
				fill(ad, tc.holds)
				// A guest uses most of the only node with a large disk.
				ad.Spec.ObservedHolds = []broker.ObservedHold{{Requester: "tokyo", Used: cpus("8"), Pods: 1}}
				ad.Spec.NodeClasses = []broker.NodeClass{
					{Name: "std", FreeShapes: []broker.FreeShape{{Nodes: 1, Free: cpus("100"), Pods: 2000}}},
					{Name: "disk", Labels: map[string]string{"disk": "large"}, FreeShapes: []broker.FreeShape{{Nodes: 1, Free: cpus("2"), Pods: 100}}},
				}
			})
			for i := range tc.waiting {
				h.ask(fmt.Sprint("waiting-", i), 1, "3", func(s *broker.ReservationSpec) {
					s.PodSets[0].NodeSelector = map[string]string{"disk": "large"}
				})
			}
			h.ask("r", 1, "100m")
			if got := h.reservations["r"].Status.Summary; got != tc.want {
				t.Errorf("it has %s: %+v", got, h.reservations["r"].Status.Decision)
			}
		})
	}
}

// A priority above the maximum counts as the maximum: no consumer is always first.
func TestMaxPriority(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "1")
	priority := func(p int32) func(*broker.ReservationSpec) {
		return func(s *broker.ReservationSpec) { s.Priority = p }
	}
	h.ask("at-most", 1, "2", priority(1000))
	h.ask("above", 1, "2", priority(1_000_000))
	h.ask("below", 1, "2", priority(999))
	h.ask("last", 1, "2", priority(-1))
	for name, want := range map[string]int32{"at-most": 1, "above": 2, "below": 3, "last": 4} {
		h.reconcile(name)
		if got := h.input(h.reservations[name], h.settings).Position; got != want {
			t.Errorf("%s is number %d, want %d", name, got, want)
		}
	}
	h.expectCondition("above", broker.ConditionQueued, plan.ReasonInsufficientCapacity, "Its priority 1000000 counts as 1000, the maximum (quotas.maxPriority of the BrokerConfig).")
}

// A growth that waits for the consumer's own guests to end is not counted against the
// provider for others.
func TestWaitingForGuestsIsNotSilence(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "10")
	h.ask("r", 5, "1")
	h.answer("paris", "r", true)
	h.reservations["r"].Spec.PodSets[0].Count = 2
	h.reconcile("r")
	// paris confirms no smaller hold while guests run, and so no growth after it.
	h.reservations["r"].Spec.PodSets[0].Count = 4
	h.reconcile("r")
	h.expectPods("paris", "r", 4, 5)
	h.clock.Step(31 * time.Second)
	h.advertise("paris", "10")
	h.reconcile("r")
	h.expectPods("paris", "r", 2, 5)
	h.ask("of-another", 1, "1", func(s *broker.ReservationSpec) { s.RequesterID = "oslo" })
	h.expectPods("paris", "of-another", 1, 0)
	// Once the guests have ended, the growth is asked for again at once.
	h.answer("paris", "r", true)
	h.expectPods("paris", "r", 4, 0)
}

// The delay after a conflict doubles, up to a maximum, until a reconcile has no conflict.
func TestConflictBackoff(t *testing.T) {
	h := newHub(t)
	h.ask("r", 1, "1")
	var delays []time.Duration
	for range 10 {
		result, err := h.conflicts.Requeue(t.Context(), "reservation/r", commit.ErrOutdated)
		expect.NoError(t, err)
		delays = append(delays, result.RequeueAfter)
	}
	if delays[0] != 20*time.Millisecond || delays[3] != 160*time.Millisecond || delays[9] != 5*time.Second {
		t.Errorf("the delays are %v", delays)
	}
	h.forget("r")
	if result, _ := h.conflicts.Requeue(t.Context(), "reservation/r", commit.ErrOutdated); result.RequeueAfter != 20*time.Millisecond {
		t.Errorf("the first delay is %s", result.RequeueAfter)
	}
	failed := errors.New("the API server is down")
	if result, err := h.conflicts.Requeue(t.Context(), "reservation/r", failed); err == nil || result.RequeueAfter != 0 {
		t.Errorf("another error is requeued after %s: %v", result.RequeueAfter, err)
	}
}

// A changed minAvailable counts from the next placement on, and takes nothing from pods
// that may run.
func TestMinAvailableChanges(t *testing.T) {
	least := func(h *hub, n int32) {
		h.reservations["r"].Spec.MinAvailable = n
		h.reservations["r"].Generation++
		h.reconcile("r")
	}
	h := newHub(t)
	h.advertise("paris", "4")
	h.ask("r", 9, "1", func(s *broker.ReservationSpec) { s.MinAvailable = 9 })
	h.expectPods("paris", "r", 0, 0)
	least(h, 4)
	h.expectPods("paris", "r", 4, 0)
	least(h, 5)
	h.expectPods("paris", "r", 0, 4)
	h.answer("paris", "r", true)
	least(h, 4)
	h.answer("paris", "r", true)
	h.use("r")
	least(h, 9)
	h.expectPods("paris", "r", 4, 0)
}

// Those behind the first of the queue get their turn even if the first ones get nothing.
func TestEachOfTheQueueIsRetried(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "1")
	h.ask("before", 10, "100m")
	for i := range 200 {
		h.ask(fmt.Sprint("waiting-", i), 1, "100m")
		h.advertise("paris", "1")
	}
	retried := map[string]bool{}
	for range 7 {
		names := h.retriable(nil)
		if len(names) > maxRetried || names[0] != "waiting-0" {
			t.Fatalf("%d are retried, the first is %s", len(names), names[0])
		}
		for _, name := range names {
			retried[name] = true
		}
	}
	if len(retried) != 200 {
		t.Errorf("%d of 200 are retried", len(retried))
	}
}

// A changed advertisement tries some of those again that could not be placed, others each time.
func TestImpossibleOnesAreRetried(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "1")
	for i := range 200 {
		h.ask(fmt.Sprint("r-", i), 1, "9", func(s *broker.ReservationSpec) { s.TargetClusterID = "berlin" })
		h.rememberImpossible(fmt.Sprint("r-", i), true)
	}
	retried := map[string]bool{}
	for i := 0; i < 100 && len(retried) < 200; i++ {
		before := h.store.Advertisement("paris")
		after := before.DeepCopy()
		after.Generation++
		after.ResourceVersion = fmt.Sprint(1000 + i)
		h.clock.Step(10 * time.Second) // in which the allowance for so many grows again
		names := h.advertisementChanged(before, after)
		if len(names) != maxRetried {
			t.Fatalf("%d are retried", len(names))
		}
		for _, name := range names {
			retried[name] = true
		}
	}
	if len(retried) != 200 {
		t.Errorf("%d of 200 are retried", len(retried))
	}
}

// A gang of two shapes is held as a whole, and a shape that is added later is held beside it.
func TestGangOfTwoShapes(t *testing.T) {
	set := func(name string, count int32, cpu string) broker.PodSet {
		return broker.PodSet{Name: name, Count: count, Requests: cpus(cpu)}
	}
	h := newHub(t)
	h.advertise("paris", "1")
	h.ask("a", 0, "1", func(s *broker.ReservationSpec) {
		s.PodSets, s.MinAvailable = []broker.PodSet{set("leader", 1, "500m"), set("workers", 4, "200m")}, 5
	})
	h.expectPods("paris", "a", 0, 0) // all workers fit, and the leader does not
	h.advertise("berlin", "800m")
	h.reconcile("a")
	pods := func() (n int32) {
		for _, allocation := range h.reservations["a"].Status.Allocations {
			n += broker.HeldCapacity{PodSets: allocation.PodSets}.Pods()
		}
		return n
	}
	if n := pods(); n != 5 {
		t.Errorf("%d of 5 pods are held", n)
	}
	h.reservations["a"].Spec.PodSets = append(h.reservations["a"].Spec.PodSets, set("sixth", 1, "300m"))
	h.reservations["a"].Generation++
	h.reconcile("a")
	if n := pods(); n != 6 {
		t.Errorf("%d of 6 pods are held", n)
	}
}
