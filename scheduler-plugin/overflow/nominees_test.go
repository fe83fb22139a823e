package overflow

import (
	"maps"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	framework "k8s.io/kube-scheduler/framework"
	scheduler "k8s.io/kubernetes/pkg/scheduler/framework"
	clocktesting "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand/demandtest"
	"github.com/spillway-dev/spillway/scheduler-plugin/usage"
	"github.com/spillway-dev/spillway/scheduler-plugin/waiting"
)

// otherPod is a pod of another scheduler that is nominated to node home.
func otherPod(name, cpu string, change ...func(*corev1.Pod)) *corev1.Pod {
	pod := demandtest.JobPod("guests", name, cpu)
	pod.Spec.SchedulerName, pod.Status.NominatedNodeName = corev1.DefaultSchedulerName, "home"
	for _, f := range change {
		f(pod)
	}
	return pod
}

func localNode(name, cpu string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: corev1.NodeStatus{Allocatable: expect.Resources("cpu", cpu, "pods", "10")}}
}

// activated is the handle of a profile that records the pods that are activated.
type activated struct {
	profile
	names *[]string
}

func (a activated) Activate(_ klog.Logger, pods map[string]*corev1.Pod) {
	*a.names = append(*a.names, slices.Sorted(maps.Keys(pods))...)
}

// podEvents returns the handler of a plugin for pods, and the names of those that are activated.
func podEvents(p *Plugin) (handler cache.ResourceEventHandler, names *[]string) {
	names = new([]string)
	p.handle = activated{names: names}
	return p.podHandler(func() bool { return false }, waiting.NewUntriedPods(p.clock)), names
}

// homeWith is node home with 4 CPUs, an extended resource and room for 4 pods, as the scheduler sees it.
func homeWith(pods ...*corev1.Pod) framework.NodeInfo {
	info, node := scheduler.NewNodeInfo(pods...), localNode("home", "4")
	node.Status.Allocatable = expect.Resources("cpu", "4", "memory", "4Gi", "pods", "4", "example.com/device", "1")
	info.SetNode(node)
	return info
}

func requesting(resources ...string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Spec.Containers[0].Resources.Requests = expect.Resources(resources...) }
}

func withPriority(priority int32) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Spec.Priority = ptr.To(priority) }
}

func onNode(node string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Spec.NodeName = node }
}

