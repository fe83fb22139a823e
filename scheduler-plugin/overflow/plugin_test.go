package overflow

import (
	"maps"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/klog/v2"
	framework "k8s.io/kube-scheduler/framework"
	schedulercache "k8s.io/kubernetes/pkg/scheduler/backend/cache"
	scheduler "k8s.io/kubernetes/pkg/scheduler/framework"
	clocktesting "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand/demandtest"
	"github.com/spillway-dev/spillway/scheduler-plugin/moves"
	"github.com/spillway-dev/spillway/scheduler-plugin/owners"
	"github.com/spillway-dev/spillway/scheduler-plugin/usage"
	"github.com/spillway-dev/spillway/scheduler-plugin/waiting"
)

// testPlugin returns a plugin without informers and controller, and with one
// opted-in namespace.
func testPlugin(args OverflowArgs, nodes ...any) *Plugin {
	shop := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop", Labels: map[string]string{broker.LabelOverflow: broker.OverflowEnabled}}}
	now := clocktesting.NewFakeClock(time.Unix(1000, 0))
	args.DecisionTimeout, args.AskAfter = &metav1.Duration{Duration: 10 * time.Second}, &metav1.Duration{}
	p := &Plugin{
		args:       &args,
		namespaces: corelisters.NewNamespaceLister(demandtest.NewIndexer(shop)),
		nodes:      corelisters.NewNodeLister(demandtest.NewIndexer(nodes...)),
		keys:       owners.NewKeyCache(now, func(string, metav1.OwnerReference) (*metav1.OwnerReference, bool, bool) { return nil, true, false }),
		grants:     usage.NewGrantCache(now),
		pools:      usage.NewPoolCache(now),
		gate:       waiting.NewGate(now),
		pending:    waiting.NewPendingPods(),
		clock:      now,
		synced:     func() bool { return true },
		counted:    func() bool { return true },
	}
	p.placements = usage.NewPlacements(now, p.keys.KeyOf)
	p.placements.Pooled, p.placements.Grants = p.pools.Has, p.grants.Get
	p.queue, p.watched = waiting.NewWorkQueue(p.placements.IsVirtual), moves.NewWatchedPods(broker.SchedulerName, p.placements.IsVirtual)
	return p
}

// nodeWith returns the virtual node of a cluster, or a local node if it is empty.
func nodeWith(cluster string, pods ...*corev1.Pod) framework.NodeInfo {
	info := scheduler.NewNodeInfo(pods...)
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "home"}}
	if cluster != "" {
		node.Name, node.Labels = broker.VirtualNodeName(cluster), map[string]string{broker.LabelProvider: cluster}
	}
	info.SetNode(node)
	return info
}

// filterCase is a pod of Job crunch that requests 1 CPU, and a node.
type filterCase struct {
	reason       string
	reservations []*broker.Reservation
	node         framework.NodeInfo
	change       func(*Plugin, *corev1.Pod)
	want         string // part of the message; empty is success
}

const (
	noneReserved  = "virtual node(s) had no reservation for this pod (provider paris), "
	noReservation = noneReserved + seeCondition
	full          = "virtual node(s) had no reserved capacity left for this pod (provider paris), " + seeCondition
)

// inParis returns Reservations for the pod of a filterCase.
func inParis(slots int32, change ...func(*broker.Reservation)) []*broker.Reservation {
	r := demandtest.ReservationFor(demandtest.JobPod("crunch", "crunch-0", "1"), map[string]int32{"paris": slots})
	for _, c := range change {
		c(r)
	}
	return []*broker.Reservation{r}
}

