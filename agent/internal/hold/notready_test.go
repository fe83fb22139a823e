package hold_test

import (
	"fmt"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/hold/verdict"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// ready makes a node report whether it is Ready, as its kubelet does, or the node lifecycle
// controller in its place: Unknown.
func (e *env) ready(name string, status corev1.ConditionStatus) {
	e.Helper()
	e.changeNode(name, func(n *corev1.Node) error {
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: status}}
		return e.Status().Update(e.Context(), n)
	})
}

// taint replaces the taints of a node.
func (e *env) taint(name string, taints ...corev1.Taint) {
	e.Helper()
	e.changeNode(name, func(n *corev1.Node) error {
		n.Spec.Taints = taints
		return e.Update(e.Context(), n)
	})
}

func (e *env) changeNode(name string, change func(*corev1.Node) error) {
	e.Helper()
	n := &corev1.Node{}
	expect.NoError(e, e.Get(e.Context(), client.ObjectKey{Name: name}, n))
	expect.NoError(e, change(n))
}

// nodesOf are the nodes of the placeholders, sorted, "" for one that has none.
func (e *env) nodesOf() (nodes []string) {
	e.Helper()
	var list corev1.PodList
	expect.NoError(e, e.List(e.Context(), &list, client.InNamespace(holds)))
	for _, pod := range list.Items {
		nodes = append(nodes, pod.Spec.NodeName)
	}
	slices.Sort(nodes)
	return nodes
}

// TestNodeIsNotReady: what is held on a node that is not Ready any more moves to another
// node, or is given up, as with one that is cordoned. Nothing is promised on such a node, and
// all of it again once the node is Ready.
func TestNodeIsNotReady(t *testing.T) {
	e := startPlaces(t, true)
	half := expect.Resources("cpu", "500m")
	e.amd64("a", expect.Resources("cpu", "2", "memory", "8Gi"))
	e.amd64("b", expect.Resources("cpu", "1", "memory", "8Gi"))
	e.hold("r1", "rome", 1, pods(set("pods", 6, half)))
	e.decided("r1", 1, verdict.ReasonAccepted, "", 6)
	e.granted("rome", "cpu 3", 6)
	e.eventuallyBound(holds, 6)

	// The kubelet reports it. The node has no taint yet, which alone would keep pods off it.
	e.ready("b", corev1.ConditionFalse)
	e.lowered("r1", 1, 4, "Holding only 4 pods of cpu 500m")
	e.granted("rome", "cpu 2", 4)
	e.eventuallyBound(holds, 4)
	if nodes := e.nodesOf(); !slices.Equal(nodes, []string{"a", "a", "a", "a"}) {
		t.Errorf("the placeholders are on %v", nodes)
	}
	e.hold("b1", "berlin", 1, pods(set("pods", 1, half)))
	e.decided("b1", 1, verdict.ReasonInsufficientCapacity, "0 of 1 pods", 0)
	e.granted("berlin", "nothing", 0)

	// It recovers: another attempt holds all of it again.
	e.ready("b", corev1.ConditionTrue)
	e.hold("r1", "rome", 2, pods(set("pods", 6, half)))
	attempt := e.recovers("r1", 2, pods(set("pods", 6, half))) + 1
	e.granted("rome", "cpu 3", 6)
	e.eventuallyBound(holds, 6)

	// A node that reports nothing any more, with what the node lifecycle controller writes. The
	// others have room for what is held there.
	e.hold("r1", "rome", attempt, pods(set("pods", 2, half)))
	e.decided("r1", attempt, verdict.ReasonAccepted, "", 2)
	e.eventuallyBound(holds, 2)
	lost := e.nodesOf()[0]
	e.taint(lost, corev1.Taint{Key: corev1.TaintNodeUnreachable, Effect: corev1.TaintEffectNoSchedule})
	e.ready(lost, corev1.ConditionUnknown)
	other := map[string]string{"a": "b", "b": "a"}[lost]
	expect.Eventually(t, "the placeholders to move to the other node", func() (bool, string) {
		nodes := e.nodesOf()
		return slices.Equal(nodes, []string{other, other}), fmt.Sprint(nodes)
	})
	e.decided("r1", attempt, verdict.ReasonAccepted, "Holding 2 pods of cpu 500m for consumer rome.", 2)
	e.proven("r1")
	e.granted("rome", "cpu 1", 2)
}

// recovers waits until a hold is accepted, and returns the attempt. One that comes before the
// agent has seen that there is capacity again is refused, and the broker makes another.
func (e *env) recovers(name string, attempt int64, want broker.HeldCapacity) (accepted int64) {
	e.Helper()
	expect.Eventually(e, "a hold to be accepted again", func() (bool, string) {
		in, c := e.get(name)
		if in.Status.ObservedAttempt == attempt && c.Reason != verdict.ReasonAccepted {
			attempt++
			e.hold(name, in.Spec.RequesterClusterID, attempt, want)
		}
		return in.Status.ObservedAttempt == attempt && c.Reason == verdict.ReasonAccepted && in.Status.Enforced, fmt.Sprintf("%+v", in.Status)
	})
	return attempt
}
