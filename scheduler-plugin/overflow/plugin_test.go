package overflow

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	appslisters "k8s.io/client-go/listers/apps/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	framework "k8s.io/kube-scheduler/framework"
	scheduler "k8s.io/kubernetes/pkg/scheduler/framework"
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

func TestArgs(t *testing.T) {
	const head = "apiVersion: broker.fluidos.eu/v1alpha1\nkind: OverflowArgs\n"
	cases := map[string]struct {
		raw  string
		want string // "order quiet longest", or part of an error after "error: "
	}{
		"none":            {"", "AfterPreemption 200ms 1s"},
		"empty":           {head, "AfterPreemption 200ms 1s"},
		"all":             {head + "overflow: BeforePreemption\nbatchQuiet: 1s\nbatchLongest: 3s", "BeforePreemption 1s 3s"},
		"a longer quiet":  {head + "batchQuiet: 2s", "AfterPreemption 2s 2s"},
		"unknown field":   {head + "overflw: BeforePreemption", `error: unknown field "overflw"`},
		"unknown order":   {head + "overflow: Never", "error: want AfterPreemption or BeforePreemption"},
		"negative":        {head + "batchQuiet: -1s", "error: batchQuiet"},
		"shorter than":    {head + "batchQuiet: 1s\nbatchLongest: 500ms", "error: batchLongest"},
		"no version":      {"overflow: BeforePreemption", "error: want arguments with apiVersion broker.fluidos.eu/v1alpha1"},
		"another version": {"apiVersion: broker.fluidos.eu/v9\nkind: OverflowArgs", "error: want arguments with apiVersion"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			args, err := parseArgs(&runtime.Unknown{Raw: []byte(tc.raw)})
			if part, wantErr := strings.CutPrefix(tc.want, "error: "); wantErr {
				if err == nil || !strings.Contains(err.Error(), part) {
					t.Fatalf("want an error with %q, got %v", part, err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if got := fmt.Sprint(args.Overflow, " ", args.BatchQuiet.Duration, " ", args.BatchLongest.Duration); got != tc.want {
				t.Errorf("got %s, want %s", got, tc.want)
			}
		})
	}
	if _, err := parseArgs(nil); err != nil {
		t.Errorf("no arguments at all: %v", err)
	}
}

// testPlugin is a plugin without its background work.
func testPlugin(args OverflowArgs) *Plugin {
	empty := cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc}
	namespaces := cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{})
	_ = namespaces.Add(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop", Labels: map[string]string{broker.LabelOverflow: broker.OverflowEnabled}}})
	return &Plugin{
		args:       &args,
		namespaces: corelisters.NewNamespaceLister(namespaces),
		nodes:      corelisters.NewNodeLister(cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{})),
		keys:       newKeyring(appslisters.NewReplicaSetLister(cache.NewIndexer(cache.MetaNamespaceKeyFunc, empty))),
		book:       newBook(),
		inbox:      newInbox(),
		placed:     &sync.Map{},
		synced:     func() bool { return true },
	}
}

// jobPod is a pod of a Job of this name, asking for some CPU.
func jobPod(job, name, cpu string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, UID: types.UID(name), OwnerReferences: []metav1.OwnerReference{
			{APIVersion: "batch/v1", Kind: "Job", Name: job, UID: types.UID(job), Controller: ptr.To(true)},
		}},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Resources: corev1.ResourceRequirements{
			Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(cpu)},
		}}}},
	}
}

// reservationFor is a usable Reservation for the pods like this one.
func reservationFor(pod *corev1.Pod, places map[string]int32) *broker.Reservation {
	owner, _ := demand.OwnerOf(pod, nil)
	shape, set := demand.ShapeOf(pod)
	r := &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: owner.Name, Labels: map[string]string{
		broker.LabelOwnerUID: string(owner.UID), broker.LabelShape: shape,
	}}}
	r.Status.ID = "rome-" + owner.Name
	set.Count = 100
	r.Spec.PodSets = []broker.PodSet{set}
	for cluster, n := range places {
		set.Count = n
		r.Status.Allocations = append(r.Status.Allocations, broker.Allocation{Cluster: cluster, PodSets: []broker.PodSet{set}, Accepted: true, VirtualNodeReady: true})
	}
	return r
}

func nodeWith(cluster string, pods ...*corev1.Pod) framework.NodeInfo {
	info := scheduler.NewNodeInfo(pods...)
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "home"}}
	if cluster != "" {
		node.Name, node.Labels = broker.VirtualNodeName(cluster), map[string]string{broker.LabelProvider: cluster}
	}
	info.SetNode(node)
	return info
}