func TestFilter(t *testing.T) {
	pod, one, two := demandtest.JobPod("crunch", "crunch-0", "1"), demandtest.JobPod("crunch", "crunch-1", "1"), demandtest.JobPod("crunch", "crunch-2", "1")
	finished := one.DeepCopy()
	finished.Status.Phase = corev1.PodSucceeded
	runFilter(t, map[string]filterCase{
		"local node": {
			reason: "the plugin filters virtual nodes only",
			node:   nodeWith("", one, two),
		},
		"no grant": {
			reason: "a virtual node is for pods with a grant",
			node:   nodeWith("paris"),
			want:   noReservation,
		},
		"grant": {
			reason:       "one slot is left",
			reservations: inParis(2),
			node:         nodeWith("paris", one),
		},
		"grant used": {
			reason:       "a grant is for a number of pods",
			reservations: inParis(2),
			node:         nodeWith("paris", one, two),
			want:         full,
		},
		"pods of other keys": {
			reason:       "pods of other owners and shapes use other grants",
			reservations: inParis(1),
			node:         nodeWith("paris", demandtest.JobPod("other", "other-0", "1"), demandtest.JobPod("crunch", "bigger", "2")),
		},
		"terminal pods": {
			reason:       "they do not use their slots any more",
			reservations: inParis(1),
			node:         nodeWith("paris", finished),
		},
		"grant of another provider": {
			reason:       "the capacity is in another cluster",
			reservations: []*broker.Reservation{demandtest.ReservationFor(pod, map[string]int32{"berlin": 2})},
			node:         nodeWith("paris"),
			want:         noReservation,
		},
		"grant of another shape": {
			reason:       "the slot is for other requests",
			reservations: []*broker.Reservation{demandtest.ReservationFor(demandtest.JobPod("crunch", "x", "2"), map[string]int32{"paris": 2})},
			node:         nodeWith("paris"),
			want:         noReservation,
		},
		"opted out": {
			reason:       "the pod must not overflow",
			reservations: inParis(2),
			node:         nodeWith("paris"),
			change: func(_ *Plugin, pod *corev1.Pod) {
				pod.Labels = map[string]string{broker.LabelOverflow: broker.OverflowDisabled}
			},
			want: noneReserved + optedOut,
		},
		"namespace opted out": {
			reason:       "the grant is for the pods that have a place in it already",
			reservations: inParis(2),
			node:         nodeWith("paris"),
			change:       func(p *Plugin, _ *corev1.Pod) { p.namespaces = corelisters.NewNamespaceLister(demandtest.NewIndexer()) },
			want:         noneReserved + notOptedIn,
		},
		"cannot overflow": {
			reason:       "the grant is for others of its owner and shape, which has no volumes",
			reservations: inParis(2),
			node:         nodeWith("paris"),
			change: func(_ *Plugin, pod *corev1.Pod) {
				pod.Spec.Volumes = []corev1.Volume{{Name: "shared", VolumeSource: corev1.VolumeSource{NFS: &corev1.NFSVolumeSource{}}}}
			},
			want: noReservation,
		},
	})
}

func TestFilterByReservationState(t *testing.T) {
	one, two := demandtest.JobPod("crunch", "crunch-1", "1"), demandtest.JobPod("crunch", "crunch-2", "1")
	carries := func(pods int32) func(*broker.Reservation) {
		return func(r *broker.Reservation) {
			r.Status.Allocations[0].VirtualNodeReady, r.Status.Allocations[0].CarriedPods = false, pods
		}
	}
	runFilter(t, map[string]filterCase{
		"virtual node not ready": {
			reason:       "the grant is not usable yet",
			reservations: inParis(2, carries(0)),
			node:         nodeWith("paris"),
			want:         noReservation,
		},
		"virtual node growing": {
			reason:       "what it carries already is usable",
			reservations: inParis(5, carries(2)),
			node:         nodeWith("paris", one),
		},
		"virtual node growing, used": {
			reason:       "the capacity that it does not carry yet is not usable",
			reservations: inParis(5, carries(2)),
			node:         nodeWith("paris", one, two),
			want:         full,
		},
		"not accepted by the provider": {
			reason: "the broker may withdraw the allocation",
			reservations: inParis(2, func(r *broker.Reservation) {
				r.Status.Allocations[0].Accepted, r.Status.Allocations[0].CarriedPods = false, 2
			}),
			node: nodeWith("paris"),
			want: noReservation,
		},
		"being deleted": {
			reason:       "no new pods while capacity is released",
			reservations: inParis(2, func(r *broker.Reservation) { r.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)} }),
			node:         nodeWith("paris"),
			want:         noReservation,
		},
		"lowered count": {
			reason:       "it is effective before the broker has observed it",
			reservations: inParis(5, func(r *broker.Reservation) { r.Spec.PodSets[0].Count = 1 }),
			node:         nodeWith("paris", one),
			want:         full,
		},
		"two Reservations": {
			reason:       "one may be created by hand, with the same labels",
			reservations: append(inParis(1), inParis(2, func(r *broker.Reservation) { r.Name = "by-hand" })...),
			node:         nodeWith("paris", one, two),
		},
		"no labels": {
			reason:       "a Reservation that selects no pods serves none",
			reservations: inParis(2, func(r *broker.Reservation) { r.Labels = nil }),
			node:         nodeWith("paris"),
			want:         noReservation,
		},
	})
}

