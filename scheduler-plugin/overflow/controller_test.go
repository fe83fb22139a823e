package overflow

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/events"
	framework "k8s.io/kube-scheduler/framework"
	scheduler "k8s.io/kubernetes/pkg/scheduler/framework"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand/demandtest"
	"github.com/spillway-dev/spillway/scheduler-plugin/request"
	"github.com/spillway-dev/spillway/scheduler-plugin/usage"
	"github.com/spillway-dev/spillway/scheduler-plugin/waiting"
)

// A request includes the pods of its key that run in other clusters, and those
// that the scheduler has not tried yet.
func TestOtherPods(t *testing.T) {
	p := testPlugin(OverflowArgs{}, nodeWith("").Node(), nodeWith("paris").Node())
	p.handle = profile{}
	untried := waiting.NewUntriedPods(p.clock)
	handler := p.podHandler(func() bool { return false }, untried)
	c, now, _ := testController(t, p, demandtest.NewIndexer(demandtest.JobPod("crunch", "pending", "1")))
	c.Untried = untried
	key, _ := p.keys.Get(demandtest.JobPod("crunch", "x", "1"))
	count := func() int32 {
		p.PostFilter(t.Context(), scheduler.NewCycleState(), demandtest.JobPod("crunch", "pending", "1"), nil)
		c.sync()
		now.Step(time.Second)
		request := c.requests[key.Key]
		return request.Pods()
	}
	for _, tc := range []struct {
		name   string
		change func(*corev1.Pod)
		counts bool
	}{
		{"untried", func(*corev1.Pod) {}, true},
		{"in-paris", func(p *corev1.Pod) { p.Spec.NodeName = broker.VirtualNodeName("paris") }, true},
		{"on-local-node", func(p *corev1.Pod) { p.Spec.NodeName = "home" }, false},
		{"pending", func(*corev1.Pod) {}, false},
		{"tried", func(p *corev1.Pod) {
			p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse}}
		}, false},
		{"of-another-scheduler", func(p *corev1.Pod) { p.Spec.SchedulerName = "default-scheduler" }, false},
		{"gated", func(p *corev1.Pod) { p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "wait"}} }, false},
		{"opted-out", func(p *corev1.Pod) { p.Labels = map[string]string{broker.LabelOverflow: broker.OverflowDisabled} }, false},
		{"terminating", func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)} }, false},
		{"of-another-shape", func(p *corev1.Pod) { p.Spec.Containers[0].Resources.Requests = expect.Resources("cpu", "2") }, false},
	} {
		before := count()
		pod := demandtest.JobPod("crunch", tc.name, "1")
		pod.Spec.SchedulerName = broker.SchedulerName
		tc.change(pod)
		handler.OnAdd(pod, false)
		if got := count() > before; got != tc.counts {
			t.Errorf("%s: counted %t, want %t", tc.name, got, tc.counts)
		}
	}
	before := count()
	p.Reserve(t.Context(), scheduler.NewCycleState(), demandtest.JobPod("crunch", "untried", "1"), "home")
	if count() != before-1 {
		t.Error("an assumed pod is counted")
	}
	p.Unreserve(t.Context(), nil, demandtest.JobPod("crunch", "untried", "1"), "home")
	if count() != before {
		t.Error("a pod that is no longer assumed is not counted")
	}
}

// profile is the part of the scheduler that the handlers of informers need.
type profile struct{ framework.Handle }

func (profile) ProfileName() string { return broker.SchedulerName }

