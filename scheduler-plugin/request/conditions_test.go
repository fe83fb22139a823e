package request

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	clocktesting "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/compatibility"
	"github.com/spillway-dev/spillway/scheduler-plugin/condition"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand/demandtest"
	"github.com/spillway-dev/spillway/scheduler-plugin/gang"
	"github.com/spillway-dev/spillway/scheduler-plugin/owners"
	"github.com/spillway-dev/spillway/scheduler-plugin/waiting"
)

// waitingPods are pods of one owner that wait, with the scheduler that writes their conditions.
type waitingPods struct {
	*Controller
	t     *testing.T
	now   *clocktesting.FakeClock
	set   *fake.Clientset
	names []string
}

func podsThatWait(t *testing.T, names ...string) *waitingPods {
	t.Helper()
	w := &waitingPods{t: t, set: fake.NewClientset(), names: names}
	cached := demandtest.NewIndexer()
	for _, name := range names {
		pod := demandtest.JobPod("crunch", name, "1")
		expect.NoError(t, cached.Add(pod))
		expect.NoError(t, w.set.Tracker().Add(pod.DeepCopy()))
	}
	w.Controller, w.now = testController(t, cached)
	w.restart()
	return w
}

// restart forgets what is not in the API server, and finds again that the pods do not fit.
func (w *waitingPods) restart() {
	w.conditions, w.Pending = condition.New(w.set, w.now, func() {}), waiting.NewPendingPods()
	for _, name := range w.names {
		pod, err := w.Pods.Pods("shop").Get(name)
		expect.NoError(w.t, err)
		w.fails(pod)
	}
	w.pass(0)
}

// pass lets time pass, and writes what is to be written then.
func (w *waitingPods) pass(after time.Duration) {
	w.t.Helper()
	w.now.Step(after)
	w.sync()
	for w.conditions.Len() > 0 {
		w.conditions.Next(w.t.Context(), klog.Background())
	}
}

// watch shows the cache what the API server has, and returns the condition of a pod.
func (w *waitingPods) watch(name string, change ...func(*corev1.Pod)) *corev1.PodCondition {
	w.t.Helper()
	pod, err := w.set.CoreV1().Pods("shop").Get(w.t.Context(), name, metav1.GetOptions{})
	expect.NoError(w.t, err)
	for _, f := range change {
		f(pod)
		_, err := w.set.CoreV1().Pods("shop").Update(w.t.Context(), pod, metav1.UpdateOptions{})
		expect.NoError(w.t, err)
	}
	cached, err := w.Pods.Pods("shop").Get(name)
	expect.NoError(w.t, err)
	*cached = *pod
	for i := range pod.Status.Conditions {
		if c := &pod.Status.Conditions[i]; c.Type == broker.PodOverflow {
			return c
		}
	}
	return nil
}

// expectWrites expects how many conditions were written since the last time.
func (w *waitingPods) expectWrites(want int, when string) {
	w.t.Helper()
	got := 0
	for _, action := range w.set.Actions() {
		if patch, ok := action.(clienttesting.PatchAction); ok && patch.GetSubresource() == "status" {
			got++
		}
	}
	if w.set.ClearActions(); got != want {
		w.t.Errorf("%s: %d writes, want %d", when, got, want)
	}
}

func (w *waitingPods) expectSays(name string, status corev1.ConditionStatus, reason string, parts ...string) {
	w.t.Helper()
	c := w.watch(name)
	if c == nil || c.Status != status || c.Reason != reason {
		w.t.Fatalf("the condition of %s is %+v, want %s %s", name, c, status, reason)
	}
	for _, part := range parts {
		if !strings.Contains(c.Message, part) {
			w.t.Errorf("the condition of %s says %q, want %q", name, c.Message, part)
		}
	}
}

// queued sets the Reservation of the pods, which no cluster can grant.
func (w *waitingPods) queued(position int32, rejections ...broker.ClusterRejection) {
	w.t.Helper()
	pod, err := w.Pods.Pods("shop").Get(w.names[0])
	expect.NoError(w.t, err)
	r := demandtest.ReservationFor(pod, nil)
	r.Status.QueuePosition = position
	r.Status.Conditions = []metav1.Condition{{Type: broker.ConditionQueued, Status: metav1.ConditionTrue, Message: "3 pods are waiting for capacity."}}
	r.Status.Decision = &broker.Decision{Rejections: rejections}
	expect.NoError(w.t, w.Reservations.cache.Update(r))
}

