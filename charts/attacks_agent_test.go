package charts_test

import (
	"fmt"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// An agent that somebody else controls changes no more of the cluster than it has to: its
// roles, which cannot go by name or field, would allow each of these requests.
func TestAttacksByTheAgent(t *testing.T) {
	config := controlplane.Start(t)
	admin, agent := as(t, config, ""), as(t, config, "spillway-agent")
	expect.NoError(t, admin.Create(t.Context(), &corev1.Namespace{ObjectMeta: named("liqo")}))
	install(t, "install", "agent", kubeconfig(t, config), needed)
	createWorkload(t, admin)
	// As a pod of a DaemonSet, on a real node with the name of a virtual one.
	eventually(t, "binding to a real node", bindPod(t, admin, "second", "spillway-worker"))
	eventually(t, "binding another one there", bindPod(t, admin, "third", "spillway-worker"))

	for _, object := range []client.Object{
		&corev1.Service{ObjectMeta: within("default", "kubernetes")}, &discoveryv1.EndpointSlice{ObjectMeta: within("default", "kubernetes")},
		&corev1.ConfigMap{ObjectMeta: within("kube-public", "cluster-info")},
	} {
		eventually(t, fmt.Sprintf("looking for the API server's endpoint in a %T", object), func() error {
			return client.IgnoreNotFound(agent.Get(t.Context(), client.ObjectKeyFromObject(object), object))
		})
	}

	system := podOn("", "system")
	system.Namespace = "kube-system"
	patch := func(pod *corev1.Pod, kind types.PatchType, text string) func() error {
		return func() error {
			return agent.Patch(t.Context(), pod.DeepCopy(), client.RawPatch(kind, []byte(text)), client.DryRunAll)
		}
	}
	evictLabelled := func(pod *corev1.Pod, labels map[string]string) func() error {
		return func() error {
			return agent.SubResource("eviction").Create(t.Context(), pod.DeepCopy(), &policyv1.Eviction{
				ObjectMeta: metav1.ObjectMeta{Labels: labels}, DeleteOptions: &metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}},
			})
		}
	}
	evict := func(pod *corev1.Pod) func() error {
		return evictLabelled(pod, map[string]string{"app.kubernetes.io/managed-by": "spillway"})
	}
	remove := func(object client.Object) func() error {
		return func() error {
			return agent.Delete(t.Context(), object.DeepCopyObject().(client.Object), client.DryRunAll)
		}
	}
	daemon, daemonOfRealNode, unowned := daemonSetPod("spillway-oslo"), daemonSetPod("worker"), daemonSetPod("spillway-oslo")
	for _, pod := range []*corev1.Pod{daemon, daemonOfRealNode} {
		expect.NoError(t, admin.Create(t.Context(), pod))
	}
	unowned.Name, unowned.OwnerReferences = "unowned", nil
	expect.NoError(t, admin.Create(t.Context(), unowned))
	eventually(t, "deleting a DaemonSet's pod that waits for a virtual node", remove(daemon))
	limits, removals, pods := "spillway-agent-limits", "spillway-pod-removals", "spillway-agent-pods"
	pending := podOn("", "pending")
	note := `{"metadata":{"annotations":{"broker.fluidos.eu/note":"x"}}}`
	var guards []guard
	for _, name := range []string{limits, removals, pods, "spillway-agent-secrets"} {
		guards = append(guards, policyGuard(t, admin, name))
	}
	guards = append(guards, permissionGuard(t, admin, rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: "spillway-agent"}))
	attacks := []attack{
		{"replacing a pod's image", patch(pending, types.JSONPatchType, `[{"op":"replace","path":"/spec/containers/0/image","value":"evil"}]`), []string{pods}, "only add tolerations and annotations"},
		{"labelling a pod", patch(pending, types.MergePatchType, `{"metadata":{"labels":{"app":"x"}}}`), []string{pods}, "only add tolerations and annotations"},
		{"adding a finalizer to a pod", patch(pending, types.MergePatchType, `{"metadata":{"finalizers":["example.com/x"]}}`), []string{pods}, "only add tolerations and annotations"},
		{"tolerating every taint", patch(pending, types.JSONPatchType, `[{"op":"add","path":"/spec/tolerations/-","value":{"operator":"Exists"}}]`), []string{pods}, "only add tolerations of virtual nodes"},
		{"annotating for another program", patch(pending, types.MergePatchType, `{"metadata":{"annotations":{"example.com/note":"x"}}}`), []string{pods}, "its own annotations"},
		{"changing a pod of kube-system", patch(system, types.MergePatchType, note), []string{pods}, "cluster's own namespaces"},
		{"evicting a pod of kube-system", evict(system), []string{removals}, "Spillway agent may"},
		{"evicting a pod of a real node without the label", evictLabelled(podOn("", "local"), nil), []string{removals}, "labels its evictions"},
		{"evicting a pod of a real node", evict(podOn("", "local")), []string{removals}, "only evict pods on virtual nodes"},
		{"evicting a pod of a real node with the name of a virtual one", evict(podOn("", "second")), []string{removals}, "only evict pods on virtual nodes"},
		{"evicting a pod there that may overflow", evict(podOn("", "third")), []string{removals}, "only evict pods on virtual nodes"},
		{"deleting a pod of a real node", remove(podOn("", "local")), []string{removals}, "pods on virtual nodes"},
		{"deleting a pod of a real node with the name of a virtual one", remove(podOn("", "second")), []string{removals}, "pods on virtual nodes"},
		{"deleting a pod there that may overflow", remove(podOn("", "third")), []string{removals}, "pods on virtual nodes"},
		{"deleting a DaemonSet's pod that waits for a real node", remove(daemonOfRealNode), []string{removals}, "pods of DaemonSets that wait for these"},
		{"deleting another pod that waits for a virtual node", remove(unowned), []string{removals}, "pods of DaemonSets that wait for these"},
		{"deleting a real node", remove(&corev1.Node{ObjectMeta: named("worker")}), []string{limits}, "only delete virtual nodes"},
		{"deleting a real node with the name of a virtual one", remove(&corev1.Node{ObjectMeta: named("spillway-worker")}), []string{limits}, "only delete virtual nodes"},
		{"deleting a namespace", remove(&corev1.Namespace{ObjectMeta: named("liqo")}), []string{limits}, "namespaces of peers"},
	}
	runAttacks(t, guards, slices.Concat(attacks, attacksInNamespaces(t, admin, agent)))
}

