package virtualnode_test

import (
	"fmt"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/spillway-dev/spillway/agent/internal/virtualnode/virtualnodetest"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// labeled makes a pod one that is charged to a hold.
func labeled(hold string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Labels = map[string]string{broker.LabelHold: hold} }
}

// TestReservationOfTheHub follows the virtual node of a Reservation that this cluster does
// not have: it is carried for all opted-in namespaces, used by the pods with its label,
// and released as they end.
func TestReservationOfTheHub(t *testing.T) {
	c := start(t)
	for name, value := range map[string]string{"bank": broker.OverflowEnabled, "school": broker.OverflowDisabled} {
		c.Make(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{broker.LabelOverflow: value}}})
	}
	in := c.InstructFromHub("from-hub", "paris", expect.Resources("cpu", "2", "memory", "1Gi"))
	c.ExpectCapacity("paris", "cpu 2, memory 1Gi, 110 pods, [bank shop]")
	expectUse(c, in, "carried", func(status broker.ReservationInstructionStatus) bool {
		return status.Carried != nil && meta.IsStatusConditionTrue(status.Conditions, broker.ConditionReady) && status.Used != nil && status.Used.Count == 0
	})

	// A pod whose owner has a Reservation of its own uses the one that it is charged to.
	pooled, own := c.Pod("pooled", labeled("from-hub")), c.Pod("own")
	c.Instruct(c.Reservation(own, 1), "paris", 1, 1)
	c.ExpectCapacity("paris", "cpu 2300m, memory 1088Mi, 111 pods, [bank shop]")
	for _, p := range []*corev1.Pod{pooled, own} {
		c.Bind(p, "paris")
		c.SetPhase(p, corev1.PodRunning)
	}
	expectUse(c, in, "one pod in use", func(status broker.ReservationInstructionStatus) bool {
		return status.Used != nil && status.Used.Count == 1 && slices.Equal(status.Used.Pods, []string{"shop/pooled"}) && status.Used.Resources.CPU.String() == "300m"
	})
	c.ExpectCapacity("paris", "cpu 2300m, memory 1088Mi, 111 pods, [bank shop]")

	c.UpdateInstruction(in, func(spec *broker.ReservationInstructionSpec) { spec.Releasing = true })
	expectUse(c, in, "one pod that remains", func(status broker.ReservationInstructionStatus) bool {
		released := meta.FindStatusCondition(status.Conditions, broker.ConditionRequesterReleased)
		return status.Carried == nil && released != nil && released.Status == metav1.ConditionFalse && released.Message == "pods still running in paris: 1 (shop/pooled)"
	})
	c.ExpectCapacity("paris", "cpu 600m, memory 128Mi, 2 pods, [shop]")
	c.Remove(pooled)
	expectUse(c, in, "released", func(status broker.ReservationInstructionStatus) bool {
		return meta.IsStatusConditionTrue(status.Conditions, broker.ConditionRequesterReleased)
	})
	c.ExpectCapacity("paris", "cpu 300m, memory 64Mi, 1 pods, [shop]")
}

// TestReservationOfTheHubNarrowed: the pods that are charged to it count as its use, whether
// or not it serves their namespace any more: so does the scheduler count them.
func TestReservationOfTheHubNarrowed(t *testing.T) {
	c := start(t)
	c.Make(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "bank", Labels: map[string]string{broker.LabelOverflow: broker.OverflowEnabled}}})
	c.Make(&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default", Namespace: "bank"}})
	in := c.InstructFromHub("from-hub", "paris", expect.Resources("cpu", "2", "memory", "1Gi"))
	c.ExpectCapacity("paris", "cpu 2, memory 1Gi, 110 pods, [bank shop]")
	pod := c.Pod("pooled", labeled("from-hub"), func(p *corev1.Pod) { p.Namespace, p.OwnerReferences = "bank", nil })
	c.Bind(pod, "paris")
	c.SetPhase(pod, corev1.PodRunning)
	used := func(want int32) func(broker.ReservationInstructionStatus) bool {
		return func(status broker.ReservationInstructionStatus) bool {
			return status.ObservedGeneration == in.Generation && status.Used != nil && status.Used.Count == want
		}
	}
	expectUse(c, in, "one pod in use", used(1))
	c.UpdateInstruction(in, func(spec *broker.ReservationInstructionSpec) {
		spec.Namespaces = []string{"shop"}
		spec.PodSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"tier": "batch"}}
	})
	expectUse(c, in, "one pod in use", used(1))
	c.ExpectCapacity("paris", "cpu 2, memory 1Gi, 110 pods, [bank shop]")
	c.Remove(pod)
	expectUse(c, in, "none in use", used(0))
	c.ExpectCapacity("paris", "cpu 2, memory 1Gi, 110 pods, [shop]")
}

// TestReservationOfTheHubReturns: one that is granted again while its release goes on is
// not taken for released the next time.
func TestReservationOfTheHubReturns(t *testing.T) {
	c := start(t)
	in := c.InstructFromHub("from-hub", "paris", expect.Resources("cpu", "2", "memory", "1Gi"))
	release := func(releasing bool) {
		t.Helper()
		c.UpdateInstruction(in, func(spec *broker.ReservationInstructionSpec) { spec.Releasing = releasing })
	}
	released := func(status broker.ReservationInstructionStatus) *metav1.Condition {
		return meta.FindStatusCondition(status.Conditions, broker.ConditionRequesterReleased)
	}
	c.ExpectCapacity("paris", "cpu 2, memory 1Gi, 110 pods, [shop]")
	release(true)
	expectUse(c, in, "released", func(status broker.ReservationInstructionStatus) bool {
		return meta.IsStatusConditionTrue(status.Conditions, broker.ConditionRequesterReleased)
	})
	release(false)
	expectUse(c, in, "carried again", func(status broker.ReservationInstructionStatus) bool {
		return status.Carried != nil && meta.IsStatusConditionTrue(status.Conditions, broker.ConditionReady) && released(status) == nil
	})
	pod := c.Pod("pooled", labeled("from-hub"))
	c.Bind(pod, "paris")
	c.SetPhase(pod, corev1.PodRunning)
	expectUse(c, in, "one pod in use", func(status broker.ReservationInstructionStatus) bool {
		return status.Used != nil && status.Used.Count == 1
	})
	release(true)
	expectUse(c, in, "one pod that remains", func(status broker.ReservationInstructionStatus) bool {
		condition := released(status)
		return condition != nil && condition.Status == metav1.ConditionFalse && condition.Message == "pods still running in paris: 1 (shop/pooled)"
	})
	c.Remove(pod)
	expectUse(c, in, "released", func(status broker.ReservationInstructionStatus) bool {
		return meta.IsStatusConditionTrue(status.Conditions, broker.ConditionRequesterReleased)
	})
}

func expectUse(c *virtualnodetest.Cluster, in *broker.ReservationInstruction, what string, check func(broker.ReservationInstructionStatus) bool) {
	c.Helper()
	expect.Eventually(c, what, func() (bool, string) {
		c.Refresh(in)
		return check(in.Status), fmt.Sprintf("%+v", in.Status)
	})
}
