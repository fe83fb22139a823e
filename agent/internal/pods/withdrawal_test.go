package pods_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/pods"
	"github.com/spillway-dev/spillway/agent/internal/virtualnode"
	"github.com/spillway-dev/spillway/agent/internal/virtualnode/virtualnodetest"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestElsewhere(t *testing.T) {
	allocation := func(cluster string, pods int32, ready bool) broker.Allocation {
		return broker.Allocation{Cluster: cluster, PodSets: []broker.PodSet{{Count: pods}}, Accepted: true, VirtualNodeReady: ready}
	}
	pending := []*corev1.Pod{{}}
	cases := map[string]struct {
		reason      string
		allocations []broker.Allocation
		need        virtualnode.Need
		want        int
	}{
		"nothing":       {reason: "there is no other capacity", allocations: []broker.Allocation{allocation("paris", 5, true)}},
		"not usable":    {reason: "its virtual node is not ready", allocations: []broker.Allocation{allocation("berlin", 2, false)}},
		"usable":        {reason: "two places are free", allocations: []broker.Allocation{allocation("paris", 3, true), allocation("berlin", 2, true)}, want: 2},
		"in use":        {reason: "another pod is there", allocations: []broker.Allocation{allocation("berlin", 2, true)}, need: virtualnode.Need{Bound: map[string]int32{"berlin": 1, "paris": 9}}, want: 1},
		"about to be":   {reason: "a pending pod takes one", allocations: []broker.Allocation{allocation("berlin", 2, true)}, need: virtualnode.Need{Pending: pending}, want: 1},
		"overused":      {reason: "what is overused takes no place of others", allocations: []broker.Allocation{allocation("berlin", 1, true), allocation("oslo", 1, true)}, need: virtualnode.Need{Bound: map[string]int32{"berlin": 3}}, want: 1},
		"more pending":  {reason: "never below zero", need: virtualnode.Need{Pending: pending}},
		"not accepted":  {reason: "the provider has not accepted", allocations: []broker.Allocation{{Cluster: "berlin", PodSets: []broker.PodSet{{Count: 2}}, VirtualNodeReady: true}}},
		"only the same": {reason: "the provider's own places are no other ones", allocations: []broker.Allocation{allocation("paris", 9, true)}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if got := pods.Elsewhere(tc.allocations, tc.need, "paris"); got != tc.want {
				t.Errorf("%s: got %d, want %d", tc.reason, got, tc.want)
			}
		})
	}
}

