package direct

import (
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

// TestWithoutVirtualNode stops the virtual-node program at the beginning and at the
// end of a peering.
func TestWithoutVirtualNode(t *testing.T) {
	e := newEnvironment(t)
	ctx := t.Context()
	e.simulated.set(func(s *simulation) { s.stopped = true })
	half := peering.Capacity{Resources: expect.Resources("cpu", "500m"), Pods: 1, Namespaces: []string{"shop"}}
	e.grant(half.Resources, 1)
	e.until("Peered", e.peering)
	e.until("NodePending", e.capacity(half))
	e.Clock.Advance(nodeTimeout)
	if progress := e.until("NodePending", e.capacity(half)); !strings.Contains(progress.Message, "check that Deployment spillway-virtual-node in namespace spillway-system is running") {
		t.Errorf("message %q", progress.Message)
	}
	e.simulated.set(func(s *simulation) { s.stopped = false })
	e.until("Ready", e.capacity(half))
	var binding rbacv1.RoleBinding
	if err := e.rome.Get(ctx, client.ObjectKey{Namespace: "shop", Name: virtualNodeAccount}, &binding); err != nil || binding.RoleRef.Name != virtualNodeNamespaceRole {
		t.Errorf("access of virtual-node to namespace shop: %+v, %v", binding.RoleRef, err)
	}
	marked := func(name string) bool {
		namespace := &corev1.Namespace{}
		expect.NoError(t, e.rome.Get(ctx, client.ObjectKey{Name: name}, namespace))
		return namespace.Labels[labelAccess] == "true"
	}
	if !marked("shop") {
		t.Error("namespace shop has no label, without which the chart's policy does not limit virtual-node there")
	}
	moved := half
	moved.Namespaces = []string{"tools"}
	e.until("Ready", e.capacity(moved))
	if err := e.rome.Get(ctx, client.ObjectKeyFromObject(&binding), &binding); !apierrors.IsNotFound(err) {
		t.Errorf("access of virtual-node to namespace shop is not revoked: %v", err)
	}
	if marked("shop") || !marked("tools") {
		t.Error("the label of namespaces did not move with the permission")
	}

	e.simulated.set(func(s *simulation) { s.stopped = true })
	e.until("NodeTerminating", e.teardown)
	// As long as the lease is renewed, virtual-node deletes the Node itself.
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: corev1.NamespaceNodeLease, Name: "spillway-paris"}}
	for range 3 {
		expect.NoError(t, e.rome.Get(ctx, client.ObjectKeyFromObject(lease), lease))
		lease.Spec.RenewTime = ptr.To(metav1.NewMicroTime(lease.Spec.RenewTime.Add(time.Second)))
		expect.NoError(t, e.rome.Update(ctx, lease))
		e.until("NodeTerminating", e.teardown)
		e.Clock.Advance(e.options.StaleAfter - time.Millisecond)
	}
	if err := e.rome.Get(ctx, client.ObjectKey{Name: "spillway-paris"}, &corev1.Node{}); err != nil {
		t.Fatalf("the node was deleted while its lease was renewed: %v", err)
	}
	e.until("NodeTerminating", e.teardown)
	e.Clock.Advance(e.options.StaleAfter)
	e.until("Removed", e.teardown)
	e.ExpectNothingLeft()
}

// TestUnreachableProvider checks that pods that cannot terminate are force-deleted
// after a while, and that the peering ends.
func TestUnreachableProvider(t *testing.T) {
	e := newEnvironment(t)
	ctx := t.Context()
	// virtual-node runs, and no time passes but that of the clock.
	e.options.StaleAfter, e.options.UnreachableAfter = time.Hour, 10*time.Minute
	e.Restart()
	half := peering.Capacity{Resources: expect.Resources("cpu", "500m"), Pods: 1, Namespaces: []string{"shop"}}
	e.grant(half.Resources, 1)
	e.until("Peered", e.peering)
	e.until("Ready", e.capacity(half))
	e.create(e.rome, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "default"}})
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "away"}, Spec: corev1.PodSpec{
		NodeName: "spillway-paris", Containers: []corev1.Container{{Name: "c", Image: "pause"}},
	}}
	e.create(e.rome, pod)
	e.Disconnect(true)
	e.simulated.set(func(s *simulation) { s.unreachable = "ProviderUnreachable" })
	if progress := e.until("NodePending", e.capacity(half)); !strings.Contains(progress.Message, "the provider reports ProviderUnreachable") {
		t.Errorf("message %q", progress.Message)
	}
	e.until("NodeTerminating", e.teardown)
	if !e.stored().Terminating {
		t.Error("virtual-node's configuration is not terminating")
	}
	e.until("NodeTerminating", e.teardown)
	if err := e.rome.Get(ctx, client.ObjectKeyFromObject(pod), pod); err != nil {
		t.Fatalf("the pod was force-deleted at once: %v", err)
	}
	e.Clock.Advance(e.options.UnreachableAfter)
	e.until("ProviderTerminating", e.teardown)
	if err := e.rome.Get(ctx, client.ObjectKeyFromObject(pod), pod); !apierrors.IsNotFound(err) {
		t.Errorf("the pod still exists: %v", err)
	}
	var secret corev1.Secret
	expect.NoError(t, e.rome.Get(ctx, client.ObjectKey{Namespace: virtualNodeNamespace, Name: nodeconfig.SecretName("paris")}, &secret))
	for key, value := range secret.Data {
		if strings.Contains(string(value), "eyJ") {
			t.Errorf("the ended peering still has a token in %s", key)
		}
	}

	// The teardown is completed before the next peering begins.
	if progress, err := e.peering(); err != nil || progress.Reason != "Terminating" {
		t.Errorf("a peering that is being removed: %+v, %v", progress, err)
	}
	e.Disconnect(false)
	e.simulated.set(func(s *simulation) { s.unreachable = "" })
	e.until("Peered", e.peering)
	e.until("Ready", e.capacity(half))
}

// TestNodeNameTaken checks that a node that Spillway did not make is not changed.
func TestNodeNameTaken(t *testing.T) {
	e := newEnvironment(t)
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "spillway-paris"}}
	e.create(e.rome, node)
	e.grant(expect.Resources("cpu", "1"), 1)
	e.until("Peered", e.peering)
	e.until("NodeNameTaken", e.capacity(peering.Capacity{Resources: expect.Resources("cpu", "1"), Pods: 1}))
	e.until("Removed", e.teardown)
	if err := e.rome.Get(t.Context(), client.ObjectKeyFromObject(node), node); err != nil {
		t.Errorf("the node: %v", err)
	}
}
