package virtualnode_test

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/fake"
	"github.com/spillway-dev/spillway/agent/internal/virtualnode"
	"github.com/spillway-dev/spillway/agent/internal/virtualnode/virtualnodetest"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/events"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestMain(m *testing.M) {
	ctrl.SetLogger(zap.New(zap.WriteTo(io.Discard)))
	controlplane.Main(m)
}

func start(t *testing.T) *virtualnodetest.Cluster {
	t.Helper()
	return startWith(t, nil, func(*virtualnode.Reconciler) {})
}

// startWith starts a Reconciler that knows which providers have been asked, and passes it to
// made.
func startWith(t *testing.T, asked func(string) (peering.Peer, bool), made func(*virtualnode.Reconciler)) *virtualnodetest.Cluster {
	t.Helper()
	return virtualnodetest.Start(t, func(mgr ctrl.Manager, driver *fake.Driver) error {
		r := virtualnode.New(mgr.GetClient(), mgr.GetAPIReader(), events.NewRecorder(mgr.GetEventRecorder("spillway-agent")), driver, virtualnode.Options{
			InstructionNamespace: virtualnodetest.InstructionNamespace, SchedulerName: broker.SchedulerName,
			PeeringIdleTime: 4 * time.Second, FinishedPodRetention: 2 * time.Second,
			ReadyTimeout: 2 * time.Second, ShrinkDelay: 200 * time.Millisecond, Asked: asked,
		})
		made(r)
		return r.SetupWithManager(mgr)
	})
}

// TestAskedProvider: a provider is peered with while it decides. If it refuses, the peering is
// removed as an idle one; if it grants, the virtual node follows.
func TestAskedProvider(t *testing.T) {
	var asked sync.Map
	var reconciler *virtualnode.Reconciler
	c := startWith(t, func(provider string) (peering.Peer, bool) {
		_, ok := asked.Load(provider)
		return peering.Peer{ClusterID: provider}, ok
	}, func(r *virtualnode.Reconciler) { reconciler = r })
	ask := func(provider string) {
		asked.Store(provider, true)
		reconciler.EnqueueAsked(provider)
		expect.Eventually(t, provider+" to be peered with", func() (bool, string) {
			calls := c.Driver.Calls("EnsurePeering")
			return slices.ContainsFunc(calls, func(call fake.Call) bool { return call.Cluster == provider }), fmt.Sprint(calls)
		})
	}

	c.Driver.Hold("EnsurePeering", peering.Waiting("ResponsePending", "waiting for the provider to respond"))
	ask("paris")
	expect.Eventually(t, "another try", func() (bool, string) {
		calls := c.Driver.Calls("EnsurePeering")
		return len(calls) > 1, fmt.Sprint(calls)
	})
	held := len(c.Driver.Calls("EnsurePeering"))
	c.Driver.Free("EnsurePeering")
	expect.Eventually(t, "the peering", func() (bool, string) {
		calls := c.Driver.Calls("EnsurePeering")
		return len(calls) > held, fmt.Sprint(calls)
	})
	r := c.Reservation(c.Pod("w"), 1)
	if calls := c.Driver.Calls("EnsureCapacity"); len(calls) > 0 {
		t.Fatalf("a virtual node without a grant: %v", calls)
	}
	c.Instruct(r, "paris", 1, 1)
	asked.Delete("paris")
	c.ExpectCapacity("paris", "cpu 300m, memory 64Mi, 1 pods, [shop]")

	ask("oslo")
	asked.Delete("oslo")
	expectTeardown(c)
	for _, call := range c.Driver.Calls("Teardown") {
		if call.Cluster != "oslo" {
			t.Errorf("the peering with %s is removed, which grants", call.Cluster)
		}
	}
}

