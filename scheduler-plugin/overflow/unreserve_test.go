package overflow

import (
	"context"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	framework "k8s.io/kube-scheduler/framework"
	scheduler "k8s.io/kubernetes/pkg/scheduler/framework"
	clocktesting "k8s.io/utils/clock/testing"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/compatibility"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand/demandtest"
	"github.com/spillway-dev/spillway/scheduler-plugin/gang"
	"github.com/spillway-dev/spillway/scheduler-plugin/usage"
	"github.com/spillway-dev/spillway/scheduler-plugin/waiting"
)

// noneWaits is the handle of a scheduler in which no pod waits in Permit.
type noneWaits struct{ framework.Handle }

func (noneWaits) IterateOverWaitingPods(func(framework.WaitingPod)) {}

func (noneWaits) Activate(klog.Logger, map[string]*corev1.Pod) {}

// ring makes these pods, which ringPod returns, a gang that requires two.
func (p *Plugin) ring(t *testing.T, pods ...*corev1.Pod) cache.Indexer {
	t.Helper()
	cached, _ := p.unreadRing(t, pods...)
	p.readRing(t)
	return cached
}

func (p *Plugin) readRing(t *testing.T) {
	t.Helper()
	go p.gangs.Run(t.Context(), func(map[string]*corev1.Pod) {}, func(demand.Key) {})
	expect.Eventually(t, "the PodGroup to be known", func() (bool, string) { why := p.gangs.Hold(ringPod("probe")); return why == "", why })
}

// unreadRing is ring before the PodGroup is known, which groups has.
func (p *Plugin) unreadRing(t *testing.T, pods ...*corev1.Pod) (cached cache.Indexer, groups dynamic.Interface) {
	t.Helper()
	of := func(group, version string) schema.GroupVersionResource {
		return schema.GroupVersionResource{Group: group, Version: version, Resource: "podgroups"}
	}
	lists := map[schema.GroupVersionResource]string{of(demand.CoschedulingGangs, "v1alpha1"): "PodGroupList", of(demand.KubernetesGangs, "v1beta1"): "PodGroupList"}
	groups = dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), lists, &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": demand.CoschedulingGangs + "/v1alpha1", "kind": "PodGroup",
		"metadata": map[string]any{"namespace": "shop", "name": "ring"}, "spec": map[string]any{"minMember": int64(2)}}})
	informer := cache.NewSharedIndexInformer(&cache.ListWatch{}, &corev1.Pod{}, 0, cache.Indexers{})
	var err error
	p.gangs, err = gang.New(p.clock, groups, compatibility.Newest, informer, func(string, string) cache.WatchErrorHandlerWithContext {
		return func(context.Context, *cache.Reflector, error) {}
	})
	expect.NoError(t, err)
	for _, pod := range pods {
		expect.NoError(t, informer.GetIndexer().Add(pod))
	}
	return informer.GetIndexer(), groups
}

// TestMemberWithoutItsGroup: a pod of a gang that loses its place after its PodGroup was deleted
// is tried again, as those that wait.
func TestMemberWithoutItsGroup(t *testing.T) {
	p := testPlugin(OverflowArgs{GangTimeout: &metav1.Duration{Duration: time.Minute}}, nodeWith("").Node())
	p.handle = noneWaits{}
	pod := ringPod("crunch-0")
	_, groups := p.unreadRing(t, pod, ringPod("crunch-1"))
	p.readRing(t)
	key, _ := p.keys.KeyOf(pod)
	p.gate.Close(pod, key, p.clock.Now(), time.Time{})
	room := func() []*corev1.Pod {
		return p.gate.OpenForRoom([]usage.Room{{RoomID: usage.RoomID{Node: "home"}, Free: capacity.Vector{"cpu": 4000, "pods": 5 * capacity.Unit}, ChangedAt: p.clock.Now(),
			Need: func(pod *corev1.Pod) (capacity.Vector, bool) { return usage.PodAmounts(pod), true }}})
	}
	now := p.clock.(*clocktesting.FakeClock)
	now.Step(time.Second)
	if len(room()) != 1 {
		t.Fatal("the gate does not open")
	}
	p.placements.Assume(pod, "home", "")
	p.gate.Assumed(pod.UID, usage.RoomID{})
	if status, _ := p.Permit(t.Context(), nil, pod, "home"); !status.IsWait() {
		t.Fatalf("the pod does not wait: %v", status)
	}
	of := schema.GroupVersionResource{Group: demand.CoschedulingGangs, Version: "v1alpha1", Resource: "podgroups"}
	expect.NoError(t, groups.Resource(of).Namespace("shop").Delete(t.Context(), "ring", metav1.DeleteOptions{}))
	expect.Eventually(t, "the PodGroup to be gone", func() (bool, string) { why := p.gangs.Hold(ringPod("probe")); return why != "", "still known" })
	p.Unreserve(t.Context(), nil, pod, "home")
	now.Step(2 * waiting.MinRetry)
	if len(room()) != 1 {
		t.Error("it is not woken for room")
	}
}