func runFilter(t *testing.T, cases map[string]filterCase) {
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			p := testPlugin(OverflowArgs{})
			for _, r := range tc.reservations {
				p.grants.Set(r)
			}
			pod := demandtest.JobPod("crunch", "crunch-0", "1")
			if tc.change != nil {
				tc.change(p, pod)
			}
			for _, info := range tc.node.GetPods() {
				guest := info.GetPod().DeepCopy()
				guest.Spec.NodeName = tc.node.Node().Name
				p.placements.SetPod(guest)
			}
			state := scheduler.NewCycleState()
			if _, status := p.PreFilter(t.Context(), state, pod, nil); !status.IsSuccess() {
				t.Fatalf("PreFilter must let Filter run for every pod, got %v", status)
			}
			status := p.Filter(t.Context(), state, pod, tc.node)
			code := framework.UnschedulableAndUnresolvable
			if tc.want == "" {
				code = framework.Success
			}
			if status.Code() != code || status.Message() != tc.want {
				t.Errorf("got %v, want %s %q, because %s", status, code, tc.want, tc.reason)
			}
		})
	}
}

func TestScore(t *testing.T) {
	p := testPlugin(OverflowArgs{})
	home, paris := nodeWith(""), nodeWith("paris")
	local, _ := p.Score(t.Context(), scheduler.NewCycleState(), nil, home)
	virtual, _ := p.Score(t.Context(), scheduler.NewCycleState(), nil, paris)
	if local <= virtual {
		t.Errorf("local node scores %d, virtual node %d", local, virtual)
	}
	granted, pooled := &cycleState{grants: &usage.Grants{}}, &cycleState{pools: []*usage.Pool{{}}}
	for name, tc := range map[string]struct {
		state *cycleState
		nodes []framework.NodeInfo
		skip  bool
	}{
		"local only":          {granted, []framework.NodeInfo{home, nodeWith("")}, true},
		"virtual only":        {granted, []framework.NodeInfo{paris}, true},
		"both":                {granted, []framework.NodeInfo{home, paris}, false},
		"both, with a pool":   {pooled, []framework.NodeInfo{home, paris}, false},
		"both, with no grant": {&cycleState{}, []framework.NodeInfo{home, paris}, true},
		"two virtual":         {granted, []framework.NodeInfo{paris, nodeWith("berlin")}, false},
	} {
		state := scheduler.NewCycleState()
		state.Write(stateKey, tc.state)
		if got := p.PreScore(t.Context(), state, nil, tc.nodes).IsSkip(); got != tc.skip {
			t.Errorf("%s: skipped %t, want %t", name, got, tc.skip)
		}
	}
}

func TestSignPod(t *testing.T) {
	p := testPlugin(OverflowArgs{})
	sign := func(pod *corev1.Pod) any {
		t.Helper()
		fragments, status := p.SignPod(t.Context(), pod)
		if !status.IsSuccess() || len(fragments) != 1 || fragments[0].Key != signKey {
			t.Fatalf("got %v %v", fragments, status)
		}
		return fragments[0].Value
	}
	a, b, other := demandtest.JobPod("crunch", "crunch-0", "1"), demandtest.JobPod("crunch", "crunch-1", "1"), demandtest.JobPod("other", "other-0", "1")
	if sign(a) != sign(other) {
		t.Error("pods without grants are not batched together")
	}
	p.grants.Set(demandtest.ReservationFor(a, map[string]int32{"paris": 2}))
	if sign(a) != sign(b) {
		t.Error("pods of one grant are not batched together")
	}
	if sign(a) == sign(other) {
		t.Error("pods with and without a grant are batched together")
	}
}

