package request

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/events"
	clocktesting "k8s.io/utils/clock/testing"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand/demandtest"
	"github.com/spillway-dev/spillway/scheduler-plugin/owners"
	"github.com/spillway-dev/spillway/scheduler-plugin/usage"
	"github.com/spillway-dev/spillway/scheduler-plugin/waiting"
)

// testController returns a Controller that only sync runs. cached has the pods.
func testController(t *testing.T, cached cache.Indexer) (c *Controller, now *clocktesting.FakeClock) {
	t.Helper()
	now = clocktesting.NewFakeClock(time.Unix(1000, 0))
	root := func(string, metav1.OwnerReference) (*metav1.OwnerReference, bool, bool) { return nil, true, false }
	config := Config{
		Clock: now, Grants: usage.NewGrantCache(now), Gate: waiting.NewGate(now), Keys: owners.NewKeyCache(now, root),
		Namespaces: namespacesWith(broker.OverflowEnabled), Batcher: demand.NewBatcher(now, demand.Windows{}),
		Pending: waiting.NewPendingPods(), Pods: corelisters.NewPodLister(cached), Untried: waiting.NewUntriedPods(now),
		Reservations: NewReservations(nil, cache.NewIndexer(cache.MetaNamespaceKeyFunc, Indexers()), now), Policies: newPolicies(),
		Synced: func() bool { return true }, Counted: func() bool { return true }, Active: func() bool { return true },
		Recorder: events.NewFakeRecorder(100), Steers: true,
	}
	config.Placements = usage.NewPlacements(now, config.Keys.KeyOf)
	config.Queue = waiting.NewWorkQueue(config.Placements.IsVirtual)
	config.Waker = &waiting.Waker{Gate: config.Gate, Grants: config.Grants, Placements: config.Placements, Pools: usage.NewPoolCache(now),
		Nodes:    corelisters.NewNodeLister(demandtest.NewIndexer()),
		Settled:  func(key demand.Key) bool { return config.Grants.Refused(key) || config.Grants.IsUnasked(key) },
		Activate: func(map[string]*corev1.Pod) {}}
	c = New(config)
	t.Cleanup(c.writes.slots.ShutDown)
	return c, now
}

// sync is a pass of Run, without the writers.
func (c *Controller) sync() {
	for _, request := range c.Sync() {
		c.writes.add(c.slotOf(request.Key), request)
	}
}

// fails is a cycle of a pod in which no node fits.
func (c *Controller) fails(pod *corev1.Pod) {
	if key, ok := c.Keys.Get(pod); ok {
		c.Gate.Close(pod, key.Key, time.Time{}, time.Time{})
	}
	c.Queue.AddUnschedulable(pod)
}

func newPolicies(all ...any) PolicyCache { return PolicyCache{Decoded: demandtest.NewIndexer(all...)} }

