package charts_test

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// Who may update pods cannot charge them to another hold: after a restart, the scheduler
// and the agent count pods by the labels that they were bound with.
func TestHoldsOfBoundPods(t *testing.T) {
	config := controlplane.Start(t)
	admin := as(t, config, "")
	expect.NoError(t, admin.Create(t.Context(), &corev1.Namespace{ObjectMeta: named("liqo")}))
	install(t, "install", "agent", kubeconfig(t, config), needed)
	createWorkload(t, admin)
	expect.NoError(t, admin.Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: within("default", "jane"), RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "system:aggregate-to-edit"},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: "jane"}},
	}))
	jane, agent, scheduler := impersonating(t, config, "jane"), as(t, config, "spillway-agent"), as(t, config, "spillway-scheduler")

	// A pod that is created with the labels of another hold is charged to its own.
	mine := overflowedPod("mine")
	mine.Labels = map[string]string{"broker.fluidos.eu/hold": "other", "broker.fluidos.eu/shape": "other", "app": "web"}
	eventually(t, "creating a pod with a hold", func() error { return jane.Create(t.Context(), mine.DeepCopy()) })
	binding := &corev1.Binding{Target: corev1.ObjectReference{Kind: "Node", Name: "spillway-paris"}}
	binding.Labels = map[string]string{"broker.fluidos.eu/hold": "rome-1", "broker.fluidos.eu/shape": "0123456789abcdef"}
	eventually(t, "binding it", func() error {
		return scheduler.SubResource("binding").Create(t.Context(), podOn("", "mine"), binding.DeepCopy())
	})
	bound := podOn("", "mine")
	expect.NoError(t, admin.Get(t.Context(), client.ObjectKeyFromObject(bound), bound))
	if got := fmt.Sprint(bound.Labels); got != "map[app:web broker.fluidos.eu/hold:rome-1 broker.fluidos.eu/shape:0123456789abcdef]" {
		t.Errorf("the pod that was bound has labels %s", got)
	}
	unlabelled := overflowedPod("unlabelled")
	expect.NoError(t, admin.Create(t.Context(), unlabelled))
	eventually(t, "binding without labels", bindPod(t, scheduler, "unlabelled", "spillway-paris"))

	update := func(c client.Client, pod, labels string) func() error {
		return func() error {
			patch := client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"labels":%s}}`, labels))
			return c.Patch(t.Context(), podOn("", pod), patch, client.DryRunAll)
		}
	}
	replace := func() error {
		replaced := bound.DeepCopy()
		replaced.Labels = map[string]string{"app": "web"}
		return jane.Update(t.Context(), replaced, client.DryRunAll)
	}
	guards, want := []string{"spillway-holds"}, "labels broker.fluidos.eu/hold and broker.fluidos.eu/shape"
	t.Run("attacks", func(t *testing.T) {
		attacks := []attack{
			{"changing the hold", update(jane, "mine", `{"broker.fluidos.eu/hold":"rome-2"}`), guards, want},
			{"removing the hold", update(jane, "mine", `{"broker.fluidos.eu/hold":null}`), guards, want},
			{"emptying the hold", update(jane, "mine", `{"broker.fluidos.eu/hold":""}`), guards, want},
			{"changing the shape", update(jane, "mine", `{"broker.fluidos.eu/shape":"fedcba9876543210"}`), guards, want},
			{"removing the shape", update(jane, "mine", `{"broker.fluidos.eu/shape":null}`), guards, want},
			{"adding a hold", update(jane, "unlabelled", `{"broker.fluidos.eu/hold":"rome-1"}`), guards, want},
			{"adding an empty shape", update(jane, "unlabelled", `{"broker.fluidos.eu/shape":""}`), guards, want},
			{"replacing the pod without them", replace, guards, want},
			{"changing the hold as administrator", update(admin, "mine", `{"broker.fluidos.eu/hold":"rome-2"}`), guards, want},
			{"changing the hold as scheduler", update(scheduler, "mine", `{"broker.fluidos.eu/hold":"rome-2"}`), []string{"RBAC", "spillway-holds"}, "forbidden"},
		}
		runSteps(t, []step{
			{"changing another label of it", update(jane, "mine", `{"app":"shop"}`), true},
			{"annotating it by the agent", func() error {
				return agent.Patch(t.Context(), podOn("", "mine"), client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"annotations":{"broker.fluidos.eu/note":"x"}}}`)), client.DryRunAll)
			}, true},
			{"labelling a pod that is not bound", update(jane, "pending", `{"broker.fluidos.eu/hold":"rome-1"}`), true},
			{"labelling a pod of a real node", update(jane, "local", `{"broker.fluidos.eu/hold":"rome-1"}`), true},
		})
		scheduler := rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: "spillway-scheduler"}
		runAttacks(t, []guard{permissionGuard(t, admin, scheduler), policyGuard(t, admin, "spillway-holds")}, attacks)
	})
}