// TestFilterBesideNominees: the room of node home for a pod of priority 10 that requests 2 of
// its 4 CPUs.
func TestFilterBesideNominees(t *testing.T) {
	ending := func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)} }
	guest := func(change ...func(*corev1.Pod)) *corev1.Pod {
		return otherPod("guest", "3", append([]func(*corev1.Pod){withPriority(10)}, change...)...)
	}
	for name, tc := range map[string]struct {
		reason string
		there  []*corev1.Pod // in the snapshot
		shown  []*corev1.Pod // by the informer, one after the other
		later  time.Duration
		pod    func(*corev1.Pod)
		gone   bool // the guest was deleted at last
		full   bool
	}{
		"no nominee":                  {reason: "the node is empty"},
		"a nominee":                   {reason: "it keeps three CPUs", shown: []*corev1.Pod{guest()}, full: true},
		"with a scheduling gate":      {reason: "the agent nominates it first", full: true, shown: []*corev1.Pod{guest(func(p *corev1.Pod) { p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: broker.GateHandOver}} })}},
		"a small nominee":             {reason: "there is room beside it", shown: []*corev1.Pod{guest(requesting("cpu", "2"))}},
		"two small nominees":          {reason: "they keep all", shown: []*corev1.Pod{guest(requesting("cpu", "2")), otherPod("second", "1", withPriority(10))}, full: true},
		"of a higher priority":        {reason: "it keeps its room", shown: []*corev1.Pod{guest(withPriority(11))}, full: true},
		"of a lower priority":         {reason: "the pod comes first", shown: []*corev1.Pod{guest(withPriority(9))}},
		"on another node":             {reason: "its room is there", shown: []*corev1.Pod{guest(func(p *corev1.Pod) { p.Status.NominatedNodeName = "away" })}},
		"of this scheduler":           {reason: "kube-scheduler keeps its room", shown: []*corev1.Pod{guest(func(p *corev1.Pod) { p.Spec.SchedulerName = broker.SchedulerName })}},
		"that is being deleted":       {reason: "it is not bound any more", shown: []*corev1.Pod{guest(ending)}},
		"that has ended":              {reason: "it needs no node", shown: []*corev1.Pod{guest(func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed })}},
		"that was deleted":            {reason: "its room is free", shown: []*corev1.Pod{guest()}, gone: true},
		"whose nomination ended":      {reason: "its room is free", shown: []*corev1.Pod{guest(), guest(func(p *corev1.Pod) { p.Status.NominatedNodeName = "" })}},
		"nominated to another node":   {reason: "its room is there", shown: []*corev1.Pod{guest(), guest(func(p *corev1.Pod) { p.Status.NominatedNodeName = "away" })}},
		"bound to another node":       {reason: "its room is free", shown: []*corev1.Pod{guest(), guest(onNode("away"))}},
		"just bound":                  {reason: "the snapshot may be older", shown: []*corev1.Pod{guest(), guest(onNode("home"))}, full: true},
		"just bound, and deleted":     {reason: "its room is free", shown: []*corev1.Pod{guest(), guest(onNode("home"))}, gone: true},
		"bound for long":              {reason: "the snapshot has it", shown: []*corev1.Pod{guest(), guest(onNode("home"))}, later: usage.SettleFor},
		"in the snapshot":             {reason: "it is counted once", shown: []*corev1.Pod{guest(requesting("cpu", "2"))}, there: []*corev1.Pod{guest(requesting("cpu", "2"))}},
		"on a full node":              {reason: "NodeResourcesFit says so", shown: []*corev1.Pod{guest()}, there: []*corev1.Pod{demandtest.JobPod("other", "other", "3")}},
		"beside another pod":          {reason: "together they leave one CPU", shown: []*corev1.Pod{guest(requesting("cpu", "1"))}, there: []*corev1.Pod{demandtest.JobPod("other", "other", "2")}, full: true},
		"of another resource":         {reason: "the pod requests none of it", shown: []*corev1.Pod{guest(requesting("memory", "4Gi"))}},
		"of an extended resource":     {reason: "it keeps the only one", shown: []*corev1.Pod{guest(requesting("example.com/device", "1"))}, pod: requesting("example.com/device", "1"), full: true},
		"of nothing":                  {reason: "it is the fourth of four pods", shown: []*corev1.Pod{guest(requesting())}, there: []*corev1.Pod{demandtest.JobPod("a", "a", "0"), demandtest.JobPod("b", "b", "0"), demandtest.JobPod("c", "c", "0")}, full: true},
		"beside a pod of no requests": {reason: "that needs none of it", shown: []*corev1.Pod{guest(requesting("cpu", "4"))}, pod: requesting()},
	} {
		t.Run(name, func(t *testing.T) {
			p, pod := testPlugin(OverflowArgs{}), demandtest.JobPod("crunch", "crunch-0", "2")
			if withPriority(10)(pod); tc.pod != nil {
				tc.pod(pod)
			}
			handler, _ := podEvents(p)
			for _, shown := range tc.shown {
				handler.OnUpdate(shown, shown)
			}
			if tc.gone {
				handler.OnDelete(guest())
			}
			now := p.clock.(*clocktesting.FakeClock)
			now.SetTime(now.Now().Add(tc.later))
			status := p.Filter(t.Context(), scheduler.NewCycleState(), pod, homeWith(tc.there...))
			if tc.full != (status.Code() == framework.Unschedulable && status.Message() == errNominees) || !tc.full && !status.IsSuccess() {
				t.Errorf("got %v, want rejected: %t, because %s", status, tc.full, tc.reason)
			}
			if p.placements.Nominees.KeepsOut(pod.UID) != tc.full {
				t.Errorf("kept out: %t", !tc.full)
			}
		})
	}
}

// TestFilterWithoutNominees: while no pod is nominated, Filter allocates nothing for a node of
// this cluster.
func TestFilterWithoutNominees(t *testing.T) {
	p, pod, home, state := testPlugin(OverflowArgs{}), demandtest.JobPod("crunch", "crunch-0", "2"), homeWith(), scheduler.NewCycleState()
	if n := testing.AllocsPerRun(100, func() { p.Filter(t.Context(), state, pod, home) }); n > 0 {
		t.Errorf("%v allocations", n)
	}
}