// attacksInNamespaces are those on rights that the agent has in namespaces of guests and peers
// only: beyond them, and to have them elsewhere.
func attacksInNamespaces(t *testing.T, admin, agent client.Client) []attack {
	ctx := t.Context()
	labels := map[string]string{"liqo.io/remote-cluster-id": "oslo"}
	guest := podOn("", "guest")
	guest.Namespace = "shop-oslo"
	for _, object := range []client.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop-oslo", Labels: labels}},
		// As liqoctl makes it, for a peering by hand.
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "liqo-tenant-oslo", Labels: map[string]string{"liqo.io/remote-cluster-id": "oslo", "liqo.io/tenant-namespace": "true"}}},
		// As an administrator could make it.
		&corev1.Namespace{ObjectMeta: named("spillway-trial-oslo")},
		&corev1.ServiceAccount{ObjectMeta: within("shop-oslo", "default")}, guest,
		roleBinding("shop-oslo", "spillway-agent", "spillway-agent-guests", namespace, "spillway-agent"),
		&corev1.Secret{ObjectMeta: within("shop-oslo", "private")}, &corev1.Secret{ObjectMeta: within("kube-system", "private")},
		roleBinding("shop-oslo", "spillway-agent-reflection", "spillway-agent-namespace", namespace, "spillway-agent"),
	} {
		expect.NoError(t, admin.Create(ctx, object))
	}
	status := func(pod *corev1.Pod, fields string) func() error {
		return func() error {
			patch := client.RawPatch(types.MergePatchType, []byte(`{"status":`+fields+`}`))
			return agent.Status().Patch(ctx, pod.DeepCopy(), patch, client.DryRunAll)
		}
	}
	create := func(namespace string, options ...client.CreateOption) func() error {
		return func() error {
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, GenerateName: "p-"}, Spec: guestSpec()}
			return agent.Create(ctx, pod, options...)
		}
	}
	bind := func(namespace, role, account string) func() error {
		return func() error {
			return agent.Create(ctx, roleBinding(namespace, "x", role, "spillway-system", account), client.DryRunAll)
		}
	}
	merge := func(object client.Object, text string) func() error {
		return func() error {
			return agent.Patch(ctx, object.DeepCopyObject().(client.Object), client.RawPatch(types.MergePatchType, []byte(text)), client.DryRunAll)
		}
	}
	eventually(t, "nominating a guest", status(guest, `{"nominatedNodeName":"worker"}`))
	conditions := func(others string) func() error {
		return status(guest, `{"conditions":[{"type":"broker.fluidos.eu/MustLeave","status":"True"},`+others+`]}`)
	}
	const scheduled, notReady = `{"type":"PodScheduled","status":"True"}`, `{"type":"Ready","status":"False","lastTransitionTime":"2026-01-01T00:00:00Z"}`
	expect.NoError(t, admin.Status().Patch(ctx, guest.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(`{"status":{"conditions":[`+scheduled+`,`+notReady+`]}}`))))
	eventually(t, "marking a guest that must leave", conditions(scheduled+`,`+notReady))
	eventually(t, "trying a guest", create("shop-oslo", client.DryRunAll))
	const limits, pods, secrets, bindOnly = "spillway-agent-limits", "spillway-agent-pods", "spillway-agent-secrets", "may only bind its roles"
	own := ownNamespaces{t, admin, agent}
	own.allowed()
	return append(own.attacks(), []attack{
		{"nominating a pod of this cluster", status(podOn("", "pending"), `{"nominatedNodeName":"worker"}`), []string{"RBAC"}, "cannot patch resource"},
		{"changing a guest's phase", status(guest, `{"phase":"Failed"}`), []string{pods}, "only nominate a pod"},
		{"making a guest Ready", conditions(scheduled + `,{"type":"Ready","status":"True","lastTransitionTime":"2026-01-01T00:00:00Z"}`), []string{pods}, "only change condition"},
		{"adding a condition to a guest", conditions(scheduled + `,` + notReady + `,{"type":"DisruptionTarget","status":"True"}`), []string{pods}, "only change condition"},
		{"removing a condition of a guest", conditions(scheduled), []string{pods}, "only change condition"},
		{"replacing a condition of a guest by another one twice", conditions(scheduled + `,` + scheduled), []string{pods}, "only change condition"},
		{"changing since when a guest is not Ready", conditions(scheduled + `,{"type":"Ready","status":"False","lastTransitionTime":"2026-02-01T00:00:00Z"}`), []string{pods}, "only change condition"},
		{"marking a pod of this cluster", status(podOn("", "pending"), `{"conditions":[{"type":"broker.fluidos.eu/MustLeave","status":"True"}]}`), []string{"RBAC"}, "cannot patch resource"},
		{"labelling a guest with its status", func() error {
			return agent.Status().Patch(ctx, guest.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"labels":{"x":"y"}}}`)), client.DryRunAll)
		}, []string{pods}, "only nominate a pod"},
		{"trying a pod among those of this cluster", create("default", client.DryRunAll), []string{"RBAC"}, "cannot create resource"},
		{"creating a guest", create("shop-oslo"), []string{pods}, "only create placeholders"},
		{"its role for guests in a user's namespace", bind("default", "spillway-agent-guests", "spillway-agent"), []string{limits}, bindOnly},
		{"its role for guests in a peer's namespace, whose labels it may change", bind("liqo-tenant-rome", "spillway-agent-guests", "spillway-agent"), []string{limits}, bindOnly},
		{"its role for guests to an account without limits", bind("shop-oslo", "spillway-agent-guests", "default"), []string{limits}, bindOnly},
		{"its role for peers among guests", bind("shop-oslo", "spillway-agent-tenant", "spillway-agent"), []string{limits}, bindOnly},
		{"removing the label that its limits go by", merge(&corev1.Namespace{ObjectMeta: named("shop-oslo")}, `{"metadata":{"labels":{"liqo.io/remote-cluster-id":null}}}`), []string{limits}, "may only change namespaces of peers"},
		{"changing a Secret that it may mark", merge(&corev1.Secret{ObjectMeta: within("shop-oslo", "private")}, `{"data":{"key":"eA=="}}`), []string{secrets}, "only mark a ConfigMap or Secret"},
		{"labelling it for another program", merge(&corev1.Secret{ObjectMeta: within("shop-oslo", "private")}, `{"metadata":{"labels":{"x":""}}}`), []string{secrets}, "only mark a ConfigMap or Secret"},
		{"annotating it for another program", merge(&corev1.Secret{ObjectMeta: within("shop-oslo", "private")}, `{"metadata":{"annotations":{"x":""}}}`), []string{secrets}, "only mark a ConfigMap or Secret"},
		{"changing a Secret of kube-system", merge(&corev1.Secret{ObjectMeta: within("kube-system", "private")}, `{"data":{"key":"eA=="}}`), []string{"RBAC"}, "cannot patch resource"},
	}...)
}