func TestFilter(t *testing.T) {
	pod := jobPod("crunch", "crunch-0", "1")
	one, two := jobPod("crunch", "crunch-1", "1"), jobPod("crunch", "crunch-2", "1")
	change := func(r *broker.Reservation, f func(*broker.Reservation)) *broker.Reservation { f(r); return r }
	const home, unreserved, full = "", "is not reserved for this pod", "no place left"
	cases := map[string]struct {
		reason       string
		reservations []*broker.Reservation
		node         framework.NodeInfo
		want         string // home is success
	}{
		"a node at home": {
			reason: "the plugin has no say there",
			node:   nodeWith("", one, two),
			want:   home,
		},
		"no grant": {
			reason: "nobody gets in without",
			node:   nodeWith("paris"),
			want:   unreserved,
		},
		"a grant": {
			reason:       "one place is left",
			reservations: []*broker.Reservation{reservationFor(pod, map[string]int32{"paris": 2})},
			node:         nodeWith("paris", one),
		},
		"all taken": {
			reason:       "a grant is for so many pods",
			reservations: []*broker.Reservation{reservationFor(pod, map[string]int32{"paris": 2})},
			node:         nodeWith("paris", one, two),
			want:         full,
		},
		"others' pods": {
			reason:       "pods of other owners and shapes use other grants",
			reservations: []*broker.Reservation{reservationFor(pod, map[string]int32{"paris": 1})},
			node:         nodeWith("paris", jobPod("other", "other-0", "1"), jobPod("crunch", "bigger", "2")),
		},
		"finished ones": {
			reason:       "they have given their places back",
			reservations: []*broker.Reservation{reservationFor(pod, map[string]int32{"paris": 1})},
			node: nodeWith("paris", func() *corev1.Pod {
				done := one.DeepCopy()
				done.Status.Phase = corev1.PodSucceeded
				return done
			}()),
		},
		"another provider's grant": {
			reason:       "the capacity is elsewhere",
			reservations: []*broker.Reservation{reservationFor(pod, map[string]int32{"berlin": 2})},
			node:         nodeWith("paris"),
			want:         unreserved,
		},
		"another shape's grant": {
			reason:       "the place was made for other requests",
			reservations: []*broker.Reservation{reservationFor(jobPod("crunch", "x", "2"), map[string]int32{"paris": 2})},
			node:         nodeWith("paris"),
			want:         unreserved,
		},
		"a virtual node that has not grown": {
			reason: "the grant cannot be used yet",
			reservations: []*broker.Reservation{change(reservationFor(pod, map[string]int32{"paris": 2}), func(r *broker.Reservation) {
				r.Status.Allocations[0].VirtualNodeReady = false
			})},
			node: nodeWith("paris"),
			want: unreserved,
		},
		"a virtual node that grows": {
			reason: "what it carries already can be used",
			reservations: []*broker.Reservation{change(reservationFor(pod, map[string]int32{"paris": 5}), func(r *broker.Reservation) {
				r.Status.Allocations[0].VirtualNodeReady, r.Status.Allocations[0].CarriedPods = false, 2
			})},
			node: nodeWith("paris", one),
		},
		"no more than it carries": {
			reason: "the rest of what it grows to cannot be used yet",
			reservations: []*broker.Reservation{change(reservationFor(pod, map[string]int32{"paris": 5}), func(r *broker.Reservation) {
				r.Status.Allocations[0].VirtualNodeReady, r.Status.Allocations[0].CarriedPods = false, 2
			})},
			node: nodeWith("paris", one, two),
			want: full,
		},
		"a provider that has not accepted": {
			reason: "the broker may still take the place back",
			reservations: []*broker.Reservation{change(reservationFor(pod, map[string]int32{"paris": 2}), func(r *broker.Reservation) {
				r.Status.Allocations[0].Accepted, r.Status.Allocations[0].CarriedPods = false, 2
			})},
			node: nodeWith("paris"),
			want: unreserved,
		},
		"being given back": {
			reason: "closing lets nobody in",
			reservations: []*broker.Reservation{change(reservationFor(pod, map[string]int32{"paris": 2}), func(r *broker.Reservation) {
				r.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)}
			})},
			node: nodeWith("paris"),
			want: unreserved,
		},
		"a lowered count": {
			reason: "it binds before the broker has followed",
			reservations: []*broker.Reservation{change(reservationFor(pod, map[string]int32{"paris": 5}), func(r *broker.Reservation) {
				r.Spec.PodSets[0].Count = 1
			})},
			node: nodeWith("paris", one),
			want: full,
		},
		"two Reservations": {
			reason: "one of them may be written by hand, with the same labels",
			reservations: []*broker.Reservation{
				reservationFor(pod, map[string]int32{"paris": 1}),
				change(reservationFor(pod, map[string]int32{"paris": 2}), func(r *broker.Reservation) { r.Name = "by-hand" }),
			},
			node: nodeWith("paris", one, two),
		},
		"without labels": {
			reason: "a Reservation that names no pods serves none",
			reservations: []*broker.Reservation{change(reservationFor(pod, map[string]int32{"paris": 2}), func(r *broker.Reservation) {
				r.Labels = nil
			})},
			node: nodeWith("paris"),
			want: unreserved,
		},
		"opted out": {
			reason:       "the pod said so",
			reservations: []*broker.Reservation{reservationFor(pod, map[string]int32{"paris": 2})},
			node:         nodeWith("paris"),
			want:         unreserved,
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			p := testPlugin(OverflowArgs{})
			for _, r := range tc.reservations {
				p.book.put(r)
			}
			pod := pod.DeepCopy()
			if name == "opted out" {
				pod.Labels = map[string]string{broker.LabelOverflow: broker.OverflowDisabled}
			}
			state := scheduler.NewCycleState()
			if _, status := p.PreFilter(t.Context(), state, pod, nil); !status.IsSuccess() {
				t.Fatalf("PreFilter must let Filter run for every pod, got %v", status)
			}
			status := p.Filter(t.Context(), state, pod, tc.node)
			if tc.want == "" {
				if !status.IsSuccess() {
					t.Errorf("got %v, want success, because %s", status, tc.reason)
				}
				return
			}
			if status.Code() != framework.UnschedulableAndUnresolvable || !strings.Contains(status.Message(), tc.want) {
				t.Errorf("got %v, want UnschedulableAndUnresolvable with %q, because %s", status, tc.want, tc.reason)
			}
		})
	}
}

