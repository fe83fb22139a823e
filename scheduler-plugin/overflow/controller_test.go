package overflow

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	framework "k8s.io/kube-scheduler/framework"
	scheduler "k8s.io/kubernetes/pkg/scheduler/framework"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// A request includes the pods of its key that run in other clusters, and those
// that the scheduler has not tried yet.
func TestOtherPods(t *testing.T) {
	p := testPlugin(OverflowArgs{}, nodeWith("").Node(), nodeWith("paris").Node())
	p.handle = profile{}
	untried := newUntriedPods()
	handler := p.podHandler(func() bool { return false }, untried)
	c := &demandController{keys: p.keys, namespaces: p.namespaces, untried: untried, placements: p.placements, pending: newPendingPods()}
	c.pending.add("pending", types.NamespacedName{})
	key, _ := p.keys.get(jobPod("crunch", "x", "1"))
	count := func() int32 { return c.otherPodsCounter()(key.key, metav1.OwnerReference{}) }
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
		pod := jobPod("crunch", tc.name, "1")
		pod.Spec.SchedulerName = broker.SchedulerName
		tc.change(pod)
		handler.OnAdd(pod, false)
		if got := count() > before; got != tc.counts {
			t.Errorf("%s: counted %t, want %t", tc.name, got, tc.counts)
		}
	}
	before := count()
	p.Reserve(t.Context(), scheduler.NewCycleState(), jobPod("crunch", "untried", "1"), "home")
	if count() != before-1 {
		t.Error("an assumed pod is counted")
	}
	p.Unreserve(t.Context(), nil, jobPod("crunch", "untried", "1"), "home")
	if count() != before {
		t.Error("a pod that is no longer assumed is not counted")
	}
}

// profile is the part of the scheduler that the handlers of informers need.
type profile struct{ framework.Handle }

func (profile) ProfileName() string { return broker.SchedulerName }

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