// TestWakingWaitsForNoWrite: while the write of one Reservation does not end, a pod is woken
// for a grant of another.
func TestWakingWaitsForNoWrite(t *testing.T) {
	paris := nodeWith("paris").Node()
	p, all := testPlugin(OverflowArgs{}, paris), demandtest.NewIndexer()
	p.placements.SetNode(paris)
	c, _, _ := testController(t, p, all)
	arrived, answer := make(chan struct{}), make(chan struct{})
	hang := sync.OnceFunc(func() {
		close(arrived)
		<-answer
	})
	c.Synced = func() bool { // is the first that a write asks for
		hang()
		return false
	}
	woken := make(chan string, 10)
	c.Waker.Activate = func(pods map[string]*corev1.Pod) {
		for _, pod := range pods {
			woken <- pod.Name
		}
	}
	ctx, end := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { c.Run(ctx) })
	defer running.Wait()
	defer end()
	defer close(answer)
	waits := func(job string) *corev1.Pod {
		pod := demandtest.JobPod(job, job+"-0", "1")
		expect.NoError(t, all.Add(pod))
		p.PostFilter(t.Context(), scheduler.NewCycleState(), pod, nil)
		return pod
	}
	waits("slow")
	deadline := time.After(expect.Deadline)
	select {
	case <-arrived:
	case <-deadline:
		t.Fatal("no Reservation is written for slow-0")
	}
	p.queue.AddReservation(p.grants.Set(demandtest.ReservationFor(waits("other"), map[string]int32{"paris": 1})))
	select {
	case name := <-woken:
		if name != "other-0" {
			t.Errorf("%s is woken", name)
		}
	case <-deadline:
		t.Error("other-0 is not woken for its grant")
	}
}

// steppedController is the controller of a plugin, which nothing but sync runs. It writes nothing:
// requests has what is to be requested.
type steppedController struct {
	*request.Controller
	requests map[demand.Key]demand.Request
}

// sync returns the number of requests that have become due.
func (c *steppedController) sync() int {
	due := c.Sync()
	for _, request := range due {
		c.requests[request.Key] = request
	}
	return len(due)
}

// requested is for how many pods capacity is to be requested.
func (c *steppedController) requested() (n int32) {
	for _, request := range c.requests {
		n += request.Pods()
	}
	return n
}

// noReservations are those of a cluster that has none.
func noReservations(now clock.PassiveClock) *request.Reservations {
	return request.NewReservations(nil, cache.NewIndexer(cache.MetaNamespaceKeyFunc, request.Indexers()), now)
}

// testController returns the controller of a plugin. now is the clock of both, cached has the
// pods, and opened those that the gate was opened for.
func testController(t *testing.T, p *Plugin, cached cache.Indexer) (c *steppedController, now *clocktesting.FakeClock, opened map[string]bool) {
	t.Helper()
	now, opened = p.clock.(*clocktesting.FakeClock), map[string]bool{}
	c = &steppedController{requests: map[demand.Key]demand.Request{}, Controller: request.New(request.Config{
		Clock: now, Queue: p.queue, Grants: p.grants, Gate: p.gate, Placements: p.placements, Keys: p.keys, Namespaces: p.namespaces,
		Batcher: demand.NewBatcher(now, demand.Windows{}), Pending: p.pending, Pods: corelisters.NewPodLister(cached), Untried: waiting.NewUntriedPods(p.clock),
		Reservations: noReservations(now), Policies: request.PolicyCache{Decoded: demandtest.NewIndexer()},
		Waker: &waiting.Waker{Gate: p.gate, Grants: p.grants, Placements: p.placements, Pools: p.pools, Nodes: p.nodes, Settled: p.settled,
			Activate: func(pods map[string]*corev1.Pod) {
				for _, pod := range pods {
					opened[pod.Name] = true
				}
			}},
		Synced: func() bool { return true }, Counted: p.counted, Active: func() bool { return true }, Recorder: events.NewFakeRecorder(100), Steers: true,
	})}
	return c, now, opened
}

// setHome gives the node of this cluster an amount of CPU, as its informer does.
func (p *Plugin) setHome(cores int64) {
	node := nodeWith("").Node().DeepCopy()
	node.Status.Allocatable = expect.Resources("cpu", fmt.Sprint(cores), "pods", "10")
	if p.placements.SetNode(node) {
		p.queue.AddNode(node.Name)
	}
}

