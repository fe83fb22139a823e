package charts_test

import (
	"slices"
	"testing"
	"time"

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
	foreign := &coordinationv1.Lease{ObjectMeta: within("kube-system", "foreign")}
	closed := podOn("worker", "local")
	closed.Namespace = "shop"
	for _, object := range []client.Object{
		&corev1.Namespace{ObjectMeta: named("shop")}, &corev1.ServiceAccount{ObjectMeta: within("shop", "default")}, closed,
		// As the agent makes it.
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: guests, Labels: map[string]string{"app.kubernetes.io/managed-by": "spillway", "broker.fluidos.eu/guests-of": "rome"}}},
		foreign,
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

	leases := nodeLeases{t, admin, virtualNode}
	leases.allowed()
	const limits, own, removals, labels = "spillway-agent-limits", "spillway-virtual-node-limits", "spillway-pod-removals", "spillway-virtual-node-namespaces"
	var guards []guard
	for _, name := range []string{limits, own, removals, labels} {
		guards = append(guards, policyGuard(t, admin, name))
	}
	guards = append(guards, permissionGuard(t, admin, rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: "spillway-virtual-node"}))
	runAttacks(t, guards, slices.Concat(attacksOnGuestNamespaces(t, admin, agent), leases.attacks(), []attack{
		{"reporting a pod of a real node", report(podOn("", "local")), []string{own}, "only change pods on virtual nodes"},
		{"reporting a pod of a real node with the name of a virtual one", report(podOn("", "second")), []string{own}, "only change pods on virtual nodes"},
		{"reporting a pod there that may overflow", report(podOn("", "third")), []string{own}, "only change pods on virtual nodes"},
		{"reporting a pod that has no node", report(podOn("", "pending")), []string{own}, "only change pods on virtual nodes"},
		{"reporting a pod of a namespace that is not open", report(closed), []string{"RBAC"}, "cannot update resource"},
		{"changing a label with a report", update(podOn("", "overflowed"), func(p *corev1.Pod) {
			p.Labels = map[string]string{"broker.fluidos.eu/hold": "x"}
		}), []string{own}, "may not change labels"},
		{"deleting a pod of a real node", remove(podOn("", "local")), []string{removals}, "only change pods on virtual nodes"},
		{"deleting a pod of a real node with the name of a virtual one", remove(podOn("", "second")), []string{removals}, "only change pods on virtual nodes"},
		{"deleting a pod there that may overflow", remove(podOn("", "third")), []string{removals}, "only change pods on virtual nodes"},
		{"deleting a pod of a namespace that is not open", remove(closed), []string{"RBAC", removals}, "cannot delete resource"},
		{"changing a real node", merge(virtualNode, &corev1.Node{ObjectMeta: named("worker")}, `{"spec":{"unschedulable":true}}`), []string{own}, "only change virtual nodes"},
		{"changing the Lease of another program", merge(virtualNode, foreign, `{"spec":{"holderIdentity":"x"}}`), []string{"RBAC"}, "cannot patch resource"},
		{"opening a namespace without its label", bind("shop", "spillway-virtual-node", "spillway-virtual-node-namespace", "spillway-virtual-node"), []string{limits}, "may only bind its roles"},
		{"removing the label of an open namespace", merge(agent, user, unlabel), []string{labels}, "may not be removed while"},
		{"removing it by hand", merge(admin, user, unlabel), []string{labels}, "may not be removed while"},
	}))
}

// nodeLeases are those of nodes: worker and spillway-worker are real ones.
type nodeLeases struct {
	t                  *testing.T
	admin, virtualNode client.Client
}

func (l nodeLeases) update(name string, change func(*coordinationv1.Lease)) func() error {
	return func() error {
		lease := &coordinationv1.Lease{ObjectMeta: within("kube-node-lease", name)}
		if err := l.virtualNode.Get(l.t.Context(), client.ObjectKeyFromObject(lease), lease); err != nil {
			return err
		}
		lease.Spec.RenewTime = &metav1.MicroTime{Time: time.Now()}
		change(lease)
		return l.virtualNode.Update(l.t.Context(), lease, client.DryRunAll)
	}
}

