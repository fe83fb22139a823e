package virtualnode_test

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/virtualnode/virtualnodetest"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestCordon: while an administrator has cordoned a virtual node, grants that no pod uses are
// unusable, so that other providers are asked, and those that pods use stay.
func TestCordon(t *testing.T) {
	c := start(t)
	used := c.Pod("used")
	runs := c.Reservation(used, 1)
	c.Instruct(runs, "paris", 1, 1)
	c.ExpectCondition(runs, "paris", broker.ConditionVirtualNodeReady, metav1.ConditionTrue, 1, "node spillway-paris provides")
	c.Bind(used, "paris")
	cordon := func(unschedulable bool) {
		t.Helper()
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: broker.VirtualNodeName("paris")}}
		expect.NoError(t, c.Patch(t.Context(), node, client.RawPatch("application/merge-patch+json", fmt.Appendf(nil, `{"spec":{"unschedulable":%t}}`, unschedulable))))
	}
	cordon(true)
	waits := c.Reservation(c.Pod("waits", func(p *corev1.Pod) {
		p.Spec.Containers[0].Resources.Requests = expect.Resources("cpu", "700m", "memory", "64Mi")
	}), 1)
	c.Instruct(waits, "paris", 1, 1)
	c.ExpectCondition(waits, "paris", broker.ConditionVirtualNodeReady, metav1.ConditionFalse, 1, "node spillway-paris is cordoned")
	c.ExpectCondition(waits, "paris", broker.ConditionUnusable, metav1.ConditionTrue, 1, "kubectl uncordon spillway-paris")
	c.ExpectCondition(runs, "paris", broker.ConditionVirtualNodeReady, metav1.ConditionTrue, 1, "node spillway-paris provides")
	expectNoCondition(c, runs)
	cordon(false)
	c.ExpectCondition(waits, "paris", broker.ConditionVirtualNodeReady, metav1.ConditionTrue, 1, "node spillway-paris provides")
	expectNoCondition(c, waits)

	// A mapping that is lost for a while takes nothing from the pods that run, either.
	c.Driver.Unmap("shop", &peering.Unmapped{Reason: "NamespacePending", Message: "it is being created"})
	c.ExpectCondition(waits, "paris", broker.ConditionVirtualNodeReady, metav1.ConditionFalse, 1, "it is being created")
	c.ExpectCondition(runs, "paris", broker.ConditionVirtualNodeReady, metav1.ConditionTrue, 1, "node spillway-paris provides")
	in := virtualnodetest.InstructionOf(runs, "paris")
	c.Refresh(in)
	if in.Status.Carried == nil {
		t.Errorf("nothing is carried for the pod that runs: %+v", in.Status)
	}
}