func ringPod(name string) *corev1.Pod {
	pod := demandtest.JobPod("crunch", name, "1")
	pod.Labels = map[string]string{broker.LabelPodGroup: "ring"}
	pod.Spec.Tolerations = []corev1.Toleration{{Key: broker.TaintOverflow, Operator: corev1.TolerationOpExists}}
	return pod
}

// ringReservation grants a place for one pod of the gang in paris.
func (p *Plugin) ringReservation(pod *corev1.Pod) *broker.Reservation {
	key, _ := p.keys.Get(pod)
	set := key.Set
	set.Count = 1
	r := demandtest.ReservationFor(pod, nil)
	r.Labels[broker.LabelShape], r.Spec.PodSets = demand.GangShape, []broker.PodSet{set}
	r.Status.Allocations = []broker.Allocation{{Cluster: "paris", PodSets: r.Spec.PodSets, Accepted: true, VirtualNodeReady: true}}
	return r
}

// TestGangWithoutItsGrant: a gang is not bound if the grant of a pod of it that has waited for
// the others is gone by then.
func TestGangWithoutItsGrant(t *testing.T) {
	for name, gone := range map[string]bool{"granted": false, "withdrawn": true} {
		t.Run(name, func(t *testing.T) {
			home, paris := nodeWith("").Node(), nodeWith("paris").Node()
			p, away, other := testPlugin(OverflowArgs{GangTimeout: &metav1.Duration{Duration: time.Minute}}, home, paris), ringPod("crunch-0"), ringPod("crunch-1")
			p.handle = noneWaits{}
			p.ring(t, away, other)
			r := p.ringReservation(away)
			p.grants.Set(r)
			place := func(pod *corev1.Pod, node string) *framework.Status {
				t.Helper()
				state := scheduler.NewCycleState()
				if _, status := p.PreFilter(t.Context(), state, pod, nil); !status.IsSuccess() {
					t.Fatal(status)
				}
				if status := p.Reserve(t.Context(), state, pod, node); !status.IsSuccess() {
					t.Fatal(status)
				}
				status, _ := p.Permit(t.Context(), state, pod, node)
				return status
			}
			if status := place(away, paris.Name); !status.IsWait() {
				t.Fatalf("the first pod does not wait: %v", status)
			}
			if gone {
				p.grants.Delete(r)
			}
			if status := place(other, home.Name); status.IsSuccess() == gone {
				t.Errorf("got %v", status)
			}
		})
	}
}

