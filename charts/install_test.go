package charts_test

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// Both charts can be installed, upgraded and uninstalled, and the API server limits
// the programs to what the charts permit.
func TestInstalledOnARealAPIServer(t *testing.T) {
	config := controlplane.Start(t)
	admin := as(t, config, "")
	access := kubeconfig(t, config)
	expect.NoError(t, admin.Create(t.Context(), &corev1.Namespace{ObjectMeta: named("liqo")}))
	expect.NoError(t, admin.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop-oslo", Labels: map[string]string{"liqo.io/remote-cluster-id": "oslo"}}}))
	expect.NoError(t, admin.Create(t.Context(), &corev1.Namespace{ObjectMeta: named("shop")}))
	owned := &corev1.Secret{ObjectMeta: within("shop", "private")}
	owned.Annotations = map[string]string{"example.com/own": "x"}
	expect.NoError(t, admin.Create(t.Context(), owned))
	for chart, values := range everything {
		install(t, "install", chart, access, values)
	}
	createWorkload(t, admin)
	cordon := client.RawPatch(types.MergePatchType, []byte(`{"spec":{"unschedulable":true}}`))
	agent := as(t, config, "spillway-agent")
	eventuallyForbidden(t, "deletion of a real node by the agent", func() error {
		return agent.Delete(t.Context(), &corev1.Node{ObjectMeta: named("worker")}, client.DryRunAll)
	})

	t.Run("agent", func(t *testing.T) { testLiqoAgent(t, agent, cordon) })
	t.Run("virtual nodes", func(t *testing.T) { testVirtualNodePolicies(t, admin, config) })
	t.Run("broker", func(t *testing.T) {
		broker := as(t, config, "spillway-broker")
		expect.NoError(t, admin.Create(t.Context(), &corev1.Namespace{ObjectMeta: named("spillway-cluster-oslo")}))
		eventuallyForbidden(t, "creation of a namespace that is not for a cluster", func() error {
			return broker.Create(t.Context(), &corev1.Namespace{ObjectMeta: named("other")}, client.DryRunAll)
		})
		runSteps(t, []step{
			{"creating the CA", func() error {
				return broker.Create(t.Context(), &corev1.Secret{ObjectMeta: within(namespace, "spillway-broker-ca")})
			}, true},
			{"reading the CA", readSecret(t, broker, namespace, "spillway-broker-ca"), true},
			{"reading another Secret of its namespace", readSecret(t, broker, namespace, "private"), false},
			{"listing nodes", func() error { return broker.List(t.Context(), &corev1.NodeList{}) }, false},
			{"deleting a namespace that is not for a cluster", func() error { return broker.Delete(t.Context(), &corev1.Namespace{ObjectMeta: named("shop")}) }, false},
			{"creating a ServiceAccount that is not for a cluster", func() error {
				return broker.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: within("shop", "spillway-tenant")})
			}, false},
			{"creating a token that is not for a cluster", func() error {
				account := &corev1.ServiceAccount{ObjectMeta: within("shop", "spillway-tenant")}
				return errors.Join(client.IgnoreAlreadyExists(admin.Create(t.Context(), account)), broker.SubResource("token").Create(t.Context(), account, &authenticationv1.TokenRequest{}))
			}, false},
			{"creating the namespace of a cluster", func() error {
				return broker.Create(t.Context(), &corev1.Namespace{ObjectMeta: named("spillway-cluster-rome")}, client.DryRunAll)
			}, true},
			{"giving more than it has", func() error {
				return broker.Create(t.Context(), &rbacv1.Role{ObjectMeta: within("spillway-cluster-oslo", "more"), Rules: []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"create"}}}})
			}, false},
		})
	})
	t.Run("an upgrade keeps the webhook's certificate", func(t *testing.T) {
		names := []string{"spillway-scheduler-steering", "spillway-agent-guests"}
		var before, after [2]corev1.Secret
		for i, name := range names {
			expect.NoError(t, admin.Get(t.Context(), types.NamespacedName{Namespace: namespace, Name: name}, &before[i]))
		}
		install(t, "upgrade", "agent", access, needed)
		for i, name := range names {
			expect.NoError(t, admin.Get(t.Context(), types.NamespacedName{Namespace: namespace, Name: name}, &after[i]))
			if !bytes.Equal(before[i].Data[corev1.TLSCertKey], after[i].Data[corev1.TLSCertKey]) {
				t.Errorf("the certificate %s was replaced; the API server rejects the new one until every pod has loaded it", name)
			}
		}
	})
	t.Run("uninstalling removes everything", func(t *testing.T) {
		for chart, values := range everything {
			uninstall(t, admin, chart, access, values)
		}
	})
}