func full(cluster string) broker.ClusterRejection {
	return broker.ClusterRejection{Cluster: cluster, Reason: "InsufficientCapacity", Message: "Insufficient cpu: requested 3, available 2."}
}

// TestConditionOfWaitingPods: a pod that waits longer than 10 s says what for, with one write; others
// follow only when that has another meaning, and once an hour.
func TestConditionOfWaitingPods(t *testing.T) {
	w := podsThatWait(t, "crunch-0", "crunch-1", "crunch-2")
	closed := broker.ClusterRejection{Cluster: "oslo", Reason: "OtherRegion", Message: "It is in region no."}
	w.queued(3, closed, full("paris"))
	w.pass(requestedAfter - time.Second)
	w.expectWrites(0, "before they have waited for long")
	w.pass(6 * time.Second)
	w.expectWrites(3, "once they have")
	at := w.now.Now().UTC().Format("15:04 UTC")
	w.expectSays("crunch-1", corev1.ConditionFalse, reasonQueued, "paris: Insufficient cpu: requested 3, available 2.", "1 more", "Or request less, or add nodes to a provider.", "number 3 in the queue at "+at)
	w.pass(time.Second)
	for _, name := range w.names {
		w.watch(name)
	}
	w.queued(2, closed, broker.ClusterRejection{Cluster: "paris", Reason: "InsufficientCapacity", Message: "Insufficient cpu: requested 3, available 2500m."})
	w.pass(waiting.EventInterval + conditionPeriod)
	w.expectWrites(0, "with other figures")
	w.restart()
	w.pass(requestedAfter + conditionPeriod)
	w.expectWrites(0, "after a restart")
	w.queued(2, closed)
	w.pass(conditionPeriod)
	w.expectWrites(3, "with another reason")
	w.expectSays("crunch-0", corev1.ConditionFalse, reasonQueued, "oslo: It is in region no.", "placement of the OverflowPolicy")
	w.queued(2, full("paris"))
	w.pass(conditionPeriod)
	w.expectWrites(0, "a moment after that")
	w.pass(waiting.EventInterval)
	w.expectWrites(3, "a minute after that")
	w.pass(waiting.RepeatAfter)
	w.expectWrites(3, "an hour later")
}

// TestConditionOfBoundPods: a pod that has said what it waits for says where it is, with one write; one
// that was placed at once is not written.
func TestConditionOfBoundPods(t *testing.T) {
	w := podsThatWait(t, "crunch-0", "crunch-1", "crunch-2")
	w.queued(1, full("paris"))
	bind := func(node string) func(*corev1.Pod) { return func(p *corev1.Pod) { p.Spec.NodeName = node } }
	w.watch("crunch-2", bind("home"))
	w.Queue.Remove("crunch-2")
	w.pass(requestedAfter + conditionPeriod)
	w.expectWrites(2, "those that wait")

	// The cache does not show the condition yet.
	pod, err := w.Pods.Pods("shop").Get("crunch-0")
	expect.NoError(t, err)
	bind("home")(pod)
	w.Queue.Remove("crunch-0")
	w.pass(time.Second)
	w.expectWrites(1, "one is bound")
	w.expectSays("crunch-0", corev1.ConditionTrue, condition.ReasonScheduledAtHome, "node home of this cluster")

	// Its node, which is a virtual one by its name, is not known: it says nothing that may be false.
	w.watch("crunch-1", bind("spillway-lost"))
	w.Queue.Remove("crunch-1")
	w.pass(waiting.LookPeriod)
	w.expectWrites(0, "on a node that is not known")

	// It is bound while no replica leads.
	w.watch("crunch-1", bind("home"))
	w.Profile = ""
	w.conditions, w.Pending = condition.New(w.set, w.now, func() {}), waiting.NewPendingPods()
	w.pass(waiting.LookPeriod)
	w.expectWrites(1, "after a restart")
	w.expectSays("crunch-1", corev1.ConditionTrue, condition.ReasonScheduledAtHome)
	w.pass(waiting.LookPeriod)
	w.expectWrites(0, "later")
}