// TestVirtualNode follows one virtual node from the first instruction to the
// removal of the idle peering.
func TestVirtualNode(t *testing.T) {
	c := start(t)
	w1, w2 := c.Pod("w1"), c.Pod("w2")
	r := c.Reservation(w1, 3)

	// Cold: the condition says what it waits for, and after the timeout that it is late.
	c.Driver.Hold("EnsurePeering", peering.Waiting("OfferPending", "waiting for the offer of paris"))
	c.Instruct(r, "paris", 1, 3)
	c.ExpectCondition(r, "paris", broker.ConditionPeered, metav1.ConditionFalse, 1, "waiting for the offer of paris")
	c.ExpectCondition(r, "paris", broker.ConditionReady, metav1.ConditionFalse, 1, "not ready after")
	c.ExpectEvent(r, "VirtualNodeNotReady")
	if calls := c.Driver.Calls("EnsureCapacity"); len(calls) > 0 {
		t.Fatalf("a virtual node without a peering: %v", calls)
	}
	c.Driver.FailNext("EnsureCapacity", errors.New("the API server is overloaded"))
	c.Driver.Free("EnsurePeering")
	c.ExpectCondition(r, "paris", broker.ConditionVirtualNodeReady, metav1.ConditionTrue, 1, "node spillway-paris provides cpu 900m, memory 192Mi")
	c.ExpectCondition(r, "paris", broker.ConditionReady, metav1.ConditionTrue, 1, "")
	c.ExpectCapacity("paris", "cpu 900m, memory 192Mi, 3 pods, [shop]")

	// A DaemonSet's pod gets a pod slot of its own and no resources.
	daemon := c.Pod("daemon", func(p *corev1.Pod) {
		p.Namespace = "default"
		p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "d", UID: "d", Controller: ptr.To(true)}}
		p.Spec.NodeName = broker.VirtualNodeName("paris")
	})
	c.ExpectCapacity("paris", "cpu 900m, memory 192Mi, 4 pods, [shop]")
	c.Remove(daemon)
	c.ExpectCapacity("paris", "cpu 900m, memory 192Mi, 3 pods, [shop]")

	// What is retained limits the attempt it was retained at, and no later one.
	c.UpdateReservation(r, func(r *broker.Reservation) {
		r.Spec.PodSets[0].Count = 2
		r.Spec.Retained = []broker.RetainedPods{{Cluster: "paris", Count: 2, Attempt: 1}}
	})
	c.ExpectCapacity("paris", "cpu 600m, memory 128Mi, 2 pods, [shop]")
	c.Instruct(r, "paris", 2, 4)
	c.ExpectCondition(r, "paris", broker.ConditionVirtualNodeReady, metav1.ConditionTrue, 2, "cpu 1200m")
	c.ExpectCapacity("paris", "cpu 1200m, memory 256Mi, 4 pods, [shop]")

	for _, p := range []*corev1.Pod{w1, w2} {
		c.Bind(p, "paris")
		c.SetPhase(p, corev1.PodRunning)
	}
	releaseVirtualNode(c, r, w1, w2)
}

// releaseVirtualNode deletes a Reservation of which two pods run in paris: they are
// not stopped, and the instruction is released only once they are gone.
func releaseVirtualNode(c *virtualnodetest.Cluster, r *broker.Reservation, w1, w2 *corev1.Pod) {
	c.Helper()
	c.Remove(r)
	c.ExpectCondition(r, "paris", broker.ConditionRequesterReleased, metav1.ConditionFalse, 2, "pods still running in paris: 2 (shop/w1, shop/w2)")
	c.Remove(w2)
	c.ExpectCondition(r, "paris", broker.ConditionRequesterReleased, metav1.ConditionFalse, 2, "pods still running in paris: 1 (shop/w1)")
	c.ExpectCapacity("paris", "cpu 300m, memory 64Mi, 1 pods, [shop]")
	c.SetPhase(w1, corev1.PodSucceeded)
	c.ExpectCondition(r, "paris", broker.ConditionRequesterReleased, metav1.ConditionTrue, 2, "no pod")
	c.ExpectCapacity("paris", "nothing, 0 pods, [shop]")

	// Without a grant the node stays parked, until the peering has been idle for long
	// enough.
	c.Remove(virtualnodetest.InstructionOf(r, "paris"))
	if calls := c.Driver.Calls("Teardown"); len(calls) > 0 {
		c.Fatalf("removed at once: %v", calls)
	}
	expectTeardown(c)
	c.UpdateReservation(r, func(r *broker.Reservation) { r.Finalizers = nil })
}

func expectTeardown(c *virtualnodetest.Cluster) {
	c.Helper()
	expect.Eventually(c, "the idle peering to be removed", func() (bool, string) {
		return len(c.Driver.Calls("Teardown")) > 0, fmt.Sprint(c.Driver.Calls(""))
	})
}

// TestPeeringWithoutInstruction: a peering that no instruction mentions is found,
// and removed once it has been idle.
func TestPeeringWithoutInstruction(t *testing.T) {
	c := start(t)
	_, err := c.Driver.EnsurePeering(t.Context(), peering.Peer{ClusterID: "oslo"})
	expect.NoError(t, err)
	// Any event of the provider enqueues it before the next resync does.
	c.Make(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: broker.VirtualNodeName("oslo")}})
	expectTeardown(c)
}
