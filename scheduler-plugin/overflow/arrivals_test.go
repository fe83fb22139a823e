package overflow

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	scheduler "k8s.io/kubernetes/pkg/scheduler/framework"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand/demandtest"
)

var burstWindows = demand.Windows{Quiet: 200 * time.Millisecond, Longest: time.Second}

func burst(n int) (pods []*corev1.Pod) {
	for i := range n {
		pod := demandtest.JobPod("crunch", fmt.Sprint("crunch-", i), "1")
		pod.Spec.SchedulerName = broker.SchedulerName
		pods = append(pods, pod)
	}
	return pods
}

func triedPod(pod *corev1.Pod) *corev1.Pod {
	pod = pod.DeepCopy()
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable}}
	return pod
}

// TestPodsTriedByAnotherReplica: another replica led, and has tried the pods; this one has seen them arrive.
func TestPodsTriedByAnotherReplica(t *testing.T) {
	p, cached, pods := testPlugin(OverflowArgs{}, nodeWith("").Node()), demandtest.NewIndexer(), burst(10)
	p.handle = profile{}
	c, now, _ := testController(t, p, cached)
	c.Batcher = demand.NewBatcher(now, burstWindows)
	handler := p.podHandler(func() bool { return false }, c.Untried)
	for _, pod := range pods {
		handler.OnAdd(pod, false)
		expect.NoError(t, cached.Add(triedPod(pod)))
	}
	now.Step(10 * time.Second)
	for _, pod := range pods {
		p.PostFilter(t.Context(), scheduler.NewCycleState(), triedPod(pod), nil)
		c.sync()
		if n := c.requested(); n != 0 && n != 10 {
			t.Fatalf("capacity is requested for %d of 10 pods", n)
		}
		now.Step(5 * time.Millisecond)
	}
	now.Step(200 * time.Millisecond)
	c.sync()
	if n := c.requested(); n != 10 {
		t.Errorf("capacity is requested for %d of 10 pods", n)
	}
}

// TestTriedMeanwhile: a second pod is tried, and its condition seen, while the first is looked at.
func TestTriedMeanwhile(t *testing.T) {
	p, cached, pods := testPlugin(OverflowArgs{}, nodeWith("").Node()), demandtest.NewIndexer(), burst(2)
	p.handle = profile{}
	c, now, _ := testController(t, p, cached)
	c.Batcher = demand.NewBatcher(now, burstWindows)
	handler := p.podHandler(func() bool { return false }, c.Untried)
	for _, pod := range pods {
		handler.OnAdd(pod, false)
		expect.NoError(t, cached.Add(pod))
	}
	now.Step(time.Second)
	p.PostFilter(t.Context(), scheduler.NewCycleState(), pods[0], nil)
	meanwhile := func() {
		p.PostFilter(t.Context(), scheduler.NewCycleState(), pods[1], nil)
		expect.NoError(t, cached.Update(triedPod(pods[1])))
		handler.OnUpdate(pods[1], triedPod(pods[1]))
	}
	c.Active = func() bool { // sync asks after it has taken the queue
		if meanwhile != nil {
			do := meanwhile
			meanwhile = nil
			do()
		}
		return true
	}
	c.sync()
	for range 5 {
		now.Step(50 * time.Millisecond)
		if n := c.requested(); n != 0 {
			break
		}
		c.sync()
	}
	if n := c.requested(); n != 2 {
		t.Errorf("the first request is for %d of 2 pods", n)
	}
}

// TestRoomDuringCycle: room at home became free during the cycle of a pod: it is woken for that.
func TestRoomDuringCycle(t *testing.T) {
	home := nodeWith("").Node()
	p, cached, pod := testPlugin(OverflowArgs{}, home), demandtest.NewIndexer(), burst(1)[0]
	p.handle = profile{}
	c, now, woken := testController(t, p, cached)
	c.Batcher = demand.NewBatcher(now, burstWindows)
	handler := p.podHandler(func() bool { return false }, c.Untried)
	p.setHome(0)
	c.sync()
	handler.OnAdd(pod, false)
	expect.NoError(t, cached.Add(pod))
	now.Step(time.Second) // others are tried first
	state := scheduler.NewCycleState()
	state.Write(stateKey, &cycleState{since: now.Now()})
	now.Step(time.Millisecond)
	p.setHome(1)
	c.sync()
	now.Step(time.Millisecond)
	p.PostFilter(t.Context(), state, pod, nil)
	c.sync()
	if !woken[pod.Name] {
		t.Fatal("not woken")
	}
	now.Step(10 * time.Millisecond)
	p.Reserve(t.Context(), scheduler.NewCycleState(), pod, "home")
	bound := pod.DeepCopy()
	bound.Spec.NodeName = "home"
	expect.NoError(t, cached.Update(bound))
	handler.OnUpdate(pod, bound)
	for range 10 {
		c.sync()
		now.Step(100 * time.Millisecond)
	}
	if n := c.requested(); n != 0 {
		t.Errorf("capacity is requested for %d pods, and the only one runs at home", n)
	}
}

