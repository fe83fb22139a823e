package charts_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// A scheduler that somebody else controls evicts pods of virtual nodes only, and the users
// of a namespace do not decide which pods return home.
func TestAttacksOnReturningHome(t *testing.T) {
	config := controlplane.Start(t)
	admin, scheduler := as(t, config, ""), as(t, config, "spillway-scheduler")
	expect.NoError(t, admin.Create(t.Context(), &corev1.Namespace{ObjectMeta: named("liqo")}))
	install(t, "install", "agent", kubeconfig(t, config), needed)
	createWorkload(t, admin)
	user := rbacv1.Subject{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: "mallory"}
	binding := roleBinding("default", "mallory", "system:aggregate-to-edit", "", "")
	binding.Subjects = []rbacv1.Subject{user}
	expect.NoError(t, admin.Create(t.Context(), binding))
	mallory := impersonating(t, config, user.Name)
	// As a pod of a DaemonSet, on a real node with the name of a virtual one.
	eventually(t, "binding to a real node", bindPod(t, admin, "second", "spillway-worker"))
	eventually(t, "binding another one there", bindPod(t, admin, "third", "spillway-worker"))
	eventually(t, "binding to a virtual node", bindOverflowed(t, scheduler, "overflowed"))

	evict := func(pod string, labels map[string]string) func() error {
		return func() error {
			return scheduler.SubResource("eviction").Create(t.Context(), podOn("", pod), &policyv1.Eviction{
				ObjectMeta: metav1.ObjectMeta{Labels: labels}, DeleteOptions: &metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}},
			})
		}
	}
	labelled := map[string]string{"app.kubernetes.io/managed-by": "spillway"}
	policy := func() error {
		object := &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": "broker.fluidos.eu/v1alpha1", "kind": "OverflowPolicy", "metadata": map[string]any{"name": "mine"},
			"spec": map[string]any{"returnHome": map[string]any{"after": "1s", "minimumStay": "1s"}},
		}}
		return mallory.Create(t.Context(), object, client.DryRunAll)
	}
	local, removals := podOn("", "local"), []string{"spillway-pod-removals"}
	eventually(t, "evicting a pod of a virtual node", evict("overflowed", labelled))
	eventually(t, "creating a pod in an own namespace", func() error {
		return mallory.Create(t.Context(), &corev1.Pod{ObjectMeta: within("default", "mine"), Spec: podOn("", "mine").Spec}, client.DryRunAll)
	})
	runAttacks(t, []guard{policyGuard(t, admin, removals[0]), permissionGuard(t, admin, user)}, []attack{
		{"evicting a pod of a real node", evict(local.Name, labelled), removals, "scheduler may only evict pods on virtual nodes"},
		{"evicting a pod of a real node with the name of a virtual one", evict("second", labelled), removals, "scheduler may only evict pods on virtual nodes"},
		{"evicting a pod there that may overflow", evict("third", labelled), removals, "scheduler may only evict pods on virtual nodes"},
		{"evicting a pod of a real node without the label", evict(local.Name, nil), removals, "labels its evictions"},
		{"making an OverflowPolicy as an editor of a namespace", policy, []string{"RBAC"}, "cannot create resource"},
	})
}

// Only pods with a grant are on virtual nodes, also if another scheduler runs, and none preempts
// them there.
func TestAttacksOnVirtualNodes(t *testing.T) {
	config := controlplane.Start(t)
	ctx, admin, scheduler := t.Context(), as(t, config, ""), as(t, config, "spillway-scheduler")
	expect.NoError(t, admin.Create(ctx, &corev1.Namespace{ObjectMeta: named("liqo")}))
	install(t, "install", "agent", kubeconfig(t, config), needed)
	createWorkload(t, admin)
	eventually(t, "binding to a virtual node", bindOverflowed(t, scheduler, "overflowed"))
	kubeScheduler := impersonating(t, config, "system:kube-scheduler")
	bind := func(c client.Client) func() error {
		return func() error {
			binding := &corev1.Binding{Target: corev1.ObjectReference{Kind: "Node", Name: "spillway-paris"}}
			return c.SubResource("binding").Create(ctx, podOn("", "pending"), binding, client.DryRunAll)
		}
	}
	create := func(pod *corev1.Pod) func() error {
		return func() error { return admin.Create(ctx, pod.DeepCopy(), client.DryRunAll) }
	}
	preempt := func(c client.Client) func() error {
		return func() error { return c.Delete(ctx, podOn("", "overflowed"), client.DryRunAll) }
	}
	eventually(t, "creating a DaemonSet's pod for a real node", create(daemonSetPod("worker")))
	policy := []string{"spillway-virtual-node-pods"}
	runAttacks(t, []guard{policyGuard(t, admin, policy[0])}, []attack{
		{"binding by kube-scheduler", bind(kubeScheduler), policy, "only system:serviceaccount:spillway-system:spillway-scheduler may bind pods to it"},
		{"binding by an administrator", bind(admin), policy, "may bind pods to it, not"},
		{"creating a pod there", create(podOn("spillway-paris", "pinned")), policy, "leave spec.nodeName empty"},
		{"creating a DaemonSet's pod for it", create(daemonSetPod("spillway-paris")), policy, "DaemonSets have no pods on virtual nodes"},
		{"preemption by kube-scheduler", preempt(kubeScheduler), policy, "schedulers may not preempt it"},
		{"preemption by Spillway's scheduler", preempt(scheduler), policy, "schedulers may not preempt it"},
	})
}
