package moves

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	clocktesting "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand/demandtest"
	"github.com/spillway-dev/spillway/scheduler-plugin/owners"
	"github.com/spillway-dev/spillway/scheduler-plugin/request"
	"github.com/spillway-dev/spillway/scheduler-plugin/usage"
)

// ownedPod is a pod of a controller, on a node or pending.
func ownedPod(kind, name, node, cpu string, change ...func(*corev1.Pod)) *corev1.Pod {
	version := map[string]string{"ReplicaSet": "apps/v1", "StatefulSet": "apps/v1", "Job": "batch/v1"}[kind]
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, UID: types.UID(name), Labels: map[string]string{"app": name},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: version, Kind: kind, Name: kind, UID: types.UID(kind), Controller: ptr.To(true)}}},
		Spec: corev1.PodSpec{NodeName: node, SchedulerName: broker.SchedulerName,
			Containers: []corev1.Container{{Name: "main", Resources: corev1.ResourceRequirements{Requests: expect.Resources("cpu", cpu)}}}},
	}
	if node != "" {
		pod.Status.Phase = corev1.PodRunning
	}
	for _, f := range change {
		f(pod)
	}
	return pod
}

func localNode(name, cpu string, taints ...corev1.Taint) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.NodeSpec{Taints: taints},
		Status: corev1.NodeStatus{Allocatable: expect.Resources("cpu", cpu, "pods", "10")}}
}

func unschedulablePod(p *corev1.Pod) {
	p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable}}
}

func repellingPod(app string, namespaces ...string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Affinity = &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{{
			TopologyKey: corev1.LabelHostname, Namespaces: namespaces, LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}},
		}}}}
	}
}

// nominee is a pod that another scheduler has nominated to node home.
func nominee(name, cpu string) *corev1.Pod {
	pod := ownedPod("ReplicaSet", name, "", cpu)
	pod.Spec.SchedulerName, pod.Status.NominatedNodeName = corev1.DefaultSchedulerName, "home"
	return pod
}

// testMover returns a Mover that has observed nothing, in a cluster with namespace shop.
func testMover(nodes ...any) (m *Mover, now *clocktesting.FakeClock) {
	now = clocktesting.NewFakeClock(time.Unix(1000, 0))
	keys := owners.NewKeyCache(now, func(string, metav1.OwnerReference) (*metav1.OwnerReference, bool, bool) { return nil, true, false })
	placements := usage.NewPlacements(now, keys.KeyOf)
	return New(Config{
		Clock: now, Watched: NewWatchedPods(broker.SchedulerName, placements.IsVirtual), Placements: placements, Keys: keys,
		Reservations: request.NewReservations(nil, cache.NewIndexer(cache.MetaNamespaceKeyFunc, request.Indexers()), now),
		Nodes:        corelisters.NewNodeLister(demandtest.NewIndexer(nodes...)),
		Namespaces:   corelisters.NewNamespaceLister(demandtest.NewIndexer(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}})),
	}), now
}