type postFilterCase struct {
	reason  string
	order   Order
	change  func(*Plugin, *corev1.Pod)
	code    framework.Code
	message string
	queued  bool
}

// refusedReservation is that of a pod of a postFilterCase.
func refusedReservation() *broker.Reservation {
	refused := demandtest.ReservationFor(demandtest.JobPod("crunch", "crunch-0", "1"), nil)
	refused.Status.Conditions = []metav1.Condition{{Type: broker.ConditionQueued, Status: metav1.ConditionTrue}}
	return refused
}

// TestPostFilterOfSome: preemption waits for the pods only that capacity is coming for.
func TestPostFilterOfSome(t *testing.T) {
	runPostFilter(t, map[string]postFilterCase{
		"a policy allows one more": {
			reason: "capacity may come for it", order: BeforePreemption,
			change: func(p *Plugin, pod *corev1.Pod) {
				key, _ := p.keys.Get(pod)
				p.grants.SetUnasked(key.Key, true, 1)
			},
			code: framework.UnschedulableAndUnresolvable, message: "waiting for capacity in another cluster", queued: true,
		},
		"a policy allows one more, which is for another pod": {
			reason: "preemption may help", order: BeforePreemption,
			change: func(p *Plugin, pod *corev1.Pod) {
				first := pod.DeepCopy()
				first.Name, first.UID = "a", "a"
				p.PostFilter(t.Context(), scheduler.NewCycleState(), first, nil)
				key, _ := p.keys.Get(pod)
				p.grants.SetUnasked(key.Key, true, 1)
			},
			code: framework.Unschedulable, message: "capacity in other clusters cannot be requested", queued: true,
		},
		"refused but for one": {
			reason: "its virtual node is about to be ready", order: BeforePreemption,
			change: func(p *Plugin, _ *corev1.Pod) {
				partly := refusedReservation()
				partly.Status.Allocations = []broker.Allocation{{Cluster: "paris", PodSets: partly.Spec.PodSets, Accepted: true}}
				p.grants.Set(partly)
			},
			code: framework.UnschedulableAndUnresolvable, message: "waiting for capacity in another cluster", queued: true,
		},
	})
}