// TestOldPodInABurst: a pod that was there before does not fit while the others of a burst arrive.
func TestOldPodInABurst(t *testing.T) {
	p, cached, pods := testPlugin(OverflowArgs{}, nodeWith("").Node()), demandtest.NewIndexer(), burst(50)
	p.handle = profile{}
	c, now, _ := testController(t, p, cached)
	c.Batcher = demand.NewBatcher(now, burstWindows)
	handler := p.podHandler(func() bool { return false }, c.Untried)
	var totals []int32
	next := func() {
		c.sync()
		if n := c.requested(); n != 0 {
			totals = append(totals, n)
			clear(c.requests)
		}
	}
	for i, pod := range pods { // arrive in 500 ms, are tried 300 ms later
		handler.OnAdd(pod, false)
		expect.NoError(t, cached.Add(pod))
		if i >= 30 {
			p.PostFilter(t.Context(), scheduler.NewCycleState(), pods[i-30], nil)
		}
		next()
		now.Step(10 * time.Millisecond)
	}
	for i := 20; i < 50; i++ {
		p.PostFilter(t.Context(), scheduler.NewCycleState(), pods[i], nil)
		next()
		now.Step(10 * time.Millisecond)
	}
	for range 40 {
		next()
		now.Step(10 * time.Millisecond)
	}
	if len(totals) == 0 || totals[0] != 50 {
		t.Errorf("the first of requests %v is not for all of 50 pods", totals)
	}
}

// TestPodsThereBefore: capacity is requested for all pods of a key as soon as one of them does
// not fit, if none has arrived of late; where an autoscaler is to act first, only for those for
// which the time is over.
func TestPodsThereBefore(t *testing.T) {
	for askAfter, want := range map[time.Duration]int32{0: 10, 5 * time.Second: 0} {
		p, cached, pods := testPlugin(OverflowArgs{}, nodeWith("").Node()), demandtest.NewIndexer(), burst(10)
		p.handle = profile{}
		c, now, _ := testController(t, p, cached)
		c.Batcher, c.AskAfter = demand.NewBatcher(now, burstWindows), askAfter
		handler := p.podHandler(func() bool { return false }, c.Untried)
		for _, pod := range pods {
			handler.OnAdd(pod, false)
			expect.NoError(t, cached.Add(pod))
		}
		now.Step(time.Second)
		p.PostFilter(t.Context(), scheduler.NewCycleState(), pods[0], nil)
		if c.sync(); c.requested() != want {
			t.Errorf("askAfter %s: capacity is requested for %d pods, want %d", askAfter, c.requested(), want)
		}
	}
}

// TestDelayedPodsByTime: capacity is requested for pods in the order in which their time is
// over, in whichever order they were reported.
func TestDelayedPodsByTime(t *testing.T) {
	const pods = 10
	const askAfter = 20 * time.Second
	p, cached := testPlugin(OverflowArgs{}), demandtest.NewIndexer()
	p.handle = profile{}
	c, now, _ := testController(t, p, cached)
	c.AskAfter, p.args.AskAfter.Duration = askAfter, askAfter
	for _, pod := range burst(pods) {
		expect.NoError(t, cached.Add(pod))
		p.PostFilter(t.Context(), scheduler.NewCycleState(), pod, nil)
		now.Step(time.Second)
	}
	c.sync() // in no order
	now.Step(askAfter - (pods+1)*time.Second)
	for due := range int32(pods + 1) {
		if c.sync(); c.requested() != due {
			t.Errorf("capacity is requested for %d pods, want %d", c.requested(), due)
		}
		now.Step(time.Second)
	}
}

// TestArrivedPodsForgotten: nothing is kept of pods that have a node, have ended, or are
// deleted.
func TestArrivedPodsForgotten(t *testing.T) {
	p := testPlugin(OverflowArgs{})
	p.handle = profile{}
	c, _, _ := testController(t, p, demandtest.NewIndexer())
	handler := p.podHandler(func() bool { return false }, c.Untried)
	pods := burst(3)
	for _, pod := range pods {
		handler.OnAdd(pod, false)
	}
	if got := c.Untried.Size(); got < len(pods) {
		t.Fatalf("%d of %d pods are kept", got, len(pods))
	}
	bound, ended := pods[0].DeepCopy(), pods[1].DeepCopy()
	bound.Spec.NodeName, ended.Status.Phase = "home", corev1.PodFailed
	handler.OnUpdate(pods[0], bound)
	handler.OnUpdate(pods[1], ended)
	handler.OnDelete(pods[2])
	if got := c.Untried.Size(); got > 0 {
		t.Errorf("of pods that are gone or have a node, %d entries are kept", got)
	}
}