// TestRoomFinder: what counts as room at home for a guest that needs 2 CPUs.
func TestRoomFinder(t *testing.T) {
	paris := localNode("spillway-paris", "100")
	paris.Labels = map[string]string{broker.LabelProvider: "paris"}
	cordoned := localNode("home", "4")
	cordoned.Spec.Unschedulable = true
	cases := map[string]struct {
		reason string
		node   *corev1.Node
		pods   []*corev1.Pod
		want   bool
		after  time.Duration
	}{
		"an empty node":             {"it has four CPUs", localNode("home", "4"), nil, true, 0},
		"part of a node":            {"two CPUs are free", localNode("home", "4"), []*corev1.Pod{ownedPod("ReplicaSet", "p", "home", "2")}, true, 0},
		"a full node":               {"one CPU is free", localNode("home", "4"), []*corev1.Pod{ownedPod("ReplicaSet", "p", "home", "3")}, false, 0},
		"a small node":              {"it never fits", localNode("home", "1"), nil, false, 0},
		"a virtual node":            {"that is not home", paris, nil, false, 0},
		"a cordoned node":           {"no pod is scheduled there", cordoned, nil, false, 0},
		"a tainted node":            {"the guest does not tolerate it", localNode("home", "4", corev1.Taint{Key: "gpu", Effect: corev1.TaintEffectNoSchedule}), nil, false, 0},
		"a pod waits for it":        {"it comes first", localNode("home", "4"), []*corev1.Pod{ownedPod("ReplicaSet", "p", "", "4", unschedulablePod)}, false, 0},
		"a pod waits, not for room": {"it would fit beside the other one, so that something else keeps it", localNode("home", "4"), []*corev1.Pod{ownedPod("ReplicaSet", "p", "", "1", unschedulablePod), ownedPod("ReplicaSet", "q", "home", "1")}, true, time.Hour},
		"a gang waits for others":   {"it would fit, and another pod of it may not", localNode("home", "4"), []*corev1.Pod{ownedPod("ReplicaSet", "p", "", "1", unschedulablePod, func(p *corev1.Pod) { p.Labels[broker.LabelPodGroup] = "ring" }), ownedPod("ReplicaSet", "q", "home", "1")}, false, time.Hour},
		"a pod waits for more":      {"it lacks room for as long", localNode("home", "4"), []*corev1.Pod{ownedPod("ReplicaSet", "p", "", "4", unschedulablePod), ownedPod("ReplicaSet", "q", "home", "1")}, false, time.Hour},
		"a pod waits for none":      {"it is larger than the node", localNode("home", "4"), []*corev1.Pod{ownedPod("ReplicaSet", "p", "", "5", unschedulablePod)}, true, 0},
		"a pod waits elsewhere":     {"it selects other nodes", localNode("home", "4"), []*corev1.Pod{ownedPod("ReplicaSet", "p", "", "1", unschedulablePod, func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{"disk": "ssd"} })}, true, 0},
		"an untried pod":            {"it delays the move only", localNode("home", "4"), []*corev1.Pod{ownedPod("ReplicaSet", "p", "", "1")}, true, 0},
		"a gated pod":               {"no scheduler may place it", localNode("home", "4"), []*corev1.Pod{ownedPod("ReplicaSet", "p", "", "1", unschedulablePod, func(p *corev1.Pod) { p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "x"}} })}, true, 0},
		"a pod that repels it":      {"by required anti-affinity", localNode("home", "4"), []*corev1.Pod{ownedPod("ReplicaSet", "p", "home", "1", repellingPod("guest"))}, false, 0},
		"one that repels others":    {"the guest has another label", localNode("home", "4"), []*corev1.Pod{ownedPod("ReplicaSet", "p", "home", "1", repellingPod("web"))}, true, 0},
		"one of another namespace":  {"its term is for its own", localNode("home", "4"), []*corev1.Pod{ownedPod("ReplicaSet", "p", "home", "1", repellingPod("guest"), func(p *corev1.Pod) { p.Namespace = "other" })}, true, 0},
		"a nominee":                 {"it keeps three CPUs", localNode("home", "4"), []*corev1.Pod{nominee("p", "3")}, false, 0},
		"a small nominee":           {"there is room beside it", localNode("home", "4"), []*corev1.Pod{nominee("p", "2")}, true, 0},
		"one that ended":            {"it repels no more", localNode("home", "4"), []*corev1.Pod{ownedPod("ReplicaSet", "p", "home", "1", repellingPod("guest"), func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded })}, true, 0},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			m, now := testMover(tc.node)
			m.Placements.SetNode(tc.node)
			for _, pod := range tc.pods {
				m.Placements.SetPod(pod)
				m.Watched.Set(pod)
				m.Placements.Nominees.Set(pod)
			}
			now.Step(tc.after)
			if got := m.newRoomFinder().has(ownedPod("ReplicaSet", "guest", "spillway-paris", "2"), demand.Key{}); got != tc.want {
				t.Errorf("%s: got %v", tc.reason, got)
			}
		})
	}
}