func TestPostFilter(t *testing.T) {
	runPostFilter(t, map[string]postFilterCase{
		"after preemption": {
			reason: "the other PostFilter plugins ran before", order: AfterPreemption,
			code: framework.Unschedulable, message: "waiting for capacity in another cluster", queued: true,
		},
		"before preemption": {
			reason: "no preemption while the request is undecided", order: BeforePreemption,
			code: framework.UnschedulableAndUnresolvable, message: "waiting for capacity in another cluster", queued: true,
		},
		"refused": {
			reason: "preemption may help", order: BeforePreemption,
			change: func(p *Plugin, _ *corev1.Pod) { p.grants.Set(refusedReservation()) },
			code:   framework.Unschedulable, message: "insufficient capacity in other clusters", queued: true,
		},
		"victims terminate": {
			reason: "its place is about to be free; what it was noted for before is of no use", order: AfterPreemption,
			change: func(p *Plugin, pod *corev1.Pod) {
				p.PostFilter(t.Context(), scheduler.NewCycleState(), pod, nil)
				nominate(p, pod, -1, true)
			},
			code: framework.Unschedulable, message: "waiting for preemption victims to terminate",
		},
		"a pod beside it terminates": {
			reason: "that is no victim of preemption", order: AfterPreemption,
			change: func(p *Plugin, pod *corev1.Pod) { nominate(p, pod, 0, true) },
			code:   framework.Unschedulable, message: "waiting for capacity in another cluster", queued: true,
		},
		"no victim terminates": {
			reason: "another pod may have taken its place", order: AfterPreemption,
			change: func(p *Plugin, pod *corev1.Pod) { nominate(p, pod, -1, false) },
			code:   framework.Unschedulable, message: "waiting for capacity in another cluster", queued: true,
		},
		"not synced": {
			reason: "the other PostFilter plugins ran before", order: AfterPreemption,
			change: func(p *Plugin, _ *corev1.Pod) { p.synced = func() bool { return false } },
			code:   framework.Unschedulable, message: "cannot overflow: Reservations are not synced", queued: true,
		},
		"not synced, before preemption": {
			reason: "the scheduler may just have started", order: BeforePreemption,
			change: func(p *Plugin, _ *corev1.Pod) { p.synced = func() bool { return false } },
			code:   framework.UnschedulableAndUnresolvable, message: "cannot overflow: Reservations are not synced", queued: true,
		},
		"not synced for long": {
			reason: "they may not be installed, and preemption may help", order: BeforePreemption,
			change: func(p *Plugin, pod *corev1.Pod) {
				p.synced = func() bool { return false }
				p.PostFilter(t.Context(), scheduler.NewCycleState(), pod, nil)
				now := p.clock.(*clocktesting.FakeClock)
				now.SetTime(now.Now().Add(10 * time.Second))
			},
			code: framework.Unschedulable, message: "cannot overflow: Reservations are not synced", queued: true,
		},
		"cannot overflow": {
			reason: "preemption may help; the pod gets an event", order: BeforePreemption,
			change: func(_ *Plugin, pod *corev1.Pod) { pod.Spec.HostNetwork = true },
			code:   framework.Unschedulable, message: "the pod cannot overflow: it violates the Pod Security Standard baseline, which every provider applies: host namespaces (hostNetwork=true)", queued: true,
		},
		"a policy allows no more": {
			reason: "preemption may help", order: BeforePreemption,
			change: func(p *Plugin, pod *corev1.Pod) {
				key, _ := p.keys.Get(pod)
				p.grants.SetUnasked(key.Key, true, 0)
			},
			code: framework.Unschedulable, message: "capacity in other clusters cannot be requested", queued: true,
		},
		"no decision in time": {
			reason: "preemption may help", order: BeforePreemption,
			change: func(p *Plugin, pod *corev1.Pod) {
				p.PostFilter(t.Context(), scheduler.NewCycleState(), pod, nil)
				now := p.clock.(*clocktesting.FakeClock)
				now.SetTime(now.Now().Add(10 * time.Second))
			},
			code: framework.Unschedulable, message: "no decision about capacity in other clusters in time", queued: true,
		},
		"owner unknown": {
			reason: "the pod may be newer than what is known of its owner", order: BeforePreemption,
			change: func(p *Plugin, _ *corev1.Pod) { p.keys = owners.NewKeyCache(p.clock, demandtest.UnknownOwner) },
			code:   framework.UnschedulableAndUnresolvable, message: "waiting for capacity in another cluster", queued: true,
		},
		"owner unknown for long": {
			reason: "it may never become known", order: BeforePreemption,
			change: func(p *Plugin, pod *corev1.Pod) {
				p.keys = owners.NewKeyCache(p.clock, demandtest.UnknownOwner)
				p.PostFilter(t.Context(), scheduler.NewCycleState(), pod, nil)
				now := p.clock.(*clocktesting.FakeClock)
				now.SetTime(now.Now().Add(10 * time.Second))
			},
			code: framework.Unschedulable, message: "no decision about capacity in other clusters in time", queued: true,
		},
		"not opted in": {
			reason: "its namespace did not enable overflow, and may do so later", order: BeforePreemption,
			change: func(_ *Plugin, pod *corev1.Pod) { pod.Namespace = "bank" },
			code:   framework.Unschedulable, queued: true,
		},
	})
}

func runPostFilter(t *testing.T, cases map[string]postFilterCase) {
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			p, pod := testPlugin(OverflowArgs{Overflow: tc.order}), demandtest.JobPod("crunch", "crunch-0", "1")
			if tc.change != nil {
				tc.change(p, pod)
			}
			result, status := p.PostFilter(t.Context(), scheduler.NewCycleState(), pod, nil)
			if result != nil || status.Code() != tc.code || status.Message() != tc.message {
				t.Errorf("got %v %v, want %v %q, because %s", result, status, tc.code, tc.message, tc.reason)
			}
			if _, queued := p.queue.Take().Unschedulable[pod.UID]; queued != tc.queued {
				t.Errorf("queued: got %t, want %t", queued, tc.queued)
			}
		})
	}
}

