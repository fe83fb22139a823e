package charts_test

import (
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// A virtual-node that somebody else controls changes virtual nodes and the pods on them, in
// namespaces that the agent opened to it; and no one opens one without the limits there.
func TestAttacksByVirtualNode(t *testing.T) {
	config := controlplane.Start(t)
	ctx, admin, agent, virtualNode := t.Context(), as(t, config, ""), as(t, config, "spillway-agent"), as(t, config, "spillway-virtual-node")
	install(t, "install", "agent", kubeconfig(t, config), append([]string{"driver=direct"}, needed...))
	createWorkload(t, admin)
	eventually(t, "binding to a real node", bindPod(t, admin, "second", "spillway-worker"))
	eventually(t, "binding another one there", bindPod(t, admin, "third", "spillway-worker"))
	kubelet, foreign := &coordinationv1.Lease{ObjectMeta: within("kube-node-lease", "worker")}, &coordinationv1.Lease{ObjectMeta: within("kube-system", "foreign")}
	closed := podOn("worker", "local")
	closed.Namespace = "shop"
	for _, object := range []client.Object{
		&corev1.Namespace{ObjectMeta: named("shop")}, &corev1.ServiceAccount{ObjectMeta: within("shop", "default")}, closed,
		// As the agent makes it.
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: guests, Labels: map[string]string{"app.kubernetes.io/managed-by": "spillway", "broker.fluidos.eu/guests-of": "rome"}}},
		kubelet, foreign,
	} {
		expect.NoError(t, admin.Create(ctx, object))
	}
	merge := func(c client.Client, object client.Object, text string) func() error {
		return func() error {
			return c.Patch(ctx, object.DeepCopyObject().(client.Object), client.RawPatch(types.MergePatchType, []byte(text)), client.DryRunAll)
		}
	}
	update := func(pod *corev1.Pod, change func(*corev1.Pod)) func() error {
		return func() error {
			changed := &corev1.Pod{}
			if err := virtualNode.Get(ctx, client.ObjectKeyFromObject(pod), changed); err != nil {
				return err
			}
			change(changed)
			return virtualNode.Status().Update(ctx, changed, client.DryRunAll)
		}
	}
	report := func(pod *corev1.Pod) func() error {
		return update(pod, func(p *corev1.Pod) { p.Status.Message = "x" })
	}
	remove := func(pod *corev1.Pod) func() error {
		return func() error { return virtualNode.Delete(ctx, pod.DeepCopy(), client.DryRunAll) }
	}
	bind := func(namespace, name, role, account string) func() error {
		return func() error {
			return agent.Create(ctx, roleBinding(namespace, name, role, "spillway-system", account), client.DryRunAll)
		}
	}
	const label = "broker.fluidos.eu/virtual-node"
	open, unlabel := bind("default", "spillway-virtual-node", "spillway-virtual-node-namespace", "spillway-virtual-node"), `{"metadata":{"labels":{"`+label+`":null}}}`
	user := &corev1.Namespace{ObjectMeta: named("default")}
	eventuallyForbidden(t, "opening a namespace without its label", open)
	expect.NoError(t, agent.Patch(ctx, user.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"labels":{"`+label+`":"true"}}}`))))
	eventually(t, "opening a namespace", open)
	expect.NoError(t, admin.Create(ctx, roleBinding("default", "spillway-virtual-node", "spillway-virtual-node-namespace", namespace, "spillway-virtual-node")))
	eventually(t, "binding to a virtual node", bindOverflowed(t, as(t, config, "spillway-scheduler"), "overflowed"))
	eventually(t, "reporting a pod on a virtual node", report(podOn("", "overflowed")))
	eventually(t, "deleting a pod on a virtual node", remove(podOn("", "overflowed")))

	const limits, nodes, reports, deletions, labels = "spillway-agent-limits", "spillway-virtual-node-limits", "spillway-virtual-node-reports", "spillway-pod-deletions", "spillway-virtual-node-namespaces"
	var guards []guard
	for _, name := range []string{limits, nodes, reports, deletions, labels} {
		guards = append(guards, policyGuard(t, admin, name))
	}
	guards = append(guards, permissionGuard(t, admin, rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: "spillway-virtual-node"}))
	runAttacks(t, guards, append(attacksOnGuestNamespaces(t, admin, agent), []attack{
		{"reporting a pod of a real node", report(podOn("", "local")), []string{reports}, "only change pods on virtual nodes"},
		{"reporting a pod of a real node with the name of a virtual one", report(podOn("", "second")), []string{reports}, "only change pods on virtual nodes"},
		{"reporting a pod there that may overflow", report(podOn("", "third")), []string{reports}, "only change pods on virtual nodes"},
		{"reporting a pod that has no node", report(podOn("", "pending")), []string{reports}, "only change pods on virtual nodes"},
		{"reporting a pod of a namespace that is not open", report(closed), []string{"RBAC"}, "cannot update resource"},
		{"changing a label with a report", update(podOn("", "overflowed"), func(p *corev1.Pod) {
			p.Labels = map[string]string{"broker.fluidos.eu/hold": "x"}
		}), []string{reports}, "may not change labels"},
		{"deleting a pod of a real node", remove(podOn("", "local")), []string{deletions}, "only change pods on virtual nodes"},
		{"deleting a pod of a real node with the name of a virtual one", remove(podOn("", "second")), []string{deletions}, "only change pods on virtual nodes"},
		{"deleting a pod there that may overflow", remove(podOn("", "third")), []string{deletions}, "only change pods on virtual nodes"},
		{"deleting a pod of a namespace that is not open", remove(closed), []string{"RBAC", deletions}, "cannot delete resource"},
		{"changing a real node", merge(virtualNode, &corev1.Node{ObjectMeta: named("worker")}, `{"spec":{"unschedulable":true}}`), []string{nodes}, "only change virtual nodes"},
		{"renewing the Lease of a real node", merge(virtualNode, kubelet, `{"spec":{"holderIdentity":"x"}}`), []string{nodes}, "only change the Leases of virtual nodes"},
		{"changing the Lease of another program", merge(virtualNode, foreign, `{"spec":{"holderIdentity":"x"}}`), []string{"RBAC"}, "cannot patch resource"},
		{"opening a namespace without its label", bind("shop", "spillway-virtual-node", "spillway-virtual-node-namespace", "spillway-virtual-node"), []string{limits}, "may only bind its roles"},
		{"removing the label of an open namespace", merge(agent, user, unlabel), []string{labels}, "may not be removed while"},
		{"removing it by hand", merge(admin, user, unlabel), []string{labels}, "may not be removed while"},
	}...))
}