// TestUnreservedMember: a pod of a gang that gives up its place in another cluster is woken
// for it again, whenever the controller looks at what has become free.
func TestUnreservedMember(t *testing.T) {
	paris := nodeWith("paris").Node()
	p := testPlugin(OverflowArgs{}, paris)
	p.handle = noneWaits{}
	p.placements.SetNode(paris)
	pod := ringPod("crunch-0")
	pods := p.ring(t, pod)
	key, _ := p.keys.Get(pod)
	p.grants.Set(p.ringReservation(pod))
	woken := 0
	w := &waiting.Waker{Gate: p.gate, Grants: p.grants, Placements: p.placements, Nodes: p.nodes, Settled: p.settled, Pools: p.pools,
		Activate: func(pods map[string]*corev1.Pod) { woken += len(pods) }}
	wake := func() { w.Wake(map[demand.Key]bool{key.Key: true}, nil, false) }

	p.gate.Close(pod, key.Key, p.clock.Now(), time.Time{})
	wake()
	p.placements.Assume(pod, paris.Name, "rome-gang")
	p.gate.Assumed(pod.UID, usage.RoomID{})
	if wake(); woken != 1 {
		t.Fatalf("woken %d times for one slot", woken)
	}
	// The controller looks as soon as the queue has something, which is when this is called.
	p.queue.IsVirtual = func(string) bool {
		wake()
		return true
	}
	p.Unreserve(t.Context(), nil, pod, paris.Name)
	if woken != 2 {
		t.Errorf("woken %d times, want once more for the place that it gave up", woken)
	}
	// A pod that was deleted while it had a place would be woken for those of others.
	expect.NoError(t, pods.Delete(pod))
	p.gate.Drop(pod.UID)
	p.placements.Assume(pod, paris.Name, "rome-gang")
	p.Unreserve(t.Context(), nil, pod, paris.Name)
	if n := p.gate.Len(); n != 0 {
		t.Errorf("%d deleted pods wait", n)
	}
}

// TestGatedMember: a gang that has enough pods only with those that have scheduling gates is
// not requested, and none of its pods waits for them once no capacity is requested.
func TestGatedMember(t *testing.T) {
	p := testPlugin(OverflowArgs{GangTimeout: &metav1.Duration{Duration: time.Minute}}, nodeWith("").Node())
	p.handle = noneWaits{}
	pod, gated := ringPod("crunch-0"), ringPod("crunch-1")
	gated.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "example.com/wait"}}
	pods := p.ring(t, pod, gated)
	c, now, _ := testController(t, p, pods)
	c.Gangs = p.gangs
	key, _ := p.keys.KeyOf(pod)
	check := func(what string, requested int32, permitted framework.Code) {
		t.Helper()
		p.PostFilter(t.Context(), scheduler.NewCycleState(), pod, nil)
		c.sync()
		if n := c.requested(); n != requested {
			t.Errorf("%s: %d pods are requested, want %d", what, n, requested)
		}
		p.grants.SetUnasked(key, true, 0)
		if status := p.Reserve(t.Context(), scheduler.NewCycleState(), pod, "home"); !status.IsSuccess() {
			t.Fatal(status)
		}
		if status, _ := p.Permit(t.Context(), nil, pod, "home"); status.Code() != permitted {
			t.Errorf("%s: Permit returns %v, want %s", what, status, permitted)
		}
		p.placements.Forget(pod.UID)
		now.Step(time.Minute)
	}
	check("one has a gate", 0, framework.UnschedulableAndUnresolvable)
	ready := gated.DeepCopy()
	ready.Spec.SchedulingGates = nil
	expect.NoError(t, pods.Update(ready))
	check("none has", 2, framework.Wait)
}

// waitingIn is the handle of a scheduler in which a pod waits in Permit.
type waitingIn struct {
	profileHandle
	pod     *corev1.Pod
	allowed *bool
	// rejected how often; nil if it does not matter.
	rejected *int
}

func (h waitingIn) IterateOverWaitingPods(f func(framework.WaitingPod)) { f(waitingPodOf{h: h}) }

type waitingPodOf struct {
	framework.WaitingPod
	h waitingIn
}

func (w waitingPodOf) GetPod() *corev1.Pod { return w.h.pod }
func (w waitingPodOf) Allow(string)        { *w.h.allowed = true }
func (w waitingPodOf) Reject(string, string) bool {
	if w.h.rejected != nil {
		*w.h.rejected++
	}
	return true
}