// nominate nominates the node of this cluster for a pod: another pod is there, whose priority
// differs from its own, and which may be terminating.
func nominate(p *Plugin, pod *corev1.Pod, difference int32, terminating bool) {
	home, other := nodeWith("").Node(), demandtest.JobPod("low", "low-0", "1")
	pod.Spec.Priority, other.Spec.Priority = ptr.To[int32](10), ptr.To(10+difference)
	pod.Status.NominatedNodeName, other.Spec.NodeName = home.Name, home.Name
	if terminating {
		other.DeletionTimestamp = &metav1.Time{Time: p.clock.Now()}
	}
	p.handle = snapshotHandle{snapshot: schedulercache.NewSnapshot([]*corev1.Pod{other}, []*corev1.Node{home})}
}

// snapshotHandle is the handle of a scheduler that has taken a snapshot.
type snapshotHandle struct {
	framework.Handle
	snapshot framework.SharedLister
}

func (h snapshotHandle) SnapshotSharedLister() framework.SharedLister { return h.snapshot }

// A grant that arrives during the cycle of a pod that is not known to be pending wakes
// the pod at the end of the cycle; the same grant does so only once.
func TestGrantDuringTheCycle(t *testing.T) {
	paris := nodeWith("paris").Node()
	p := testPlugin(OverflowArgs{}, paris)
	now := p.clock.(*clocktesting.FakeClock)
	p.placements.SetNode(paris)
	now.SetTime(now.Now().Add(time.Hour))
	var woken []string
	w := &waiting.Waker{Gate: p.gate, Grants: p.grants, Placements: p.placements, Nodes: p.nodes, Settled: p.settled, Pools: p.pools,
		Activate: func(pods map[string]*corev1.Pod) { woken = append(woken, slices.Collect(maps.Keys(pods))...) }}
	pod := demandtest.JobPod("crunch", "crunch-0", "1")
	pod.Spec.Tolerations = []corev1.Toleration{{Key: broker.TaintOverflow, Operator: corev1.TolerationOpExists}}
	key, _ := p.keys.Get(pod)
	cycle := func(during func()) int {
		t.Helper()
		woken = nil
		state := scheduler.NewCycleState()
		if _, status := p.PreFilter(t.Context(), state, pod, nil); !status.IsSuccess() {
			t.Fatal(status)
		}
		now.SetTime(now.Now().Add(time.Second))
		during()
		if _, status := p.PostFilter(t.Context(), state, pod, nil); status.IsSuccess() {
			t.Fatal("PostFilter must not succeed")
		}
		if !p.PreEnqueue(t.Context(), pod).IsRejected() {
			t.Error("the gate is open after a failed cycle")
		}
		w.Wake(map[demand.Key]bool{key.Key: true}, nil, true)
		if len(woken) > 0 && !p.PreEnqueue(t.Context(), pod).IsSuccess() {
			t.Error("a pod was activated that cannot pass the gate")
		}
		return len(woken)
	}
	if n := cycle(func() {}); n != 0 {
		t.Errorf("without a grant: woken %v", woken)
	}
	if n := cycle(func() { p.grants.Set(demandtest.ReservationFor(pod, map[string]int32{"paris": 1})) }); n != 1 {
		t.Error("with a new grant: not woken")
	}
	now.SetTime(now.Now().Add(time.Second))
	if n := cycle(func() {}); n != 0 {
		t.Errorf("with the same grant: woken %v", woken)
	}
}

