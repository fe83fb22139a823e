package virtualnode_test

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/virtualnode/virtualnodetest"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestNamespaceConcernsItsOwnGrants: what keeps one namespace from using a virtual node keeps
// only its own grants from being ready, is said once it is certain, and ends with its cause. A
// Reservation of the hub serves its other namespaces meanwhile.
func TestNamespaceConcernsItsOwnGrants(t *testing.T) {
	c := start(t)
	c.Make(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "bank", Labels: map[string]string{broker.LabelOverflow: broker.OverflowEnabled}}})
	c.Driver.Unmap("shop", &peering.Unmapped{Reason: "NamespaceRejected", Message: "its name is taken", Final: true})
	hub := c.InstructFromHub("from-hub", "paris", expect.Resources("cpu", "2", "memory", "1Gi"))
	r := c.Reservation(c.Pod("w"), 1)
	c.Instruct(r, "paris", 1, 1)

	c.ExpectCondition(r, "paris", broker.ConditionVirtualNodeReady, metav1.ConditionFalse, 1, "its name is taken")
	c.ExpectCondition(r, "paris", broker.ConditionUnusable, metav1.ConditionTrue, 1, "its name is taken")
	serves := func(unmapped ...string) func(broker.ReservationInstructionStatus) bool {
		return func(status broker.ReservationInstructionStatus) bool {
			return status.Carried != nil && meta.IsStatusConditionTrue(status.Conditions, broker.ConditionReady) &&
				meta.FindStatusCondition(status.Conditions, broker.ConditionUnusable) == nil && slices.Equal(status.UnmappedNamespaces, unmapped)
		}
	}
	expectUse(c, hub, "ready for namespace bank", serves("shop"))

	// While it may pass, no other provider is asked, but not for longer than a virtual node may take.
	c.Driver.Unmap("shop", &peering.Unmapped{Reason: "NamespacePending", Message: "it is being created"})
	c.ExpectCondition(r, "paris", broker.ConditionVirtualNodeReady, metav1.ConditionFalse, 1, "it is being created")
	c.ExpectEvent(r, "VirtualNodeNotReady")
	c.ExpectCondition(r, "paris", broker.ConditionUnusable, metav1.ConditionTrue, 1, "it is being created")
	var events corev1.EventList
	expect.NoError(t, c.List(t.Context(), &events, client.InNamespace(virtualnodetest.InstructionNamespace)))
	for _, e := range events.Items {
		if e.InvolvedObject.Name == hub.Name || strings.Contains(e.Message, "is not ready") {
			t.Errorf("event about a grant that is ready: %s", e.Message)
		}
	}

	c.Driver.Unmap("shop", nil)
	c.ExpectCondition(r, "paris", broker.ConditionVirtualNodeReady, metav1.ConditionTrue, 1, "node spillway-paris provides")
	expectUse(c, hub, "ready for both", serves())
	expectNoCondition(c, r)
}

func expectNoCondition(c *virtualnodetest.Cluster, r *broker.Reservation) {
	c.Helper()
	in := virtualnodetest.InstructionOf(r, "paris")
	c.Refresh(in)
	if is := meta.FindStatusCondition(in.Status.Conditions, broker.ConditionUnusable); is != nil {
		c.Errorf("it can be used, and has condition %+v", is)
	}
}