// TestRoomBesideNominees: the gate opens only for pods that have room beside the nominees,
// and once one of these goes away.
func TestRoomBesideNominees(t *testing.T) {
	p := testPlugin(OverflowArgs{})
	handler, activated := podEvents(p)
	now := p.clock.(*clocktesting.FakeClock)
	p.placements.SetNode(homeWith().Node())
	placeholder := otherPod("placeholder", "3", onNode("home"), withPriority(0))
	handler.OnAdd(placeholder, false)
	now.SetTime(now.Now().Add(time.Minute))
	waits := func(name, cpu string, priority int32) {
		pod := demandtest.JobPod(name, name, cpu)
		withPriority(priority)(pod)
		key, _ := p.keys.Get(pod)
		p.gate.Close(pod, key.Key, now.Now(), time.Time{})
	}
	waits("large", "3", 0)
	waits("small", "1", 0)
	now.SetTime(now.Now().Add(time.Minute))
	expectWoken := func(when string, want ...string) {
		t.Helper()
		var woken []string
		for _, pod := range p.gate.OpenForRoom(p.placements.RoomOn(p.queue.Take().Nodes)) {
			woken = append(woken, pod.Name)
		}
		if !slices.Equal(woken, want) {
			t.Errorf("%s: woken %v, want %v", when, woken, want)
		}
	}
	guest := otherPod("guest", "3", withPriority(0))
	handler.OnAdd(guest, false)
	expectWoken("nominated")
	handler.OnDelete(placeholder)
	expectWoken("its place is free", "small")
	p.queue.AddNode("home")
	p.gate.Drop("small")
	waits("important", "3", 1)
	now.SetTime(now.Now().Add(time.Second))
	p.placements.Freed("home")
	expectWoken("for a pod of a higher priority", "important")
	p.gate.Drop("important")
	bound := otherPod("guest", "3", withPriority(0), onNode("home"))
	handler.OnUpdate(guest, bound)
	p.queue.AddNode("home")
	p.placements.Freed("home")
	expectWoken("bound")
	now.SetTime(now.Now().Add(time.Second))
	second := otherPod("second", "1", withPriority(0))
	handler.OnAdd(second, false)
	handler.OnDelete(bound)
	expectWoken("ended", "large")
	p.gate.Drop("large")
	waits("again", "4", 0)
	now.SetTime(now.Now().Add(time.Second))
	handler.OnDelete(second)
	expectWoken("the last one is gone", "again")
	if len(*activated) > 0 {
		t.Errorf("%v were activated beside the gate", *activated)
	}
}

// TestKeptOutPods: a pod that does not wait in the gate is tried again once the nominee that
// has kept it out goes away, or a pod leaves a node of this cluster.
func TestKeptOutPods(t *testing.T) {
	for name, tc := range map[string]struct {
		reason    string
		change    func(p *Plugin, handler cache.ResourceEventHandler, guest, pod *corev1.Pod)
		activated bool
		queued    bool // by a pod that is deleted
	}{
		"nothing": {reason: "it still has no room", queued: true},
		"deleted": {reason: "there is room", activated: true, change: func(_ *Plugin, handler cache.ResourceEventHandler, guest, _ *corev1.Pod) { handler.OnDelete(guest) }},
		"bound": {reason: "there is room once a pod ends", queued: true, change: func(_ *Plugin, handler cache.ResourceEventHandler, guest, _ *corev1.Pod) {
			handler.OnUpdate(guest, otherPod(guest.Name, "3", onNode("home")))
		}},
		"bound elsewhere": {reason: "there is room", activated: true, change: func(_ *Plugin, handler cache.ResourceEventHandler, guest, _ *corev1.Pod) {
			handler.OnUpdate(guest, otherPod(guest.Name, "3", onNode("away")))
		}},
		"gated": {reason: "the gate wakes it", change: func(p *Plugin, handler cache.ResourceEventHandler, guest, pod *corev1.Pod) {
			p.gate.Close(pod, demand.Key{}, p.clock.Now(), time.Time{})
			handler.OnDelete(guest)
		}},
		"bound itself": {reason: "it waits no more", change: func(_ *Plugin, handler cache.ResourceEventHandler, guest, pod *corev1.Pod) {
			bound := pod.DeepCopy()
			bound.Spec.NodeName = "away"
			handler.OnUpdate(pod, bound)
			handler.OnDelete(guest)
		}},
		"deleted itself": {reason: "it waits no more", change: func(_ *Plugin, handler cache.ResourceEventHandler, guest, pod *corev1.Pod) {
			handler.OnDelete(pod)
			handler.OnDelete(guest)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			home := homeWith()
			p := testPlugin(OverflowArgs{}, home.Node(), nodeWith("paris").Node())
			handler, activated := podEvents(p)
			guest, pod := otherPod("guest", "3"), demandtest.JobPod("crunch", "crunch-0", "2")
			pod.Spec.SchedulerName = broker.SchedulerName
			handler.OnAdd(guest, false)
			handler.OnAdd(pod, false)
			if status := p.Filter(t.Context(), scheduler.NewCycleState(), pod, home); status.IsSuccess() {
				t.Fatal("the pod has room")
			}
			if tc.change != nil {
				tc.change(p, handler, guest, pod)
			}
			if got := slices.Equal(*activated, []string{"shop/crunch-0"}); got != tc.activated || !got && len(*activated) > 0 {
				t.Errorf("activated %v, because %s", *activated, tc.reason)
			}
			for node, want := range map[string]framework.QueueingHint{"home": framework.QueueSkip, broker.VirtualNodeName("paris"): framework.QueueSkip} {
				if tc.queued && node == "home" {
					want = framework.Queue
				}
				other := demandtest.JobPod("other", "other", "1")
				other.Namespace, other.Spec.NodeName = "bank", node
				if got, err := p.isSchedulableAfterPodDeleted(klog.Background(), pod, other, nil); got != want || err != nil {
					t.Errorf("after a pod has left %s: got %v %v, want %v, because %s", node, got, err, want, tc.reason)
				}
			}
		})
	}
}