// TestConditionRemoved: a pod that is not to overflow any more does not say that it waits for that.
func TestConditionRemoved(t *testing.T) {
	w := podsThatWait(t, "crunch-0")
	w.queued(1, full("paris"))
	w.pass(requestedAfter + conditionPeriod)
	w.expectSays("crunch-0", corev1.ConditionFalse, reasonQueued)
	w.Namespaces = namespacesWith(broker.OverflowDisabled)
	w.pass(conditionPeriod)
	if c := w.watch("crunch-0"); c != nil {
		t.Errorf("the condition is %+v", c)
	}
	w.Namespaces = namespacesWith(broker.OverflowEnabled)
	w.pass(waiting.EventInterval)
	w.expectSays("crunch-0", corev1.ConditionFalse, reasonQueued)
}

// TestWaitEvent: of several things that a pod waits for, the condition says the one that is in the way.
func TestWaitEvent(t *testing.T) {
	pod := demandtest.JobPod("crunch", "crunch-0", "1")
	reservation := func(slots int32, change func(*broker.Reservation)) *broker.Reservation {
		r := demandtest.ReservationFor(pod, map[string]int32{"paris": slots})
		r.Spec.PodSets[0].Count = 3
		change(r)
		return r
	}
	with := func(kind string, status metav1.ConditionStatus, message string) func(*broker.Reservation) {
		return func(r *broker.Reservation) {
			r.Status.Conditions = []metav1.Condition{{Type: kind, Status: status, Message: message}}
		}
	}
	none := func(*broker.Reservation) {}
	limited := capped("limits", demand.Request{Key: demand.Key{Namespace: pod.Namespace}}, 2, corev1.ResourceCPU, nil)
	for name, tc := range map[string]struct {
		wait         wait
		reason, part string
	}{
		"nothing is known":     {wait{}, "", ""},
		"requested":            {wait{reservations: []*broker.Reservation{reservation(0, with(broker.ConditionReady, metav1.ConditionFalse, "Waiting for paris to accept 3 pods."))}}, reasonRequested, "Waiting for paris"},
		"granted":              {wait{reservations: []*broker.Reservation{reservation(3, none)}}, ReasonGranted, "3 in paris"},
		"granted to others":    {wait{placed: 3, reservations: []*broker.Reservation{reservation(3, none)}}, "", ""},
		"granted in part":      {wait{placed: 2, reservations: []*broker.Reservation{reservation(2, none)}}, reasonRequested, "3 pods"},
		"queued and granted":   {wait{placed: 1, reservations: []*broker.Reservation{reservation(1, with(broker.ConditionQueued, metav1.ConditionTrue, "2 pods are waiting."))}}, reasonQueued, "2 pods are waiting."},
		"limited":              {wait{decided: &limited}, reasonCapped, "OverflowPolicy limits"},
		"limited, and granted": {wait{decided: &limited, reservations: []*broker.Reservation{reservation(2, none)}}, reasonCapped, ""},
		"limited, and queued":  {wait{decided: &limited, reservations: []*broker.Reservation{reservation(0, with(broker.ConditionQueued, metav1.ConditionTrue, ""))}}, reasonQueued, ""},
		"failed":               {wait{reservations: []*broker.Reservation{reservation(0, func(r *broker.Reservation) { r.Status.Phase = broker.ReservationFailed })}}, reasonFailed, "no cluster can grant it"},
		"deleted":              {wait{reservations: []*broker.Reservation{reservation(0, func(r *broker.Reservation) { r.DeletionTimestamp = &metav1.Time{} })}}, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			e := tc.wait.event(time.Unix(1000, 0))
			if e == nil {
				e = &Event{}
			}
			if e.reason != tc.reason || !strings.Contains(e.message, tc.part) {
				t.Errorf("%s %q, want %s with %q", e.reason, e.message, tc.reason, tc.part)
			}
		})
	}
}

// conditionIsGone expects that a pod says nothing.
func (w *waitingPods) conditionIsGone(name, when string) {
	w.t.Helper()
	if c := w.watch(name); c != nil {
		w.t.Errorf("%s: the condition of %s is %+v", when, name, c)
	}
}