func TestBookFollowsReservations(t *testing.T) {
	b := newBook()
	pod := jobPod("crunch", "crunch-0", "1")
	r := reservationFor(pod, map[string]int32{"paris": 2, "berlin": 1})
	key, changed := b.put(r)
	if !changed || !b.any("shop") || b.any("bank") {
		t.Fatal("a new Reservation is no news, or in the wrong namespace")
	}
	want := map[string]int32{"paris": 2, "berlin": 1}
	if g := b.grants(key); g == nil || g.key != key || cmp.Diff(want, g.places) != "" || g.holds["paris"] != "rome-crunch" {
		t.Fatalf("got %+v", g)
	}
	r = r.DeepCopy()
	r.Status.Summary = "3 of 3 pods"
	if _, changed := b.put(r); changed {
		t.Error("a status that means nothing to pods is news")
	}
	r = r.DeepCopy()
	r.Status.Allocations = nil
	r.Status.Conditions = []metav1.Condition{{Type: broker.ConditionQueued, Status: metav1.ConditionTrue}}
	if _, changed := b.put(r); !changed || b.grants(key) != nil || !b.refused(key) {
		t.Error("a refusal is no news")
	}
	if _, changed := b.drop(r); !changed || b.any("shop") || b.refused(key) {
		t.Error("a Reservation that is gone is still in the book")
	}
	if _, changed := b.drop(r); changed {
		t.Error("it can go only once")
	}
}