// TestWithdrawal: of the pods whose capacity is withdrawn, as many move as have other
// capacity, and the others at the deadline. Those that keep their places stay.
func TestWithdrawal(t *testing.T) {
	c, nodes := startWith(t, func(client.Reader, *peering.Capacity) {})
	var all []*corev1.Pod
	for i := range 4 {
		// A terminating pod stays, as one does for its grace period.
		pod := c.Pod(fmt.Sprintf("w%d", i+1), func(p *corev1.Pod) { p.Finalizers = []string{"test/keep"} })
		c.Bind(pod, "paris")
		c.SetPhase(pod, corev1.PodRunning)
		all = append(all, pod)
	}
	r := c.Reservation(all[0], 4)
	c.Instruct(r, "paris", 1, 4)
	c.ExpectCondition(r, "paris", broker.ConditionVirtualNodeReady, metav1.ConditionTrue, 1, "")
	leaving := func() string {
		c.Helper()
		var names []string
		for _, pod := range all {
			if c.Refresh(pod); pod.DeletionTimestamp != nil {
				names = append(names, pod.Name)
			}
		}
		return strings.Join(names, " ")
	}
	expectLeaving := func(what, want string) {
		c.Helper()
		expect.EventuallyWithin(t, 2*time.Minute, what, func() (bool, string) { got := leaving(); return got == want, got })
	}

	// Nothing moves before there is other capacity.
	c.Withdraw(r, "paris", 2, 2, time.Now().Add(time.Hour))
	c.ExpectCondition(r, "paris", broker.ConditionWithinGrant, metav1.ConditionFalse, 2, "Provider paris has lowered its hold to 2 pods: 2 pods must leave by ")
	c.ExpectEvent(r, "CapacityWithdrawn")
	expect.Consistently(t, 3*time.Second, "all pods to stay", func() (bool, string) { got := leaving(); return got == "", got })

	// There is for one; but pods that run may stay until the deadline.
	for _, pod := range all {
		setConditions(c, pod, corev1.PodCondition{Type: corev1.PodReady, Status: corev1.ConditionTrue})
	}
	// Of the Reservation it learns by another watch.
	expect.Eventually(t, "the agent to know that they are Ready", func() (bool, string) {
		leaving, err := nodes.Leaving(t.Context(), "paris")
		expect.NoError(t, err)
		ready := 0
		for _, l := range leaving {
			for _, pod := range l.Pods {
				if virtualnode.Ready(pod) {
					ready++
				}
			}
		}
		return ready == 2, fmt.Sprintf("%d of 2", ready)
	})
	c.SetUsable(r, "berlin", 1)
	expect.Consistently(t, 7*time.Second, "pods that are Ready to stay", func() (bool, string) { got := leaving(); return got == "", got })
	setConditions(c, all[3], corev1.PodCondition{Type: corev1.PodReady, Status: corev1.ConditionFalse})
	expectLeaving("one pod to move", "w4")
	c.ExpectEvent(all[3], "EvictedFromVirtualNode")
	expect.Consistently(t, 7*time.Second, "the others to stay", func() (bool, string) { got := leaving(); return got == "w4", got })

	// At the deadline all must go, within their PodDisruptionBudget.
	budget := &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: "all", Namespace: virtualnodetest.Namespace},
		Spec:       policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{}},
	}
	c.Make(budget)
	// As the controller of PodDisruptionBudgets does, which does not run here.
	budget.Status.ObservedGeneration = budget.Generation
	expect.NoError(t, c.Status().Update(t.Context(), budget))
	c.Withdraw(r, "paris", 2, 2, time.Now().Add(-time.Minute))
	c.ExpectEvent(all[2], "PodMustLeave")
	if got := leaving(); got != "w4" {
		t.Errorf("%s leave although a PodDisruptionBudget does not allow it", got)
	}
	c.Remove(budget)
	expectLeaving("the rest to be evicted", "w3 w4")

	// Once they have left, the withdrawal is over: a grant that its author lowers takes no
	// pod away.
	for _, pod := range all[2:] {
		before := pod.DeepCopy()
		pod.Finalizers = nil
		expect.NoError(t, client.IgnoreNotFound(c.Patch(t.Context(), pod, client.MergeFrom(before))))
	}
	all = all[:2]
	in := virtualnodetest.InstructionOf(r, "paris")
	expect.EventuallyWithin(t, 2*time.Minute, "the status to say that the pods have left", func() (bool, string) {
		c.Refresh(in)
		return in.Status.LeftAttempt == 2, fmt.Sprintf("%+v", in.Status)
	})
	c.ExpectCondition(r, "paris", broker.ConditionWithinGrant, metav1.ConditionTrue, 2, "no more pods use it")
	c.Withdraw(r, "paris", 2, 1, time.Now().Add(-time.Minute))
	expect.Consistently(t, 7*time.Second, "the pods to stay", func() (bool, string) { got := leaving(); return got == "", got })
}

// TestTwoProvidersWithdraw: of the pods of two providers that withdraw from one Reservation at
// once, no more move than have other capacity. They are Ready, and move because the providers
// have marked them.
func TestTwoProvidersWithdraw(t *testing.T) {
	c := start(t)
	var all []*corev1.Pod
	for i, provider := range []string{"oslo", "oslo", "paris", "paris"} {
		pod := c.Pod(fmt.Sprintf("w%d", i+1), func(p *corev1.Pod) { p.Finalizers = []string{"test/keep"} })
		c.Bind(pod, provider)
		c.SetPhase(pod, corev1.PodRunning)
		setConditions(c, pod, corev1.PodCondition{Type: corev1.PodReady, Status: corev1.ConditionTrue}, corev1.PodCondition{Type: broker.PodMustLeave, Status: corev1.ConditionTrue})
		all = append(all, pod)
	}
	r := c.Reservation(all[0], 4)
	for _, provider := range []string{"oslo", "paris"} {
		c.Instruct(r, provider, 1, 2)
		c.ExpectCondition(r, provider, broker.ConditionVirtualNodeReady, metav1.ConditionTrue, 1, "")
	}
	c.SetUsable(r, "berlin", 2)
	for _, provider := range []string{"oslo", "paris"} {
		c.Withdraw(r, provider, 2, 0, time.Now().Add(time.Hour))
	}
	leaving := func() (pods int) {
		for _, pod := range all {
			if c.Refresh(pod); pod.DeletionTimestamp != nil {
				pods++
			}
		}
		return pods
	}
	expect.EventuallyWithin(t, 2*time.Minute, "two pods to move", func() (bool, string) { n := leaving(); return n == 2, fmt.Sprint(n) })
	expect.Consistently(t, 8*time.Second, "the others to stay", func() (bool, string) { n := leaving(); return n == 2, fmt.Sprint(n) })
}

func setConditions(c *virtualnodetest.Cluster, pod *corev1.Pod, conditions ...corev1.PodCondition) {
	c.Helper()
	expect.Eventually(c, "the conditions of "+pod.Name+" to be written", func() (bool, string) {
		c.Refresh(pod)
		pod.Status.Conditions = conditions
		err := c.Status().Update(c.Context(), pod)
		return err == nil, fmt.Sprint(err)
	})
}