// TestNodeWithinAskAfter: pods that fit a node which an autoscaler adds within askAfter are
// woken at once, and no capacity is requested for them, then or later. It is for the others.
func TestNodeWithinAskAfter(t *testing.T) {
	const askAfter = waiting.MinRetry / 2
	for name, tc := range map[string]struct {
		cores     int64
		woken     string
		requested []types.UID
	}{
		"no node":             {0, "", []types.UID{"crunch-0", "crunch-1"}},
		"a node for one":      {1, "crunch-0", []types.UID{"crunch-1"}},
		"a node for all pods": {2, "crunch-0 crunch-1", nil},
	} {
		t.Run(name, func(t *testing.T) {
			p, pods := testPlugin(OverflowArgs{}), demandtest.NewIndexer()
			c, now, woken := testController(t, p, pods)
			c.AskAfter, p.args.AskAfter.Duration, p.handle = askAfter, askAfter, profile{}
			for i := range 2 {
				pod := demandtest.JobPod("crunch", fmt.Sprint("crunch-", i), "1")
				expect.NoError(t, pods.Add(pod))
				state := scheduler.NewCycleState()
				state.Write(stateKey, &cycleState{since: now.Now()})
				p.PostFilter(t.Context(), state, pod, nil)
			}
			pendingIn := func() (uids []types.UID) {
				c.sync()
				for _, request := range c.requests {
					uids = append(uids, request.Pending...)
				}
				return uids
			}
			if got := pendingIn(); got != nil {
				t.Errorf("requested at once for %v", got)
			}
			now.Step(askAfter - time.Second)
			p.setHome(tc.cores)
			if got := pendingIn(); got != nil {
				t.Errorf("requested too early for %v", got)
			}
			if got := strings.Join(slices.Sorted(maps.Keys(woken)), " "); got != tc.woken {
				t.Errorf("the node wakes %q, want %q", got, tc.woken)
			}
			for name := range woken {
				bound := demandtest.JobPod("crunch", name, "1")
				bound.Spec.NodeName = "home"
				expect.NoError(t, pods.Update(bound))
				p.podHandler(func() bool { return false }, c.Untried).OnUpdate(nil, bound)
			}
			now.Step(time.Second)
			if got := pendingIn(); !slices.Equal(got, tc.requested) {
				t.Errorf("requested for %v, want %v", got, tc.requested)
			}
		})
	}
}

// TestManyBarePods: a thousand bare pods of one shape are one request, which is written once,
// and are woken at once for a grant of theirs.
func TestManyBarePods(t *testing.T) {
	const pods = 1000
	paris := nodeWith("paris").Node()
	p := testPlugin(OverflowArgs{}, paris)
	p.placements.SetNode(paris)
	first, all := (*corev1.Pod)(nil), demandtest.NewIndexer()
	c, now, woken := testController(t, p, all)
	for i := range pods {
		pod := demandtest.JobPod("", fmt.Sprint("bare-", i), "1")
		pod.OwnerReferences = nil
		expect.NoError(t, all.Add(pod))
		p.PostFilter(t.Context(), scheduler.NewCycleState(), pod, nil)
		first = cmp.Or(first, pod)
	}
	if n := c.sync(); n != 1 {
		t.Fatalf("%d requests are due for %d pods of one shape, want 1", n, pods)
	}
	key, _ := p.keys.Get(first)
	request := c.requests[key.Key]
	if request.Pods() != pods || len(request.Pending) != pods {
		t.Errorf("%d pods are requested for %d, want %d", request.Pods(), len(request.Pending), pods)
	}
	r := &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "bare", Labels: map[string]string{
		broker.LabelOwnerUID: string(key.Key.OwnerUID), broker.LabelShape: key.Key.Shape}}, Spec: broker.ReservationSpec{PodSets: request.PodSets}}
	r.Status = broker.ReservationStatus{ID: "rome-bare", Allocations: []broker.Allocation{{Cluster: "paris", PodSets: request.PodSets, Accepted: true, VirtualNodeReady: true}}}
	now.Step(waiting.MinRetry / 2) // no retry is due
	p.queue.AddReservation(p.grants.Set(r))
	clear(woken)
	if c.sync(); len(woken) != pods {
		t.Errorf("%d pods are woken, want %d", len(woken), pods)
	}
}