// Where one pod of an owner was turned away, the ones that the scheduler has not
// come to are asked for along with it, and nobody else is.
func TestOthers(t *testing.T) {
	p := testPlugin(OverflowArgs{})
	nodes := cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{})
	for _, cluster := range []string{"", "paris"} {
		if err := nodes.Add(nodeWith(cluster).Node()); err != nil {
			t.Fatal(err)
		}
	}
	pods := cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})
	add := func(name string, change func(*corev1.Pod)) {
		pod := jobPod("crunch", name, "1")
		pod.Spec.SchedulerName = broker.SchedulerName
		change(pod)
		if err := pods.Add(pod); err != nil {
			t.Fatal(err)
		}
	}
	a := &asker{keys: p.keys, namespaces: p.namespaces, pods: corelisters.NewPodLister(pods), nodes: corelisters.NewNodeLister(nodes),
		profile: broker.SchedulerName, placed: &sync.Map{}, stories: map[types.UID]*story{"turned-away": {}}}
	count := func() int32 {
		return a.others()[demand.Key{Namespace: "shop", OwnerUID: "crunch", Shape: shapeOf(jobPod("crunch", "x", "1"))}]
	}
	for _, tc := range []struct {
		name   string
		change func(*corev1.Pod)
		counts bool
	}{
		{"untried", func(*corev1.Pod) {}, true},
		{"in-paris", func(p *corev1.Pod) { p.Spec.NodeName = broker.VirtualNodeName("paris") }, true},
		{"at-home", func(p *corev1.Pod) { p.Spec.NodeName = "home" }, false},
		{"turned-away", func(*corev1.Pod) {}, false},
		{"tried-before", func(p *corev1.Pod) {
			p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse}}
		}, false},
		{"of-another-scheduler", func(p *corev1.Pod) { p.Spec.SchedulerName = "default-scheduler" }, false},
		{"gated", func(p *corev1.Pod) { p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "wait"}} }, false},
		{"opted-out", func(p *corev1.Pod) { p.Labels = map[string]string{broker.LabelOverflow: broker.OverflowDisabled} }, false},
		{"ending", func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)} }, false},
		{"of-another-shape", func(p *corev1.Pod) {
			p.Spec.Containers[0].Resources.Requests[corev1.ResourceCPU] = resource.MustParse("2")
		}, false},
	} {
		before := count()
		add(tc.name, tc.change)
		if got := count() > before; got != tc.counts {
			t.Errorf("%s: counted %t, want %t", tc.name, got, tc.counts)
		}
	}
	p.placed = a.placed
	before := count()
	p.Reserve(t.Context(), nil, jobPod("crunch", "untried", "1"), "home")
	if count() != before-1 {
		t.Error("a pod that is on its way to a node is counted")
	}
	p.Unreserve(t.Context(), nil, jobPod("crunch", "untried", "1"), "home")
	if count() != before {
		t.Error("a pod that came off its way is not counted again")
	}
}

func shapeOf(pod *corev1.Pod) string {
	shape, _ := demand.ShapeOf(pod)
	return shape
}

// More is asked for when the answer to the last ask is there, or has been awaited
// for long enough.
func TestAnswered(t *testing.T) {
	r := func(generation, observed int64, phase broker.ReservationPhase, conditions ...string) *broker.Reservation {
		r := &broker.Reservation{}
		r.Generation, r.Status.ObservedGeneration, r.Status.Phase = generation, observed, phase
		for _, c := range conditions {
			r.Status.Conditions = append(r.Status.Conditions, metav1.Condition{Type: c, Status: metav1.ConditionTrue})
		}
		return r
	}
	for name, tc := range map[string]struct {
		r    *broker.Reservation
		want bool
	}{
		"not seen yet":     {r(2, 1, broker.ReservationActive, broker.ConditionReady), false},
		"being set up":     {r(2, 2, broker.ReservationReserved), false},
		"ready":            {r(2, 2, broker.ReservationActive, broker.ConditionReady), true},
		"no room":          {r(2, 2, broker.ReservationPending, broker.ConditionQueued), true},
		"can never be met": {r(2, 2, broker.ReservationFailed), true},
	} {
		if got := answered(tc.r); got != tc.want {
			t.Errorf("%s: %t, want %t", name, got, tc.want)
		}
	}
}