func TestMayReturn(t *testing.T) {
	annotated := func(value string) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.Annotations = map[string]string{broker.AnnotationReturnHome: value} }
	}
	for name, tc := range map[string]struct {
		pod  *corev1.Pod
		want bool
	}{
		"a ReplicaSet's":               {ownedPod("ReplicaSet", "p", "n", "1"), true},
		"a StatefulSet's":              {ownedPod("StatefulSet", "p", "n", "1"), true},
		"one that stays":               {ownedPod("ReplicaSet", "p", "n", "1", annotated("disabled")), false},
		"one with an unknown value":    {ownedPod("ReplicaSet", "p", "n", "1", annotated("yes")), false},
		"a Job's":                      {ownedPod("Job", "p", "n", "1"), false},
		"a Job's that tolerates it":    {ownedPod("Job", "p", "n", "1", annotated("enabled")), true},
		"a bare pod":                   {ownedPod("ReplicaSet", "p", "n", "1", annotated("enabled"), func(p *corev1.Pod) { p.OwnerReferences = nil }), false},
		"one that has not started yet": {ownedPod("ReplicaSet", "p", "n", "1", func(p *corev1.Pod) { p.Status.Phase = corev1.PodPending }), false},
	} {
		if got := mayReturn(tc.pod); got != tc.want {
			t.Errorf("%s: got %v", name, got)
		}
	}
}

func TestWatchedPods(t *testing.T) {
	w := NewWatchedPods(broker.SchedulerName, func(node string) bool { return strings.HasPrefix(node, broker.VirtualNodePrefix) })
	held := func(p *corev1.Pod) { p.Labels[broker.LabelHold] = "rome-1" }
	created := func(at int64) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.CreationTimestamp = metav1.Unix(at, 0) }
	}
	expectGuests := func(why string, want int) {
		t.Helper()
		if got := len(w.guestsNow()); got != want {
			t.Errorf("%s: %d guests, want %d", why, got, want)
		}
	}
	w.Set(ownedPod("ReplicaSet", "a", "", "1", held, created(100)))
	expectGuests("pending", 0)
	if !w.hasUntried(time.Unix(99, 0)) || w.hasUntried(time.Unix(100, 0)) {
		t.Error("a new pod that no scheduler has tried delays moves for some time")
	}
	w.Set(ownedPod("ReplicaSet", "a", "", "1", held, created(100), unschedulablePod))
	if w.hasUntried(time.Unix(99, 0)) || len(w.waiting()) != 1 {
		t.Error("a pod that was tried waits")
	}
	w.Set(ownedPod("ReplicaSet", "alike", "", "1", unschedulablePod))
	if n := len(w.waiting()); n != 1 {
		t.Errorf("%d pods wait, want those of a controller that are alike once", n)
	}
	w.Set(ownedPod("ReplicaSet", "larger", "", "2", unschedulablePod))
	if n := len(w.waiting()); n != 2 {
		t.Errorf("%d pods wait, want those of a controller that differ", n)
	}
	w.Remove("alike")
	w.Remove("larger")
	w.Set(ownedPod("ReplicaSet", "a", "spillway-paris", "1", held))
	expectGuests("bound", 1)
	w.Set(ownedPod("ReplicaSet", "b", "spillway-paris", "1"))
	expectGuests("without a hold", 1)
	w.Set(ownedPod("ReplicaSet", "c", "spillway-paris", "1", held, func(p *corev1.Pod) { p.Spec.SchedulerName = "other" }))
	expectGuests("of another scheduler", 1)
	w.Set(ownedPod("ReplicaSet", "a", "spillway-paris", "1", held, func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)} }))
	expectGuests("terminating", 0)
	w.Set(ownedPod("ReplicaSet", "d", "spillway-paris", "1", held))
	w.Remove("d")
	expectGuests("deleted", 0)
	if len(w.waiting()) != 0 {
		t.Error("none waits any more")
	}
}