func testLiqoAgent(t *testing.T, agent client.Client, cordon client.Patch) {
	ctx := t.Context()
	binding := func(namespace, role string) func() error {
		return func() error {
			return agent.Create(ctx, roleBinding(namespace, "spillway-agent", role, "spillway-system", "spillway-agent"))
		}
	}
	labelNamespace := func(name, label string) func() error {
		return func() error {
			return agent.Patch(ctx, &corev1.Namespace{ObjectMeta: named(name)}, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"labels":{"`+label+`":"true"}}}`)))
		}
	}
	reflection := func(namespace, role string) func() error {
		return func() error {
			return agent.Create(ctx, roleBinding(namespace, "spillway-agent-reflection", role, "spillway-system", "spillway-agent"))
		}
	}
	patchSecret := func(namespace, patch string) func() error {
		return func() error {
			return agent.Patch(ctx, &corev1.Secret{ObjectMeta: within(namespace, "private")}, client.RawPatch(types.MergePatchType, []byte(patch)))
		}
	}
	runSteps(t, []step{
		{"cordoning a virtual node, which is the administrator's", func() error { return agent.Patch(ctx, &corev1.Node{ObjectMeta: named("spillway-paris")}, cordon) }, false},
		{"adding a toleration to a pod", func() error {
			return agent.Patch(ctx, podOn("", "pending"), client.RawPatch(types.JSONPatchType, []byte(`[{"op":"add","path":"/spec/tolerations/-","value":{"key":"broker.fluidos.eu/overflow","operator":"Equal","value":"paris","effect":"NoSchedule"}}]`)))
		}, true},
		{"annotating a pod with its own key", func() error {
			return agent.Patch(ctx, podOn("", "pending"), client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"annotations":{"broker.fluidos.eu/note":"x"}}}`)))
		}, true},
		{"adding another toleration to a pod", func() error {
			return agent.Patch(ctx, podOn("", "pending"), client.RawPatch(types.JSONPatchType, []byte(`[{"op":"add","path":"/spec/tolerations/-","value":{"operator":"Exists"}}]`)))
		}, false},
		{"changing a pod's image", func() error {
			return agent.Patch(ctx, podOn("", "pending"), client.RawPatch(types.JSONPatchType, []byte(`[{"op":"replace","path":"/spec/containers/0/image","value":"evil"}]`)))
		}, false},
		{"annotating a pod with another key", func() error {
			return agent.Patch(ctx, podOn("", "pending"), client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"annotations":{"example.com/note":"x"}}}`)))
		}, false},
		{"labelling a pod", func() error {
			return agent.Patch(ctx, podOn("", "pending"), client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"labels":{"app":"x"}}}`)))
		}, false},
		{"changing a pod of kube-system", func() error {
			pod := podOn("", "system")
			pod.Namespace = "kube-system"
			return agent.Patch(ctx, pod, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"annotations":{"broker.fluidos.eu/note":"x"}}}`)))
		}, false},
		{"evicting a pod of kube-system", func() error {
			pod := podOn("", "system")
			pod.Namespace = "kube-system"
			return agent.SubResource("eviction").Create(ctx, pod, &policyv1.Eviction{})
		}, false},
		{"deleting a real node", func() error { return agent.Delete(ctx, &corev1.Node{ObjectMeta: named("worker")}) }, false},
		{"listing DaemonSets", func() error { return agent.List(ctx, &appsv1.DaemonSetList{}) }, false},
		{"watching its prices", func() error {
			return agent.List(ctx, &corev1.ConfigMapList{}, client.InNamespace(namespace), client.MatchingFields{"metadata.name": "prices"})
		}, true},
		{"listing other ConfigMaps", func() error { return agent.List(ctx, &corev1.ConfigMapList{}, client.InNamespace(namespace)) }, false},
		{"creating a peer's namespace", func() error {
			return agent.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "liqo-tenant-paris", Labels: tenantLabels("paris")}})
		}, true},
		{"creating another namespace", func() error { return agent.Create(ctx, &corev1.Namespace{ObjectMeta: named("mine")}) }, false},
		{"labelling a namespace of guests as limited", labelNamespace("shop-oslo", "broker.fluidos.eu/limited"), true},
		{"labelling it otherwise", labelNamespace("shop-oslo", "app.kubernetes.io/managed-by"), false},
		{"labelling a user's namespace", labelNamespace("shop", "broker.fluidos.eu/limited"), false},
		{"deleting another namespace", func() error { return agent.Delete(ctx, &corev1.Namespace{ObjectMeta: named("default")}) }, false},
		{"reading Secrets of a peer's namespace without a binding", readSecret(t, agent, "liqo-tenant-paris", "liqo-nonce"), false},
		{"binding another role", binding("liqo-tenant-paris", "cluster-admin"), false},
		{"binding its role in another namespace", binding("default", "spillway-agent-tenant"), false},
		{"binding its role for guests in a user's namespace", binding("default", "spillway-agent-guests"), false},
		{"binding its role for guests in a namespace of Liqo's guests", binding("shop-oslo", "spillway-agent-guests"), true},
		{"binding another role there", binding("shop-oslo", "spillway-agent-tenant"), false},
		{"binding its role for marking in kube-system", reflection("kube-system", "spillway-agent-namespace"), false},
		{"binding another role for marking", reflection("shop", "spillway-agent-tenant"), false},
		{"binding its role for marking in a user's namespace", reflection("shop", "spillway-agent-namespace"), true},
		{"marking a Secret there", patchSecret("shop", `{"metadata":{"annotations":{"liqo.io/allow-reflection":"true"},"labels":{"broker.fluidos.eu/reflected":"true"}}}`), true},
		{"changing a Secret there", patchSecret("shop", `{"data":{"key":"eA=="}}`), false},
		{"annotating a Secret there otherwise", patchSecret("shop", `{"metadata":{"annotations":{"example.com/note":"x"}}}`), false},
		{"removing an annotation of a Secret there", patchSecret("shop", `{"metadata":{"annotations":{"example.com/own":null}}}`), false},
		{"marking a Secret elsewhere", patchSecret("default", `{"metadata":{"annotations":{"liqo.io/allow-reflection":"true"}}}`), false},
		{"removing its binding", func() error {
			return agent.Delete(ctx, &rbacv1.RoleBinding{ObjectMeta: within("shop", "spillway-agent-reflection")}, client.DryRunAll)
		}, true},
		{"limiting the guests there", func() error {
			return agent.Create(ctx, &corev1.ResourceQuota{ObjectMeta: within("shop-oslo", "spillway-guests")})
		}, true},
		{"reading a guest's Secret", readSecret(t, agent, "shop-oslo", "private"), false},
		{"binding its role in a peer's namespace", binding("liqo-tenant-paris", "spillway-agent-tenant"), true},
		{"creating a Secret in a peer's namespace", func() error {
			return agent.Create(ctx, &corev1.Secret{ObjectMeta: within("liqo-tenant-paris", "liqo-nonce")})
		}, true},
		{"creating a ServiceAccount token", func() error {
			meta := within("liqo-tenant-paris", "token")
			meta.Annotations = map[string]string{corev1.ServiceAccountNameKey: "virtual-kubelet"}
			return agent.Create(ctx, &corev1.Secret{ObjectMeta: meta, Type: corev1.SecretTypeServiceAccountToken})
		}, false},
		{"reading a user's Secret", readSecret(t, agent, "default", "private"), false},
		{"reading another Secret of its namespace", readSecret(t, agent, namespace, "private"), false},
		{"creating its key", func() error {
			return agent.Create(ctx, &corev1.Secret{ObjectMeta: within(namespace, "spillway-agent-peer-key")})
		}, true},
		{"deleting a pod on a real node", func() error { return agent.Delete(ctx, podOn("worker", "local")) }, false},
	})
}

// testVirtualNodePolicies tests who may bind and create pods on virtual nodes.
func testVirtualNodePolicies(t *testing.T, admin client.Client, config *rest.Config) {
	ctx := t.Context()
	agent, scheduler := as(t, config, "spillway-agent"), as(t, config, "spillway-scheduler")
	config = rest.CopyConfig(config)
	config.Impersonate = rest.ImpersonationConfig{UserName: "system:kube-scheduler", Groups: []string{"system:authenticated"}}
	clusterScheduler := as(t, config, "")
	evict := func(name string) func() error {
		return func() error {
			return agent.SubResource("eviction").Create(ctx, podOn("", name), &policyv1.Eviction{
				ObjectMeta:    metav1.ObjectMeta{Labels: map[string]string{"app.kubernetes.io/managed-by": "spillway"}},
				DeleteOptions: &metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}},
			})
		}
	}
	runSteps(t, []step{
		{"binding to a real node with the name of a virtual one by another scheduler", bindPod(t, admin, "second", "spillway-worker"), true},
		{"creating a pod on a real node with the name of a virtual one", func() error { return admin.Create(ctx, podOn("spillway-worker", "pinned"), client.DryRunAll) }, true},
		{"creating a DaemonSet's pod for it", func() error { return admin.Create(ctx, daemonSetPod("spillway-worker"), client.DryRunAll) }, true},
		{"preempting a pod there", func() error { return clusterScheduler.Delete(ctx, podOn("", "second"), client.DryRunAll) }, true},
		{"deleting a pod there by the agent", func() error { return agent.Delete(ctx, podOn("", "second"), client.DryRunAll) }, false},
		{"evicting a pod there by the agent", evict("second"), false},
		{"evicting a pod of a real node by the agent", evict("local"), false},
		{"binding to a real node by another scheduler", bindPod(t, admin, "pending", "worker"), true},
		{"binding to a virtual node by another scheduler", bindPod(t, admin, "overflowed", "spillway-paris"), false},
		{"creating a pod on a virtual node", func() error { return admin.Create(ctx, podOn("spillway-paris", "pinned")) }, false},
		{"creating a DaemonSet's pod for a virtual node", func() error { return admin.Create(ctx, daemonSetPod("spillway-paris")) }, false},
		{"binding to a virtual node by the scheduler", bindOverflowed(t, scheduler, "overflowed"), true},
		{"evicting a pod of a virtual node by the agent", evict("overflowed"), true},
		{"preempting a pod on a real node by the cluster's scheduler", func() error {
			return clusterScheduler.Delete(ctx, podOn("worker", "pending"), client.DryRunAll)
		}, true},
		{"preempting a guest by the cluster's scheduler", func() error {
			return clusterScheduler.Delete(ctx, podOn("spillway-paris", "overflowed"))
		}, false},
		{"preempting a guest by Spillway's scheduler", func() error { return scheduler.Delete(ctx, podOn("spillway-paris", "overflowed")) }, false},
		{"creating a pod that tolerates everything", func() error {
			operator := podOn("", "operator")
			operator.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
			return admin.Create(ctx, operator, client.DryRunAll)
		}, true},
		{"deleting a pod on a virtual node by the agent", func() error { return agent.Delete(ctx, podOn("spillway-paris", "overflowed")) }, true},
		{"reading a user's Secret by the scheduler", readSecret(t, scheduler, "default", "private"), false},
	})
}

// The policy limits the ServiceAccount that the agent's pods use.
func TestLimitsApplyToTheAgent(t *testing.T) {
	text, err := template(t, "agent", slices.Concat(needed, []string{"scheduler.mode=none"}))
	expect.NoError(t, err)
	if !strings.Contains(text, "system:serviceaccount:"+namespace+":spillway-agent'") || !strings.Contains(text, "serviceAccountName: spillway-agent\n") {
		t.Error("the agent's pods use another ServiceAccount than the one that is limited")
	}
}