func TestScorePrefersHome(t *testing.T) {
	p := testPlugin(OverflowArgs{})
	home, paris := nodeWith(""), nodeWith("paris")
	atHome, _ := p.Score(t.Context(), nil, nil, home)
	away, _ := p.Score(t.Context(), nil, nil, paris)
	if atHome <= away {
		t.Errorf("home scores %d, paris %d", atHome, away)
	}
	for name, tc := range map[string]struct {
		nodes []framework.NodeInfo
		skip  bool
	}{
		"home only":    {[]framework.NodeInfo{home}, true},
		"virtual only": {[]framework.NodeInfo{paris}, true},
		"both":         {[]framework.NodeInfo{home, paris}, false},
	} {
		if got := p.PreScore(t.Context(), nil, nil, tc.nodes).IsSkip(); got != tc.skip {
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
	a, b, other := jobPod("crunch", "crunch-0", "1"), jobPod("crunch", "crunch-1", "1"), jobPod("other", "other-0", "1")
	if sign(a) != sign(other) {
		t.Error("pods without grants do not batch together")
	}
	p.book.put(reservationFor(a, map[string]int32{"paris": 2}))
	if sign(a) != sign(b) {
		t.Error("pods of one grant do not batch together")
	}
	if sign(a) == sign(other) {
		t.Error("pods with and without a grant batch together")
	}
}

func TestPostFilter(t *testing.T) {
	pod := jobPod("crunch", "crunch-0", "1")
	queued := reservationFor(pod, nil)
	queued.Status.Conditions = []metav1.Condition{{Type: broker.ConditionQueued, Status: metav1.ConditionTrue}}
	cases := map[string]struct {
		reason string
		order  Order
		change func(*Plugin, *corev1.Pod)
		code   framework.Code
		noted  bool
	}{
		"after preemption":  {reason: "it is last", order: AfterPreemption, code: framework.Unschedulable, noted: true},
		"before preemption": {reason: "nobody is pushed out while the answer is open", order: BeforePreemption, code: framework.UnschedulableAndUnresolvable, noted: true},
		"refused": {reason: "then preemption may help", order: BeforePreemption, code: framework.Unschedulable, noted: true,
			change: func(p *Plugin, _ *corev1.Pod) { p.book.put(queued) }},
		"not installed": {reason: "then preemption may help", order: BeforePreemption, code: framework.Unschedulable, noted: true,
			change: func(p *Plugin, _ *corev1.Pod) { p.synced = func() bool { return false } }},
		"cannot go": {reason: "then preemption may help; the pod is told", order: BeforePreemption, code: framework.Unschedulable, noted: true,
			change: func(_ *Plugin, pod *corev1.Pod) { pod.Spec.HostNetwork = true }},
		"not opted in": {reason: "its owner did not ask for it", order: BeforePreemption, code: framework.Unschedulable,
			change: func(_ *Plugin, pod *corev1.Pod) { pod.Namespace = "bank" }},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			p, pod := testPlugin(OverflowArgs{Overflow: tc.order}), pod.DeepCopy()
			if tc.change != nil {
				tc.change(p, pod)
			}
			result, status := p.PostFilter(t.Context(), scheduler.NewCycleState(), pod, nil)
			if result != nil || status.Code() != tc.code {
				t.Errorf("got %v %v, want %v, because %s", result, status, tc.code, tc.reason)
			}
			if _, noted := p.inbox.take().pods[pod.UID]; noted != tc.noted {
				t.Errorf("noted: got %t, want %t", noted, tc.noted)
			}
		})
	}
}

// A grant that came while a pod was being turned away, and was nobody's news to
// wake it for, is noticed at the end of its cycle.
func TestGrantDuringTheCycle(t *testing.T) {
	p := testPlugin(OverflowArgs{})
	pod := jobPod("crunch", "crunch-0", "1")
	state := scheduler.NewCycleState()
	turnAway := func() mail {
		if _, status := p.PostFilter(t.Context(), state, pod, nil); status.IsSuccess() {
			t.Fatal("PostFilter cannot help by itself")
		}
		return p.inbox.take()
	}
	if _, status := p.PreFilter(t.Context(), state, pod, nil); !status.IsSuccess() {
		t.Fatal(status)
	}
	if m := turnAway(); len(m.pods) != 1 || len(m.welcome) != 0 {
		t.Errorf("without news: %+v", m)
	}
	p.book.put(reservationFor(pod, map[string]int32{"paris": 1}))
	if m := turnAway(); len(m.welcome) != 1 {
		t.Errorf("with a grant since: %+v", m)
	}
	if _, status := p.PreFilter(t.Context(), state, pod, nil); !status.IsSuccess() {
		t.Fatal(status)
	}
	if m := turnAway(); len(m.welcome) != 0 {
		t.Errorf("with the same grant: %+v", m)
	}
}