// A pod that was not tried yet is held, and capacity requested for it, while another one of
// its owner and shape waits that has just not fit.
func TestUntriedPodsAreHeld(t *testing.T) {
	for name, tc := range map[string]struct {
		reason string
		change func(*Plugin, *corev1.Pod)
		holds  bool
	}{
		"alike": {reason: "it would not fit either", holds: true},
		"another shape": {reason: "it may fit", change: func(_ *Plugin, pod *corev1.Pod) {
			pod.Spec.Containers[0].Resources.Requests = expect.Resources("cpu", "2")
		}},
		"tried": {reason: "what it knows of itself is newer", change: func(_ *Plugin, pod *corev1.Pod) {
			pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse}}
		}},
		"not admissible": {reason: "its volume may be elsewhere", change: func(_ *Plugin, pod *corev1.Pod) {
			pod.Spec.Volumes = []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{}}}}
		}},
		"not opted in": {reason: "it cannot overflow", change: func(_ *Plugin, pod *corev1.Pod) { pod.Namespace = "bank" }},
		"nominated":    {reason: "a node is freed for it", change: func(_ *Plugin, pod *corev1.Pod) { pod.Status.NominatedNodeName = "home" }},
		"of a gang": {reason: "it is tried as a whole", change: func(p *Plugin, pod *corev1.Pod) {
			pod.Labels = map[string]string{broker.LabelPodGroup: "ring"}
			other := demandtest.JobPod("crunch", "crunch-2", "1")
			other.Labels = pod.Labels
			key, _ := p.keys.Get(other)
			p.gate.Close(other, key.Key, p.clock.Now(), time.Time{})
		}},
		"before preemption": {reason: "preemption waits for a decision, from its first cycle", change: func(p *Plugin, _ *corev1.Pod) {
			p.args.Overflow = BeforePreemption
		}},
		"autoscaler first": {reason: "it must see the pod", change: func(p *Plugin, _ *corev1.Pod) { p.args.AskAfter.Duration = time.Minute }},
		"capped": {reason: "no capacity will come soon", change: func(p *Plugin, pod *corev1.Pod) {
			key, _ := p.keys.Get(pod)
			p.grants.SetUnasked(key.Key, true, 0)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			p, pod := testPlugin(OverflowArgs{}), demandtest.JobPod("crunch", "crunch-1", "1")
			p.PostFilter(t.Context(), scheduler.NewCycleState(), demandtest.JobPod("crunch", "crunch-0", "1"), nil)
			if tc.change != nil {
				tc.change(p, pod)
			}
			held := p.PreEnqueue(t.Context(), pod).IsRejected()
			if _, requested := p.queue.Take().Unschedulable[pod.UID]; held != tc.holds || requested != held {
				t.Errorf("held: %t, and requested: %t, want %t, because %s", held, requested, tc.holds, tc.reason)
			}
		})
	}
}

// A dry run of preemption that has removed a guest finds no place on a virtual node,
// whatever the grants say; the state of others is not changed by it.
func TestGuestsAreNoVictims(t *testing.T) {
	guest := demandtest.JobPod("other", "guest", "1")
	paris := nodeWith("paris", guest)
	p := testPlugin(OverflowArgs{}, paris.Node())
	pod := demandtest.JobPod("crunch", "crunch-0", "1")
	p.grants.Set(demandtest.ReservationFor(pod, map[string]int32{"paris": 5}))
	state := scheduler.NewCycleState()
	if _, status := p.PreFilter(t.Context(), state, pod, nil); !status.IsSuccess() {
		t.Fatal(status)
	}
	victim := paris.GetPods()[0]
	dryRun := state.Clone()
	if status := p.PreFilterExtensions().RemovePod(t.Context(), dryRun, pod, victim, paris); !status.IsSuccess() {
		t.Fatal(status)
	}
	if got := p.Filter(t.Context(), dryRun, pod, paris).Code(); got != framework.UnschedulableAndUnresolvable {
		t.Errorf("without the guest: got %v", got)
	}
	if status := p.Filter(t.Context(), state, pod, paris); !status.IsSuccess() {
		t.Errorf("outside of the dry run: got %v", status)
	}
	if status := p.PreFilterExtensions().AddPod(t.Context(), dryRun, pod, victim, paris); !status.IsSuccess() {
		t.Fatal(status)
	}
	if status := p.Filter(t.Context(), dryRun, pod, paris); !status.IsSuccess() {
		t.Errorf("with the guest again: got %v", status)
	}
}

