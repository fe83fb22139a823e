package overflow_test

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	podutil "k8s.io/kubernetes/pkg/api/v1/pod"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// returnPolicy makes an OverflowPolicy for one namespace.
func returnPolicy(ns string, terms *broker.ReturnHome) *broker.OverflowPolicy {
	return &broker.OverflowPolicy{ObjectMeta: metav1.ObjectMeta{Name: ns}, Spec: broker.OverflowPolicySpec{
		NamespaceSelector: metav1.LabelSelector{MatchLabels: map[string]string{corev1.LabelMetadataName: ns}}, ReturnHome: terms,
	}}
}

func returnAfter(after, stay time.Duration) *broker.ReturnHome {
	return &broker.ReturnHome{After: &metav1.Duration{Duration: after}, MinimumStay: &metav1.Duration{Duration: stay}}
}

func policyRules(c *testCluster, ns string) {
	for _, tc := range []struct {
		terms *broker.ReturnHome
		want  string
	}{
		{returnAfter(0, time.Minute), "after must be a duration of 1s to 24h"}, {returnAfter(25*time.Hour, time.Minute), "after must be a duration of 1s to 24h"},
		{returnAfter(time.Minute, 0), "minimumStay must be a duration of 1s to 720h"}, {returnAfter(time.Minute, 721*time.Hour), "minimumStay must be a duration of 1s to 720h"},
	} {
		if err := c.Create(c.t.Context(), returnPolicy(ns, tc.terms)); err == nil || !strings.Contains(err.Error(), tc.want) {
			c.t.Errorf("%+v: want a refusal with %q, got %v", tc.terms, tc.want, err)
		}
	}
	policy := returnPolicy(ns, &broker.ReturnHome{})
	c.create(policy)
	if terms := policy.Spec.ReturnHome; terms.After == nil || terms.After.Duration != 5*time.Minute || terms.MinimumStay == nil || terms.MinimumStay.Duration != 10*time.Minute {
		c.t.Errorf("defaults: got %+v", terms)
	}
	expect.NoError(c.t, c.Delete(c.t.Context(), policy))
}

// guests makes pods of a Deployment overflow and become ready.
func (c *testCluster) guests(ns, name, virtual string, pods int) (more func(int)) {
	c.t.Helper()
	more = c.app(ns, name, "1", pods)
	r := c.expectReservation(ns, name, int32(pods))
	c.setStatus(r, grantedIn(r, ns, int32(pods)))
	c.expectPods(ns, name, map[string]int{virtual: pods})
	c.runPods(ns, name)
	return more
}

// runPods makes the pods with a prefix that have a node ready, as the kubelet does. As soon as
// one is, another may be evicted.
func (c *testCluster) runPods(ns, prefix string) {
	c.t.Helper()
	for node, pods := range c.pods(ns, prefix) {
		for _, pod := range pods {
			if node == "" || podutil.IsPodReady(pod) {
				continue
			}
			before := pod.DeepCopy()
			pod.Status.Phase = corev1.PodRunning
			ready := corev1.PodCondition{Type: corev1.PodReady, Status: corev1.ConditionTrue}
			pod.Status.Conditions = append(slices.DeleteFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == corev1.PodReady }), ready)
			expect.NoError(c.t, client.IgnoreNotFound(c.Status().Patch(c.t.Context(), pod, client.StrategicMergeFrom(before))))
		}
	}
}

// expectNoMove watches the pods with a prefix stay where they are.
func (c *testCluster) expectNoMove(ns, prefix, why string, want map[string]int) {
	c.t.Helper()
	expect.Consistently(c.t, 2500*time.Millisecond, why, func() (bool, string) {
		got := map[string]int{}
		for node, pods := range c.pods(ns, prefix) {
			got[node] = len(pods)
		}
		return fmt.Sprint(got) == fmt.Sprint(want), fmt.Sprintf("got %v, want %v", got, want)
	})
}