func TestHints(t *testing.T) {
	p := testPlugin(OverflowArgs{})
	nodes := cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{})
	home, paris := nodeWith("").Node(), nodeWith("paris").Node()
	for _, n := range []*corev1.Node{home, paris} {
		if err := nodes.Add(n); err != nil {
			t.Fatal(err)
		}
	}
	p.nodes = corelisters.NewNodeLister(nodes)
	waiting, gone := jobPod("crunch", "crunch-0", "1"), jobPod("crunch", "crunch-1", "1")
	for _, tc := range []struct {
		node, namespace string
		want            framework.QueueingHint
	}{
		{paris.Name, "shop", framework.Queue},
		{"a-node-that-went", "shop", framework.Queue},
		{home.Name, "shop", framework.QueueSkip},
		{paris.Name, "bank", framework.QueueSkip},
	} {
		gone.Spec.NodeName, gone.Namespace = tc.node, tc.namespace
		if got, err := p.onPodGone(klog.Background(), waiting, gone, nil); err != nil || got != tc.want {
			t.Errorf("a pod of %s left %s: got %v %v, want %v", tc.namespace, tc.node, got, err, tc.want)
		}
	}
	for node, want := range map[*corev1.Node]framework.QueueingHint{home: framework.Queue, paris: framework.QueueSkip} {
		if got, err := p.onNodeAdded(klog.Background(), waiting, nil, node); err != nil || got != want {
			t.Errorf("node %s: got %v %v, want %v", node.Name, got, err, want)
		}
	}
	p.book.put(reservationFor(waiting, map[string]int32{"paris": 1}))
	if got, err := p.onNodeAdded(klog.Background(), waiting, nil, paris); err != nil || got != framework.Queue {
		t.Errorf("a node on which the pod has a grant: got %v %v", got, err)
	}
}

func TestPolicyFor(t *testing.T) {
	policy := func(name string, selector map[string]string) *broker.OverflowPolicy {
		return &broker.OverflowPolicy{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: broker.OverflowPolicySpec{NamespaceSelector: metav1.LabelSelector{MatchLabels: selector}}}
	}
	all := []*broker.OverflowPolicy{policy("z-everybody", nil), policy("b", map[string]string{"team": "a"}), policy("a", map[string]string{"team": "b"})}
	for team, want := range map[string]string{"a": "b", "b": "a", "c": "z-everybody"} {
		got, err := policyFor(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"team": team}}}, all)
		if err != nil || got.Name != want {
			t.Errorf("team %s: got %v %v, want %s", team, got, err, want)
		}
	}
	if got, err := policyFor(&corev1.Namespace{}, nil); got != nil || err != nil {
		t.Errorf("without policies: got %v %v", got, err)
	}
	broken := policy("a", nil)
	broken.Spec.NamespaceSelector.MatchExpressions = []metav1.LabelSelectorRequirement{{Key: "x", Operator: "Unlike"}}
	if _, err := policyFor(&corev1.Namespace{}, []*broker.OverflowPolicy{broken}); err == nil {
		t.Error("a policy that cannot be read was passed over")
	}
}

func TestAffordable(t *testing.T) {
	q := func(s string) *resource.Quantity { return ptr.To(resource.MustParse(s)) }
	set := broker.PodSet{Requests: broker.ResourceQuantities{CPU: q("300m"), Memory: q("1Gi")}}
	cases := map[string]struct {
		ceiling broker.ResourceQuantities
		others  corev1.ResourceList
		want    int32
		short   corev1.ResourceName
	}{
		"whole pods only":       {broker.ResourceQuantities{CPU: q("1")}, nil, 3, "cpu"},
		"others count":          {broker.ResourceQuantities{CPU: q("1")}, corev1.ResourceList{"cpu": *q("500m")}, 1, "cpu"},
		"the scarcest":          {broker.ResourceQuantities{CPU: q("10"), Memory: q("2Gi")}, nil, 2, "memory"},
		"over it already":       {broker.ResourceQuantities{CPU: q("1")}, corev1.ResourceList{"cpu": *q("2")}, 0, "cpu"},
		"none at all":           {broker.ResourceQuantities{CPU: q("0")}, nil, 0, "cpu"},
		"of what is not needed": {broker.ResourceQuantities{GPU: q("0")}, nil, 1<<31 - 1, ""},
		"very much":             {broker.ResourceQuantities{Memory: q("8Ei")}, nil, 1<<31 - 1, ""},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if n, short := affordable(set, tc.ceiling, tc.others); n != tc.want || short != tc.short {
				t.Errorf("got %d %s, want %d %s", n, short, tc.want, tc.short)
			}
		})
	}
}

func TestShorten(t *testing.T) {
	if got := shorten("all of it"); got != "all of it" {
		t.Errorf("got %q", got)
	}
	if got := shorten(strings.Repeat("word ", 500)); len(got) > noteLength || !strings.HasSuffix(got, "word …") {
		t.Errorf("%d bytes, ending %q", len(got), got[len(got)-20:])
	}
}