// TestOnlyPlacesWake: of 200 pods that wait, as many are tried again as there are places, and
// none for the growth of a virtual node on which they have none.
func TestOnlyPlacesWake(t *testing.T) {
	paris := nodeWith("paris").Node()
	p, all := testPlugin(OverflowArgs{}, paris), demandtest.NewIndexer()
	c, now, woken := testController(t, p, all)
	p.setHome(0)
	p.placements.SetNode(paris)
	pod := demandtest.JobPod("crunch", "crunch-0", "1")
	for i := range 200 {
		pod = demandtest.JobPod("crunch", fmt.Sprint("crunch-", i), "1")
		expect.NoError(t, all.Add(pod))
		p.PostFilter(t.Context(), scheduler.NewCycleState(), pod, nil)
	}
	c.sync()
	now.Step(2 * waiting.SnapshotLag)
	expectWoken := func(why string, want int) {
		t.Helper()
		clear(woken)
		if c.sync(); len(woken) != want {
			t.Errorf("%s wakes %d pods, want %d", why, len(woken), want)
		}
	}
	for cores := range 5 {
		grown := paris.DeepCopy()
		grown.Status.Allocatable = expect.Resources("cpu", fmt.Sprint(10*(1+cores)), "pods", "100")
		p.placements.SetNode(grown)
		p.queue.AddNode(grown.Name)
		expectWoken("a virtual node that grows", 0)
	}
	p.setHome(1)
	expectWoken("a core at home", 1)
	p.queue.AddReservation(p.grants.Set(demandtest.ReservationFor(pod, map[string]int32{"paris": 3})))
	expectWoken("a grant of three", 3)
}

// countingNodes counts how often nodes are looked up.
type countingNodes struct {
	corelisters.NodeLister
	gets int
}

func (n *countingNodes) Get(name string) (*corev1.Node, error) {
	n.gets++
	return n.NodeLister.Get(name)
}

// TestCyclesThatConcernNoOther: what pools and nodes have free is computed after the failed
// cycle of a pod that waits for capacity in other clusters, and not after that of a pod that
// cannot overflow.
func TestCyclesThatConcernNoOther(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*corev1.Pod)
		counts bool
	}{
		"waits":          {func(*corev1.Pod) {}, true},
		"not opted in":   {func(p *corev1.Pod) { p.Namespace = "bank" }, false},
		"not admissible": {func(p *corev1.Pod) { p.Spec.HostNetwork = true }, false},
	} {
		t.Run(name, func(t *testing.T) {
			p, pods := testPlugin(OverflowArgs{}, nodeWith("paris").Node()), demandtest.NewIndexer()
			c, now, _ := testController(t, p, pods)
			nodes := &countingNodes{NodeLister: p.nodes}
			c.Waker.Nodes, c.Waker.MayUse = nodes, func(*corev1.Pod, *usage.Pool) bool { return false }
			r, in := byHand("advance", sets(map[string]int32{"1": 1}))
			p.pools.SetReservation(r)
			p.pools.SetInstruction(in)
			fail := func(pod *corev1.Pod) (gets int) {
				expect.NoError(t, pods.Add(pod))
				state := scheduler.NewCycleState()
				state.Write(stateKey, &cycleState{since: now.Now()})
				p.PostFilter(t.Context(), state, pod, nil)
				now.Step(time.Second)
				before := nodes.gets
				c.sync()
				return nodes.gets - before
			}
			fail(demandtest.JobPod("crunch", "crunch-0", "1"))
			for i := range 3 {
				pod := demandtest.JobPod("crunch", fmt.Sprint("other-", i), "1")
				tc.change(pod)
				if gets := fail(pod); gets > 0 != tc.counts {
					t.Errorf("cycle %d: %d nodes are looked up, want some: %t", i, gets, tc.counts)
				}
			}
		})
	}
}

// A pod that is held untried is woken at once for room that has come since the cycle of the
// other pod began, also if that was before it was held; the other pod is first.
func TestHeldPodTakesRoom(t *testing.T) {
	for name, tc := range map[string]struct {
		// cores are what the node has free before the other pod's cycle, until the pod is
		// held, and then.
		before, until, then int64
		opens               string
	}{
		"no room":                       {},
		"the other pod did not fit":     {before: 4, until: 4, then: 4},
		"room since the cycle":          {until: 2, then: 2, opens: "crunch-0 crunch-1"},
		"room for one since the cycle":  {until: 1, then: 1, opens: "crunch-0"},
		"room after it was held":        {then: 2, opens: "crunch-0 crunch-1"},
		"more room after it was held":   {until: 1, then: 2, opens: "crunch-0 crunch-1"},
		"no more room after it is held": {before: 4, until: 4, then: 3},
	} {
		t.Run(name, func(t *testing.T) {
			p, others, pod := testPlugin(OverflowArgs{}), demandtest.JobPod("crunch", "crunch-0", "1"), demandtest.JobPod("crunch", "crunch-1", "1")
			c, now, opened := testController(t, p, demandtest.NewIndexer(others, pod))
			cores := func(n int64) {
				p.setHome(n)
				c.sync()
			}
			cores(tc.before)
			now.Step(time.Minute)
			state := scheduler.NewCycleState()
			state.Write(stateKey, &cycleState{since: now.Now()})
			p.PostFilter(t.Context(), state, others, nil)
			c.sync()
			now.Step(waiting.MaxHold / 2)
			cores(tc.until)
			if !p.PreEnqueue(t.Context(), pod).IsRejected() {
				t.Error("it is not held")
			}
			c.sync()
			cores(tc.then)
			if got := strings.Join(slices.Sorted(maps.Keys(opened)), " "); got != tc.opens {
				t.Errorf("the gate has opened for %q, want %q", got, tc.opens)
			}
		})
	}
}