// namespacesWith lists namespace shop with a value of its label.
func namespacesWith(value string) corelisters.NamespaceLister {
	return corelisters.NewNamespaceLister(demandtest.NewIndexer(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop", Labels: map[string]string{broker.LabelOverflow: value}}}))
}

// A pod that is being bound needs no more capacity: it is counted with those that run.
func TestPodBeingBound(t *testing.T) {
	pod := demandtest.JobPod("crunch", "waiting", "1")
	cached := cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{})
	expect.NoError(t, cached.Add(pod))
	c, _ := testController(t, cached)
	c.Pending.Add(pod.UID, waiting.NameOf(pod), time.Time{})
	key, _ := c.Keys.Get(pod)
	expectValid := func(when string, want bool) {
		t.Helper()
		var changed []*corev1.Pod
		if got := c.validator(&changed)(pod.UID, key.Key); got != want || len(changed) > 0 {
			t.Errorf("%s: capacity is requested for it: %t (changed: %d), want %t", when, got, len(changed), want)
		}
	}
	expectValid("pending", true)
	c.Placements.Assume(pod, broker.VirtualNodeName("paris"), "")
	expectValid("being bound", false)
	c.Placements.Forget(pod.UID)
	expectValid("not bound", true)
}

// TestValidatedWhenDue: capacity is requested for a pod that was noted only if it needs that
// still, with the key that it was noted with. Otherwise the pod is looked at again.
func TestValidatedWhenDue(t *testing.T) {
	for name, tc := range map[string]struct {
		reason string
		change func(*Controller, *corev1.Pod)
		valid  bool
	}{
		"unchanged": {reason: "it needs the capacity", change: func(*Controller, *corev1.Pod) {}, valid: true},
		"labelled":  {reason: "nothing else depends on this label", change: func(_ *Controller, pod *corev1.Pod) { pod.Labels = map[string]string{"tier": "batch"} }, valid: true},
		"the pod opts out": {reason: "it is not to overflow", change: func(_ *Controller, pod *corev1.Pod) {
			pod.Labels = map[string]string{broker.LabelOverflow: broker.OverflowDisabled}
		}},
		"its namespace, too": {reason: "none of its pods is to overflow", change: func(c *Controller, _ *corev1.Pod) { c.Namespaces = namespacesWith(broker.OverflowDisabled) }},
		"resized": {reason: "it needs another amount", change: func(_ *Controller, pod *corev1.Pod) {
			pod.Spec.Containers[0].Resources.Requests = expect.Resources("cpu", "2")
		}},
		"a new node selector": {reason: "it needs another node", change: func(_ *Controller, pod *corev1.Pod) { pod.Spec.NodeSelector = map[string]string{"gpu": "a100"} }},
		"not admissible": {reason: "it cannot overflow any more", change: func(_ *Controller, pod *corev1.Pod) {
			pod.Spec.Volumes = []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/data"}}}}
		}},
		"another owner": {reason: "that has a Reservation of its own", change: func(_ *Controller, pod *corev1.Pod) {
			pod.OwnerReferences[0].Name, pod.OwnerReferences[0].UID = "other", "other"
		}},
		"its owner unknown": {reason: "it may have another root owner", change: func(c *Controller, _ *corev1.Pod) { c.Keys.Find = demandtest.UnknownOwner }},
	} {
		t.Run(name, func(t *testing.T) {
			pod := demandtest.JobPod("crunch", "waiting", "1")
			cached := demandtest.NewIndexer(pod)
			c, now := testController(t, cached)
			c.Batcher = demand.NewBatcher(now, demand.Windows{Quiet: time.Second, Longest: time.Second})
			c.fails(pod)
			c.sync()
			noted, _ := c.Keys.Get(pod)
			current := pod.DeepCopy()
			current.Generation++
			tc.change(c, current)
			expect.NoError(t, cached.Update(current)) // the watch has not said so yet
			now.Step(time.Second)
			c.sync()
			if _, requested := c.writes.requests[noted.Key]; requested != tc.valid {
				t.Errorf("capacity is requested for it: %t, want %t, because %s", requested, tc.valid, tc.reason)
			}
			if len(c.writes.requests) > 0 != tc.valid {
				t.Errorf("requested is %v", c.writes.requests)
			}
			if looked := len(c.Queue.Take().Unschedulable) > 0; looked == tc.valid {
				t.Errorf("it is looked at again: %t, want %t", looked, !tc.valid)
			}
		})
	}
}

func TestDecided(t *testing.T) {
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
		"not observed": {r(2, 1, broker.ReservationActive, broker.ConditionReady), false},
		"reserved":     {r(2, 2, broker.ReservationReserved), false},
		"ready":        {r(2, 2, broker.ReservationActive, broker.ConditionReady), true},
		"queued":       {r(2, 2, broker.ReservationPending, broker.ConditionQueued), true},
		"failed":       {r(2, 2, broker.ReservationFailed), true},
	} {
		if got := decided(tc.r); got != tc.want {
			t.Errorf("%s: %t, want %t", name, got, tc.want)
		}
	}
}