func (l nodeLeases) renew(name string) func() error {
	return l.update(name, func(*coordinationv1.Lease) {})
}

func (l nodeLeases) create(name string, labels map[string]string) func() error {
	return func() error {
		lease := &coordinationv1.Lease{ObjectMeta: within("kube-node-lease", name)}
		lease.Labels = labels
		return l.virtualNode.Create(l.t.Context(), lease, client.DryRunAll)
	}
}

func (l nodeLeases) delete(name string) func() error {
	return func() error {
		return l.virtualNode.Delete(l.t.Context(), &coordinationv1.Lease{ObjectMeta: within("kube-node-lease", name)}, client.DryRunAll)
	}
}

// providerLabel is that of the Lease of a virtual node, and newLease are those of one that
// virtual-node has not renewed yet.
func providerLabel(provider string) map[string]string {
	return map[string]string{"broker.fluidos.eu/provider": provider}
}

func newLease(provider string) map[string]string {
	return map[string]string{"broker.fluidos.eu/provider": provider, "broker.fluidos.eu/new-lease": "true"}
}

// allowed creates the Leases, and renews those of virtual nodes.
func (l nodeLeases) allowed() {
	ctx := l.t.Context()
	for _, node := range []*corev1.Node{virtual("spillway-oslo", "oslo"), {ObjectMeta: named("spillway-new")}} {
		expect.NoError(l.t, l.admin.Create(ctx, node))
	}
	// That of spillway-oslo is as a former virtual-node made it.
	for _, node := range []string{"worker", "spillway-worker", "spillway-oslo"} {
		expect.NoError(l.t, l.admin.Create(ctx, &coordinationv1.Lease{ObjectMeta: within("kube-node-lease", node)}))
	}
	lease := &coordinationv1.Lease{ObjectMeta: within("kube-node-lease", "spillway-paris")}
	lease.Labels = newLease("paris")
	eventually(l.t, "creating the Lease of a virtual node", func() error { return l.virtualNode.Create(ctx, lease) })
	eventually(l.t, "its first renewal", l.update("spillway-paris", func(l *coordinationv1.Lease) { l.Labels = providerLabel("paris") }))
	eventually(l.t, "labelling one from before", l.update("spillway-oslo", func(l *coordinationv1.Lease) { l.Labels = newLease("oslo") }))
	lease.Labels = providerLabel("paris")
	expect.NoError(l.t, l.admin.Update(ctx, lease))
	eventually(l.t, "another renewal", l.renew("spillway-paris"))
}

func (l nodeLeases) attacks() []attack {
	label := func(labels map[string]string) func(*coordinationv1.Lease) {
		return func(l *coordinationv1.Lease) { l.Labels = labels }
	}
	const limits, only, isReal = "spillway-virtual-node-limits", "only change the Leases of virtual nodes", "is a real node"
	return []attack{
		{"renewing the Lease of a real node", l.renew("worker"), []string{limits}, only},
		{"renewing the Lease of a real node with the name of a virtual one", l.renew("spillway-worker"), []string{limits}, only},
		{"labelling that as a virtual node's", l.update("spillway-worker", label(providerLabel("worker"))), []string{limits}, only},
		{"labelling that as a virtual node's from before", l.update("spillway-worker", label(newLease("worker"))), []string{limits}, isReal},
		{"the Lease of a real node that has none yet", l.create("spillway-new", newLease("new")), []string{limits}, isReal},
		{"the Lease of a virtual node without a label", l.create("spillway-bergen", nil), []string{limits}, only},
		{"the Lease of a virtual node with the label of another", l.create("spillway-bergen", newLease("paris")), []string{limits}, only},
		{"deleting the Lease of a real node with the name of a virtual one", l.delete("spillway-worker"), []string{"RBAC", limits}, "cannot delete resource"},
	}
}