// TestUnaskedIsForgotten: that no capacity is requested for pods, because a policy allows no
// more, is no decision about those that come after them.
func TestUnaskedIsForgotten(t *testing.T) {
	p, pods := testPlugin(OverflowArgs{Overflow: BeforePreemption}), demandtest.NewIndexer()
	c, _, _ := testController(t, p, pods)
	fail := func(name string) *framework.Status {
		pod := demandtest.JobPod("crunch", name, "1")
		expect.NoError(t, pods.Add(pod))
		_, status := p.PostFilter(t.Context(), scheduler.NewCycleState(), pod, nil)
		c.sync()
		return status
	}
	undecided := fail("crunch-0").Code()
	if undecided != framework.UnschedulableAndUnresolvable {
		t.Fatalf("preemption does not wait for the decision: %s", undecided)
	}
	key, _ := p.keys.KeyOf(demandtest.JobPod("crunch", "crunch-0", "1"))
	p.grants.SetUnasked(key, true, 0)
	p.queue.AddKey(key)
	if code := fail("crunch-1").Code(); code != framework.Unschedulable {
		t.Errorf("preemption waits though it is decided: %s", code)
	}
	for _, name := range []string{"crunch-0", "crunch-1"} {
		expect.NoError(t, pods.Delete(demandtest.JobPod("crunch", name, "1")))
		p.queue.Remove(types.UID(name))
	}
	c.sync()
	if code := fail("crunch-2").Code(); code != undecided {
		t.Errorf("a pod that comes later: %s, want %s", code, undecided)
	}
}