// budget permits disruptions of the pods of an app, as the disruption controller does.
func (c *testCluster) budget(ns, app string, disruptions int32) {
	c.t.Helper()
	b := &policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: app}, Spec: policyv1.PodDisruptionBudgetSpec{
		Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}}, MaxUnavailable: ptr.To(intstr.FromInt32(disruptions)),
	}}
	c.create(b)
	b.Status = policyv1.PodDisruptionBudgetStatus{ObservedGeneration: b.Generation, DisruptionsAllowed: disruptions, CurrentHealthy: 3, DesiredHealthy: 3 - disruptions, ExpectedPods: 3}
	expect.NoError(c.t, c.Status().Update(c.t.Context(), b))
}

// returnsHome: by default, while there is no room, and before it has stayed, nothing
// moves. Then one pod moves at a time, except those that a PodDisruptionBudget keeps.
func returnsHome(c *testCluster, ns string) {
	virtual := c.virtualPoolNode(ns, "10")
	more := c.guests(ns, "web", virtual, 3)
	c.guests(ns, "kept", virtual, 1)
	c.budget(ns, "web", 3)
	c.budget(ns, "kept", 0)
	abroad := map[string]int{virtual: 3}
	home := c.poolNode(ns, "4")
	c.expectNoMove(ns, "web", "nothing moves by default", abroad)

	policy := returnPolicy(ns, returnAfter(time.Hour, time.Second))
	c.create(policy)
	c.expectNoMove(ns, "web", "the room has to stay", abroad)
	c.create(schedulerPod(ns, "filler", "4", inPool(ns)))
	c.expectPods(ns, "filler", map[string]int{home: 1})
	former := policy.DeepCopy() // without what its status says meanwhile
	policy.Spec.ReturnHome = returnAfter(time.Second, time.Second)
	expect.NoError(c.t, c.Patch(c.t.Context(), policy, client.MergeFrom(former)))
	c.expectNoMove(ns, "web", "the room has vanished", abroad)

	expect.NoError(c.t, c.Delete(c.t.Context(), schedulerPod(ns, "filler", "4")))
	for moved := 1; moved <= 3; moved++ {
		rest := map[string]int{}
		if moved < 3 {
			rest[virtual] = 3 - moved
		}
		if moved > 1 {
			rest[home] = moved - 1
		}
		c.expectPods(ns, "web", rest)
		c.expectNoMove(ns, "web", "the next move waits for the replacement", rest)
		more(1)
		rest[home] = moved
		c.expectPods(ns, "web", rest)
		if moved == 1 {
			c.expectNoMove(ns, "web", "the next move waits until the replacement is ready", rest)
		}
		c.runPods(ns, "web")
	}
	c.expectEvent(ns, "", "ReturningHome", virtual, "has had room for it for 1s")
	c.expectEvent(ns, c.expectReservation(ns, "web", 3).Name, "ReturningHome", virtual)
	c.expectEvent(ns, "kept-0", "ReturnHomeBlocked", "disruption budget")
	c.expectPods(ns, "kept", map[string]int{virtual: 1})
	expect.NoError(c.t, c.Delete(c.t.Context(), policy))
}

// overflowsAgain: the room at home is gone when the replacement comes.
func overflowsAgain(c *testCluster, ns string) {
	virtual := c.virtualPoolNode(ns, "10")
	more := c.guests(ns, "web", virtual, 2)
	home := c.poolNode(ns, "4")
	policy := returnPolicy(ns, returnAfter(time.Second, time.Second))
	c.create(policy)
	c.expectPods(ns, "web", map[string]int{virtual: 1})
	c.create(schedulerPod(ns, "filler", "4", inPool(ns)))
	c.expectPods(ns, "filler", map[string]int{home: 1})
	more(1)
	c.expectPods(ns, "web", map[string]int{virtual: 2})
	c.expectEvent(ns, "", "ReturnHomeFailed", "overflowed again", "No other pod of its owner moves before")
	c.runPods(ns, "web")
	expect.NoError(c.t, c.Delete(c.t.Context(), schedulerPod(ns, "filler", "4")))
	c.expectNoMove(ns, "web", "the owner rests", map[string]int{virtual: 2})
	expect.NoError(c.t, c.Delete(c.t.Context(), policy))
}