// TestLeavingMember: a pod of a gang that is about to lose its place does not count as having
// one, although it has it until the scheduler has taken it away. One that was allowed to be bound
// before does.
func TestLeavingMember(t *testing.T) {
	for name, tc := range map[string]struct {
		between func(p *Plugin, first *corev1.Pod, now *clocktesting.FakeClock)
		bound   bool
	}{
		"it goes on waiting": {func(*Plugin, *corev1.Pod, *clocktesting.FakeClock) {}, true},
		"another has lost its place": {func(p *Plugin, first *corev1.Pod, _ *clocktesting.FakeClock) {
			gang, _ := demand.GangOf(first)
			p.rejectOthers(ringPod("crunch-2"), gang)
		}, false},
		"its time is over": {func(_ *Plugin, _ *corev1.Pod, now *clocktesting.FakeClock) {
			now.SetTime(now.Now().Add(time.Minute))
		}, false},
		"it was rejected, and is tried again": {func(p *Plugin, first *corev1.Pod, _ *clocktesting.FakeClock) {
			gang, _ := demand.GangOf(first)
			p.rejectOthers(ringPod("crunch-2"), gang)
			p.Unreserve(context.Background(), nil, first, "home")
			p.placements.Assume(first, "home", "")
			if status, _ := p.Permit(context.Background(), nil, first, "home"); !status.IsWait() {
				panic(status)
			}
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			p := testPlugin(OverflowArgs{GangTimeout: &metav1.Duration{Duration: time.Minute}}, nodeWith("").Node())
			first, second, allowed := ringPod("crunch-0"), ringPod("crunch-1"), false
			p.handle = waitingIn{pod: first, allowed: &allowed}
			p.ring(t, first, second)
			p.placements.Assume(first, "home", "")
			if status, _ := p.Permit(t.Context(), nil, first, "home"); !status.IsWait() {
				t.Fatalf("the first pod does not wait: %v", status)
			}
			tc.between(p, first, p.clock.(*clocktesting.FakeClock))
			p.placements.Assume(second, "home", "")
			status, _ := p.Permit(t.Context(), nil, second, "home")
			if status.IsSuccess() != tc.bound || allowed != tc.bound {
				t.Errorf("got %v, and the first pod is allowed: %t, want %t", status, allowed, tc.bound)
			}
			if tc.bound && p.gangs.Reject(first.UID) {
				t.Error("a pod that was allowed to be bound counts as rejected")
			}
		})
	}
}

// TestRejectedMembers: when a pod of a gang has lost its place, the one that waits for it does not
// keep its own, also if it is terminating by then; one that is being bound does. It is rejected
// once.
func TestRejectedMembers(t *testing.T) {
	for name, tc := range map[string]struct {
		before   func(p *Plugin, waiting *corev1.Pod)
		rejected int
	}{
		"it waits": {func(*Plugin, *corev1.Pod) {}, 1},
		"it is terminating": {func(p *Plugin, member *corev1.Pod) {
			terminating := member.DeepCopy()
			terminating.DeletionTimestamp = &metav1.Time{Time: p.clock.Now()}
			p.podHandler(func() bool { return false }, waiting.NewUntriedPods(p.clock)).OnUpdate(member, terminating)
		}, 1},
		"it is being bound": {func(p *Plugin, waiting *corev1.Pod) { p.gangs.Allow([]*corev1.Pod{waiting}) }, 0},
		"it was rejected":   {func(p *Plugin, _ *corev1.Pod) { p.Unreserve(context.Background(), nil, ringPod("crunch-2"), "home") }, 1},
		"its time is over, for which the scheduler rejects it": {func(p *Plugin, _ *corev1.Pod) {
			p.clock.(*clocktesting.FakeClock).SetTime(p.clock.Now().Add(time.Minute))
		}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			p := testPlugin(OverflowArgs{GangTimeout: &metav1.Duration{Duration: time.Minute}}, nodeWith("").Node())
			waiting, other, allowed, rejected := ringPod("crunch-0"), ringPod("crunch-1"), false, 0
			p.handle = waitingIn{pod: waiting, allowed: &allowed, rejected: &rejected}
			p.ring(t, waiting, other)
			p.placements.Assume(waiting, "home", "")
			if status, _ := p.Permit(t.Context(), nil, waiting, "home"); !status.IsWait() {
				t.Fatalf("the pod does not wait: %v", status)
			}
			tc.before(p, waiting)
			p.Unreserve(t.Context(), nil, other, "home")
			if rejected != tc.rejected {
				t.Errorf("rejected %d times, want %d", rejected, tc.rejected)
			}
		})
	}
}