// TestPlaceOfAnotherPod: a place that a pod was woken for and does not use is the next pod's.
func TestPlaceOfAnotherPod(t *testing.T) {
	for name, tc := range map[string]struct {
		// granted: it is a slot of a grant in paris, and not room at home.
		granted bool
		unused  func(*testing.T, *Plugin, *clocktesting.FakeClock, cache.Indexer, *corev1.Pod)
		// want is that the next pod is woken.
		want bool
	}{
		"room that is used": {want: false, unused: func(t *testing.T, p *Plugin, _ *clocktesting.FakeClock, _ cache.Indexer, pod *corev1.Pod) {
			p.reserved(t, pod, "home")
		}},
		"a slot that is used": {granted: true, want: false, unused: func(t *testing.T, p *Plugin, _ *clocktesting.FakeClock, _ cache.Indexer, pod *corev1.Pod) {
			p.reserved(t, pod, broker.VirtualNodeName("paris"))
		}},
		"room, and it is on another node": {want: true, unused: func(t *testing.T, p *Plugin, _ *clocktesting.FakeClock, _ cache.Indexer, pod *corev1.Pod) {
			p.reserved(t, pod, "other")
		}},
		"a slot, and it is at home": {granted: true, want: true, unused: func(t *testing.T, p *Plugin, _ *clocktesting.FakeClock, _ cache.Indexer, pod *corev1.Pod) {
			p.reserved(t, pod, "other")
		}},
		"room, and it does not fit": {want: true, unused: func(t *testing.T, p *Plugin, now *clocktesting.FakeClock, _ cache.Indexer, pod *corev1.Pod) {
			p.failed(t, pod, now.Now())
		}},
		"room, and it is deleted": {want: true, unused: func(t *testing.T, p *Plugin, _ *clocktesting.FakeClock, pods cache.Indexer, pod *corev1.Pod) {
			expect.NoError(t, pods.Delete(pod))
			p.queue.Remove(pod.UID)
		}},
		"a slot, and it opts out before its cycle": {granted: true, want: true, unused: func(t *testing.T, p *Plugin, now *clocktesting.FakeClock, pods cache.Indexer, pod *corev1.Pod) {
			out := pod.DeepCopy()
			out.Labels = map[string]string{broker.LabelOverflow: broker.OverflowDisabled}
			expect.NoError(t, pods.Update(out))
			p.failed(t, out, now.Now())
		}},
		"room, and it opts out before its cycle": {want: true, unused: func(t *testing.T, p *Plugin, now *clocktesting.FakeClock, pods cache.Indexer, pod *corev1.Pod) {
			out := pod.DeepCopy()
			out.Labels = map[string]string{broker.LabelOverflow: broker.OverflowDisabled}
			expect.NoError(t, pods.Update(out))
			p.failed(t, out, now.Now())
		}},
		"room, and it opts out after its cycle": {want: true, unused: func(t *testing.T, p *Plugin, _ *clocktesting.FakeClock, pods cache.Indexer, pod *corev1.Pod) {
			out := pod.DeepCopy()
			out.Labels = map[string]string{broker.LabelOverflow: broker.OverflowDisabled}
			expect.NoError(t, pods.Update(out))
			p.queue.AddUnschedulable(out)
		}},
		"room, and it is not tried for a while": {want: false, unused: func(_ *testing.T, _ *Plugin, now *clocktesting.FakeClock, _ cache.Indexer, _ *corev1.Pod) {
			now.Step(waiting.KeptFor - 2*time.Second)
		}},
		"room, and it is not tried for long": {want: true, unused: func(_ *testing.T, _ *Plugin, now *clocktesting.FakeClock, _ cache.Indexer, _ *corev1.Pod) {
			now.Step(waiting.KeptFor)
		}},
		"a slot, and it is not tried for long": {granted: true, want: true, unused: func(_ *testing.T, _ *Plugin, now *clocktesting.FakeClock, _ cache.Indexer, _ *corev1.Pod) {
			now.Step(waiting.KeptFor)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			paris := nodeWith("paris").Node()
			p, pods := testPlugin(OverflowArgs{}, paris), demandtest.NewIndexer()
			c, now, opened := testController(t, p, pods)
			p.handle = profile{}
			p.setHome(0)
			p.placements.SetNode(paris)
			c.sync()
			var all []*corev1.Pod
			for i := range 2 {
				pod := demandtest.JobPod("crunch", fmt.Sprint("crunch-", i), "1")
				pod.Spec.Tolerations = []corev1.Toleration{{Key: broker.TaintOverflow, Operator: corev1.TolerationOpExists}}
				expect.NoError(t, pods.Add(pod))
				p.failed(t, pod, now.Now())
				all = append(all, pod)
			}
			c.sync()
			now.Step(time.Second)
			if tc.granted {
				p.queue.AddReservation(p.grants.Set(demandtest.ReservationFor(all[0], map[string]int32{"paris": 1})))
			} else {
				p.setHome(1)
			}
			c.sync()
			if got := slices.Sorted(maps.Keys(opened)); !slices.Equal(got, []string{"crunch-0"}) {
				t.Fatalf("the place wakes %v, want the first pod", got)
			}
			clear(opened)
			now.Step(time.Second)
			tc.unused(t, p, now, pods, all[0])
			c.sync()
			if opened["crunch-1"] != tc.want {
				t.Errorf("the next pod was woken: %t, want %t", opened["crunch-1"], tc.want)
			}
		})
	}
}

// failed is a cycle of a pod in which no node fits.
func (p *Plugin) failed(t *testing.T, pod *corev1.Pod, began time.Time) {
	t.Helper()
	state := scheduler.NewCycleState()
	state.Write(stateKey, &cycleState{since: began})
	p.PostFilter(t.Context(), state, pod, nil)
}

// reserved is a cycle of a pod that gets a place.
func (p *Plugin) reserved(t *testing.T, pod *corev1.Pod, node string) {
	t.Helper()
	state := scheduler.NewCycleState()
	state.Write(stateKey, &cycleState{grants: p.grantsOf(pod)})
	if status := p.Reserve(t.Context(), state, pod, node); !status.IsSuccess() {
		t.Fatal(status)
	}
}