func TestQueueingHints(t *testing.T) {
	home, paris := nodeWith("").Node(), nodeWith("paris").Node()
	p := testPlugin(OverflowArgs{}, home, paris)
	pending, deleted := demandtest.JobPod("crunch", "crunch-0", "1"), demandtest.JobPod("crunch", "crunch-1", "1")
	for _, tc := range []struct {
		node, namespace string
		want            framework.QueueingHint
	}{
		{paris.Name, "shop", framework.QueueSkip}, // no grant there
		{"deleted-node", "shop", framework.Queue},
		{home.Name, "shop", framework.QueueSkip},
		{paris.Name, "bank", framework.QueueSkip},
	} {
		deleted.Spec.NodeName, deleted.Namespace = tc.node, tc.namespace
		if got, err := p.isSchedulableAfterPodDeleted(klog.Background(), pending, deleted, nil); err != nil || got != tc.want {
			t.Errorf("a pod of %s left %s: got %v %v, want %v", tc.namespace, tc.node, got, err, tc.want)
		}
	}
	for node, want := range map[*corev1.Node]framework.QueueingHint{home: framework.Queue, paris: framework.QueueSkip} {
		if got, err := p.isSchedulableAfterNodeAdded(klog.Background(), pending, nil, node); err != nil || got != want {
			t.Errorf("node %s: got %v %v, want %v", node.Name, got, err, want)
		}
	}
	p.grants.Set(demandtest.ReservationFor(pending, map[string]int32{"paris": 1}))
	if got, err := p.isSchedulableAfterNodeAdded(klog.Background(), pending, nil, paris); err != nil || got != framework.Queue {
		t.Errorf("a node with a grant of the pod: got %v %v", got, err)
	}
	deleted.Spec.NodeName, deleted.Namespace = paris.Name, "shop"
	if got, err := p.isSchedulableAfterPodDeleted(klog.Background(), pending, deleted, nil); err != nil || got != framework.Queue {
		t.Errorf("a pod left a node with a grant of the pod: got %v %v", got, err)
	}
}

// TestReplacedReservation: an informer that was cut off shows the deletion and creation of a
// Reservation as an update.
func TestReplacedReservation(t *testing.T) {
	p := testPlugin(OverflowArgs{})
	former, latter := demandtest.JobPod("crunch", "crunch-0", "1"), demandtest.JobPod("crunch", "crunch-1", "2")
	reservation := func(pod *corev1.Pod, uid types.UID) *broker.Reservation {
		r := demandtest.ReservationFor(pod, map[string]int32{"paris": 1})
		r.UID = uid
		return r
	}
	before, after := reservation(former, "1"), reservation(latter, "2")
	handler := p.reservationHandler()
	handler.OnAdd(before, false)
	if p.grantsOf(former) == nil {
		t.Fatal("the pod has no grant")
	}
	handler.OnUpdate(before, after)
	if p.grantsOf(former) != nil || p.grantsOf(latter) == nil {
		t.Errorf("grants of the former Reservation's pods: %+v, of the latter's: %+v", p.grantsOf(former), p.grantsOf(latter))
	}
}

// TestReplacedPod: an informer that was cut off shows the deletion of a pod and the creation
// of another one of that name as an update. The former one uses its grant no more, and does
// not wait any more.
func TestReplacedPod(t *testing.T) {
	p, guest, pending := testPlugin(OverflowArgs{}, nodeWith("paris").Node()), demandtest.JobPod("crunch", "crunch-0", "1"), demandtest.JobPod("crunch", "crunch-1", "1")
	p.handle = profile{}
	untried := waiting.NewUntriedPods(p.clock)
	handler := p.podHandler(func() bool { return false }, untried)
	guest.Spec.NodeName = broker.VirtualNodeName("paris")
	handler.OnAdd(guest, false)
	handler.OnAdd(pending, false)
	p.PostFilter(t.Context(), scheduler.NewCycleState(), pending, nil)
	p.queue.Take()
	key, _ := p.keys.Get(guest)
	if n := p.placements.LivingOf(key.Key); n != 1 {
		t.Fatalf("%d pods use the grant, want 1", n)
	}
	for _, before := range []*corev1.Pod{guest, pending} {
		after := demandtest.JobPod("crunch", before.Name, "1")
		after.UID = before.UID + "-again"
		handler.OnUpdate(before, after)
		if p.keys.Has(before.UID) {
			t.Errorf("the key of the former %s is kept", before.Name)
		}
	}
	if n := p.placements.LivingOf(key.Key); n != 0 {
		t.Errorf("%d pods use the grant, want 0", n)
	}
	if taken := p.queue.Take(); !taken.Removed[pending.UID] || !taken.Keys[key.Key] {
		t.Errorf("the controller gets %+v", taken)
	}
}