// profileHandle is the handle of the profile of Spillway's scheduler.
type profileHandle struct{ noneWaits }

func (profileHandle) ProfileName() string { return broker.SchedulerName }

// TestOwnNominee: the gate looks at a node again when a pod of its own scheduler is not nominated
// to it any more, and is not bound to it either.
func TestOwnNominee(t *testing.T) {
	nominated := func(node string) *corev1.Pod {
		pod := demandtest.JobPod("crunch", "nominee", "1")
		pod.Spec.SchedulerName, pod.Status.NominatedNodeName = broker.SchedulerName, node
		return pod
	}
	bound := nominated("home")
	bound.Spec.NodeName = "home"
	ending := nominated("home")
	ending.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)}
	for name, tc := range map[string]struct {
		then  func(h cache.ResourceEventHandler)
		freed bool
	}{
		"deleted":             {func(h cache.ResourceEventHandler) { h.OnDelete(nominated("home")) }, true},
		"deleted at once":     {func(h cache.ResourceEventHandler) { h.OnDelete(ending) }, true},
		"its deletion missed": {func(h cache.ResourceEventHandler) { h.OnDelete(cache.DeletedFinalStateUnknown{Obj: nominated("home")}) }, true},
		"being deleted":       {func(h cache.ResourceEventHandler) { h.OnUpdate(nominated("home"), ending) }, true},
		"nominated elsewhere": {func(h cache.ResourceEventHandler) { h.OnUpdate(nominated("home"), nominated("other")) }, true},
		"nominated no more":   {func(h cache.ResourceEventHandler) { h.OnUpdate(nominated("home"), nominated("")) }, true},
		"unchanged":           {func(h cache.ResourceEventHandler) { h.OnUpdate(nominated("home"), nominated("home")) }, false},
		"bound to it":         {func(h cache.ResourceEventHandler) { h.OnUpdate(nominated("home"), bound) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			home := localNode("home", "4")
			p := testPlugin(OverflowArgs{}, home)
			p.handle = profileHandle{}
			p.placements.SetNode(home)
			handler := p.podHandler(func() bool { return false }, waiting.NewUntriedPods(p.clock))
			handler.OnAdd(nominated("home"), false)
			p.queue.Take()
			now := p.clock.(*clocktesting.FakeClock)
			now.SetTime(now.Now().Add(time.Minute))
			tc.then(handler)
			if got := p.queue.Take().Nodes["home"]; got != tc.freed {
				t.Errorf("it is looked at: %t, want %t", got, tc.freed)
			}
			rooms := p.placements.RoomOn(map[string]bool{"home": true})
			if fresh := rooms[0].ChangedAt.Equal(now.Now()); fresh != tc.freed {
				t.Errorf("its room counts as changed: %t, want %t", fresh, tc.freed)
			}
		})
	}
}
