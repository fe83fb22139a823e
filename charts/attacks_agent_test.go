package charts_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
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
	limits, evictions, realNodes := "spillway-agent-limits", "spillway-agent-evictions", "spillway-real-nodes"
	pending := podOn("", "pending")
	note := `{"metadata":{"annotations":{"broker.fluidos.eu/note":"x"}}}`
	var guards []guard
	for _, name := range []string{limits, evictions, realNodes} {
		guards = append(guards, policyGuard(t, admin, name))
	}
	runAttacks(t, guards, []attack{
		{"replacing a pod's image", patch(pending, types.JSONPatchType, `[{"op":"replace","path":"/spec/containers/0/image","value":"evil"}]`), []string{limits}, "only add tolerations and annotations"},
		{"labelling a pod", patch(pending, types.MergePatchType, `{"metadata":{"labels":{"app":"x"}}}`), []string{limits}, "only add tolerations and annotations"},
		{"adding a finalizer to a pod", patch(pending, types.MergePatchType, `{"metadata":{"finalizers":["example.com/x"]}}`), []string{limits}, "only add tolerations and annotations"},
		{"tolerating every taint", patch(pending, types.JSONPatchType, `[{"op":"add","path":"/spec/tolerations/-","value":{"operator":"Exists"}}]`), []string{limits}, "only add tolerations of virtual nodes"},
		{"annotating for another program", patch(pending, types.MergePatchType, `{"metadata":{"annotations":{"example.com/note":"x"}}}`), []string{limits}, "its own annotations"},
		{"changing a pod of kube-system", patch(system, types.MergePatchType, note), []string{limits}, "cluster's own namespaces"},
		{"evicting a pod of kube-system", evict(system), []string{limits, evictions}, "Spillway agent may"},
		{"evicting a pod of a real node without the label", evictLabelled(podOn("", "local"), nil), []string{limits}, "labels its evictions"},
		{"evicting a pod of a real node", evict(podOn("", "local")), []string{evictions}, "only evict pods on virtual nodes"},
		{"evicting a pod of a real node with the name of a virtual one", evict(podOn("", "second")), []string{evictions}, "only evict pods on virtual nodes"},
		{"deleting a pod of a real node", remove(podOn("", "local")), []string{limits}, "pods on virtual nodes"},
		{"deleting a pod of a real node with the name of a virtual one", remove(podOn("", "second")), []string{realNodes}, "is not a virtual node"},
		{"deleting a real node", remove(&corev1.Node{ObjectMeta: named("worker")}), []string{limits}, "only change virtual nodes"},
		{"deleting a real node with the name of a virtual one", remove(&corev1.Node{ObjectMeta: named("spillway-worker")}), []string{limits}, "only change virtual nodes"},
		{"deleting a namespace", remove(&corev1.Namespace{ObjectMeta: named("liqo")}), []string{limits}, "namespaces of peers"},
	})
}