// TestConditionWithoutOwner: a pod whose owner is gone does not say what is requested for it: nothing is.
func TestConditionWithoutOwner(t *testing.T) {
	w := podsThatWait(t, "crunch-0")
	w.queued(1, full("paris"))
	w.pass(requestedAfter + conditionPeriod)
	w.expectSays("crunch-0", corev1.ConditionFalse, reasonQueued)
	w.Keys = owners.NewKeyCache(w.now, demandtest.UnknownOwner)
	w.Synced = func() bool { return false }
	w.pass(conditionPeriod)
	w.expectSays("crunch-0", corev1.ConditionFalse, reasonQueued)
	w.Synced = func() bool { return true }
	w.pass(conditionPeriod)
	w.conditionIsGone("crunch-0", "without its owner")
}

// TestConditionOfHeldGang: a pod that is held after a restart, since nothing describes its gang any more,
// does not say what it has waited for before.
func TestConditionOfHeldGang(t *testing.T) {
	w := podsThatWait(t, "crunch-0")
	w.queued(1, full("paris"))
	w.pass(requestedAfter + conditionPeriod)
	w.expectSays("crunch-0", corev1.ConditionFalse, reasonQueued)
	w.watch("crunch-0", func(p *corev1.Pod) {
		p.Spec.SchedulingGroup = &corev1.PodSchedulingGroup{PodGroupName: ptr.To("train")}
	})
	pod, err := w.Pods.Pods("shop").Get("crunch-0")
	expect.NoError(t, err)
	informer := cache.NewSharedIndexInformer(nil, &corev1.Pod{}, 0, cache.Indexers{})
	expect.NoError(t, informer.GetIndexer().Add(pod))
	none := func(string, string) cache.WatchErrorHandlerWithContext { return nil }
	w.Gangs, err = gang.New(w.now, dynamicfake.NewSimpleDynamicClient(runtime.NewScheme()), compatibility.Newest, informer, none)
	expect.NoError(t, err)
	w.conditions, w.Pending = condition.New(w.set, w.now, func() {}), waiting.NewPendingPods()
	w.Profile = pod.Spec.SchedulerName
	w.pass(waiting.LookPeriod)
	w.expectSays("crunch-0", corev1.ConditionFalse, reasonQueued) // it may be tried any moment
	if why := w.Gangs.Hold(pod); why == "" {
		t.Fatal("the pod is not held")
	}
	w.pass(waiting.LookPeriod)
	w.conditionIsGone("crunch-0", "held")
}

// TestConditionOfGang: what is granted to a gang counts for all its shapes, and so do the pods that
// have a place.
func TestConditionOfGang(t *testing.T) {
	leader, worker, other := demandtest.JobPod("ring", "leader", "2"), demandtest.JobPod("ring", "worker", "1"), demandtest.JobPod("ring", "other", "1")
	for _, pod := range []*corev1.Pod{leader, worker, other} {
		pod.Labels = map[string]string{broker.LabelPodGroup: "ring"}
	}
	c, now := testController(t, demandtest.NewIndexer(leader, worker, other))
	key, _ := c.Keys.Get(leader)
	r := &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "ring", Labels: map[string]string{
		broker.LabelOwnerUID: string(key.Key.OwnerUID), broker.LabelShape: demand.GangShape}}}
	for i, pod := range []*corev1.Pod{leader, worker} {
		shape, set := demand.ShapeOf(pod)
		set.Name, set.Count = shape, int32(i+1)
		r.Spec.PodSets = append(r.Spec.PodSets, set)
	}
	r.Status.ID = "rome-ring"
	r.Status.Allocations = []broker.Allocation{{Cluster: "paris", Accepted: true, VirtualNodeReady: true, PodSets: r.Spec.PodSets}}
	expect.NoError(t, c.Reservations.cache.Add(r))
	says := func() string {
		e, _ := c.waitsFor(leader, map[demand.Key]*Event{}, now.Now())
		if e == nil {
			return ""
		}
		return e.reason
	}
	for placed, pod := range []*corev1.Pod{worker, other, leader} {
		if got := says(); got != ReasonGranted {
			t.Errorf("with %d of 3 pods placed, it says %q, want %s", placed, got, ReasonGranted)
		}
		c.Placements.Assume(pod, broker.VirtualNodeName("paris"), "")
	}
	if got := says(); got != "" {
		t.Errorf("with all pods placed, it says %q", got)
	}
}
