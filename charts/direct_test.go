package charts_test

import (
	"context"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

const (
	guests          = "spillway-guests-rome"
	configNamespace = "spillway-virtual-nodes"
)

// directFixture is a cluster with the agent's chart for driver direct, and the
// clients of those that the chart limits.
type directFixture struct {
	admin, agent, scheduler, virtualNode client.Client
	quota                                *corev1.ResourceQuota
}

// With driver direct the chart limits the agent, virtual-node and consumers to what
// each needs.
func TestDirectOnARealAPIServer(t *testing.T) {
	config := controlplane.Start(t)
	f := &directFixture{
		admin: as(t, config, ""), agent: as(t, config, "spillway-agent"),
		scheduler: as(t, config, "spillway-scheduler"), virtualNode: as(t, config, "spillway-virtual-node"),
		quota: &corev1.ResourceQuota{ObjectMeta: within(guests, "spillway-guests"), Spec: corev1.ResourceQuotaSpec{Hard: expect.Resources(
			"requests.cpu", "2", "requests.memory", "1Gi", "requests.ephemeral-storage", "0", "requests.example.com/fpga", "1", "pods", "9",
		)}},
	}
	access := kubeconfig(t, config)
	install(t, "install", "agent", access, withDirect)
	createWorkload(t, f.admin)
	expect.NoError(t, f.admin.Create(t.Context(), &corev1.Namespace{ObjectMeta: named("shop")}))
	expect.NoError(t, f.admin.Create(t.Context(), &corev1.Secret{ObjectMeta: within("shop", "private")}))
	eventuallyForbidden(t, "deletion of a real node by the agent", func() error {
		return f.agent.Delete(t.Context(), &corev1.Node{ObjectMeta: named("worker")}, client.DryRunAll)
	})
	eventually(t, "binding to a virtual node by the scheduler", bindOverflowed(t, f.scheduler, "overflowed"))

	t.Run("agent", f.testAgent)
	t.Run("virtual-node", f.testVirtualNode)
	t.Run("deletion takes effect at once", f.testDeletion)
	t.Run("uninstalling removes everything", func(t *testing.T) { uninstall(t, f.admin, "agent", access, withDirect) })
}

func (f *directFixture) testAgent(t *testing.T) {
	ctx, agent := t.Context(), f.agent
	label := func(namespace, key string) func() error {
		return func() error {
			return agent.Patch(ctx, &corev1.Namespace{ObjectMeta: named(namespace)}, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"labels":{"`+key+`":"true"}}}`)))
		}
	}
	open := func(namespace string) func() error {
		return func() error {
			return agent.Create(ctx, roleBinding(namespace, "spillway-virtual-node", "spillway-virtual-node-namespace", "spillway-system", "spillway-virtual-node"))
		}
	}
	runSteps(t, []step{
		{"creating the configuration of a virtual node", func() error {
			return agent.Create(ctx, &corev1.Secret{ObjectMeta: within(configNamespace, "spillway-direct-paris")})
		}, true},
		{"listing the configurations", func() error { return agent.List(ctx, &corev1.SecretList{}, client.InNamespace(configNamespace)) }, true},
		{"listing Secrets of its namespace", func() error { return agent.List(ctx, &corev1.SecretList{}, client.InNamespace(namespace)) }, false},
		{"reading a user's Secret", readSecret(t, agent, "default", "private"), false},
		{"reading the Lease of a virtual node", func() error {
			return client.IgnoreNotFound(agent.Get(ctx, types.NamespacedName{Namespace: "kube-node-lease", Name: "spillway-paris"}, &coordinationv1.Lease{}))
		}, true},
		{"opening a namespace without its label to virtual-node", open("shop"), false},
		{"labelling a namespace otherwise", label("shop", "broker.fluidos.eu/overflow"), false},
		{"labelling a namespace for virtual-node", label("shop", "broker.fluidos.eu/virtual-node"), true},
		{"opening a namespace to virtual-node", open("shop"), true},
		{"opening a namespace to another account", func() error {
			return agent.Create(ctx, roleBinding("default", "spillway-virtual-node", "spillway-virtual-node-namespace", namespace, "spillway-agent"))
		}, false},
		{"opening its own namespace to virtual-node", open(namespace), false},
		{"labelling another", label("default", "broker.fluidos.eu/virtual-node"), true},
		{"opening another", open("default"), true},
		{"binding its role for guests in a user's namespace", func() error {
			return agent.Create(ctx, roleBinding("default", "spillway-virtual-node", "spillway-agent-guests", namespace, "spillway-agent"))
		}, false},
		{"deleting a user's binding", func() error {
			expect.NoError(t, f.admin.Create(ctx, roleBinding("default", "mine", "view", "default", "default")))
			return agent.Delete(ctx, roleBinding("default", "mine", "", "", ""))
		}, false},
		{"creating another namespace", func() error { return agent.Create(ctx, &corev1.Namespace{ObjectMeta: named("liqo-tenant-rome")}) }, false},
		{"creating a namespace for guests", func() error {
			meta := named(guests)
			meta.Labels = map[string]string{
				"app.kubernetes.io/managed-by": "spillway", "broker.fluidos.eu/guests-of": "rome", "pod-security.kubernetes.io/enforce": "restricted",
			}
			return agent.Create(ctx, &corev1.Namespace{ObjectMeta: meta})
		}, true},
		{"creating a quota without a binding", func() error { return agent.Create(ctx, f.quota.DeepCopy()) }, false},
		{"binding cluster-admin there", func() error {
			return agent.Create(ctx, roleBinding(guests, "spillway-agent", "cluster-admin", namespace, "spillway-agent"))
		}, false},
		{"binding its role there", func() error {
			return agent.Create(ctx, roleBinding(guests, "spillway-agent", "spillway-agent-guests", namespace, "spillway-agent"))
		}, true},
		{"creating a quota", func() error { return agent.Create(ctx, f.quota.DeepCopy()) }, true},
		{"creating a LimitRange", func() error {
			return agent.Create(ctx, &corev1.LimitRange{ObjectMeta: within(guests, "spillway-guests")})
		}, true},
		{"creating a NetworkPolicy", func() error {
			return agent.Create(ctx, &networkingv1.NetworkPolicy{ObjectMeta: within(guests, "spillway-deny")})
		}, true},
		{"creating the consumer's ServiceAccount", func() error {
			return agent.Create(ctx, &corev1.ServiceAccount{ObjectMeta: within(guests, "spillway-virtual-node")})
		}, true},
		{"binding the consumer's role", func() error {
			return agent.Create(ctx, roleBinding(guests, "spillway-virtual-node", "spillway-direct-guest", guests, "spillway-virtual-node"))
		}, true},
		{"creating a placeholder", func() error {
			expect.NoError(t, client.IgnoreAlreadyExists(f.admin.Create(ctx, &corev1.ServiceAccount{ObjectMeta: within("spillway-holds", "default")})))
			return agent.Create(ctx, placeholder("spillway-holds", "p"))
		}, true},
		{"creating a pod in another namespace", func() error { return agent.Create(ctx, placeholder("shop", "p")) }, false},
		{"nominating a guest to a node", func() error {
			for _, object := range []client.Object{&corev1.ServiceAccount{ObjectMeta: within(guests, "default")}, gatedGuest()} {
				if err := client.IgnoreAlreadyExists(f.admin.Create(ctx, object)); err != nil {
					return err
				}
			}
			return patch(ctx, agent.Status(), guests, `{"status":{"nominatedNodeName":"worker"}}`)
		}, true},
		{"marking a guest that must leave", func() error {
			return setConditions(ctx, agent, `{"type":"broker.fluidos.eu/MustLeave","status":"True"}`)
		}, true},
		{"changing another condition of a guest", func() error {
			return setConditions(ctx, agent, `{"type":"broker.fluidos.eu/MustLeave","status":"True"},{"type":"Ready","status":"True"}`)
		}, false},
		{"changing another part of a guest's status", func() error {
			return patch(ctx, agent.Status(), guests, `{"status":{"phase":"Failed"}}`)
		}, false},
		{"nominating a pod of this cluster", func() error {
			return agent.Status().Patch(ctx, podOn("worker", "local"), client.RawPatch(types.MergePatchType, []byte(`{"status":{"nominatedNodeName":"worker"}}`)))
		}, false},
		{"removing another's scheduling gate", func() error {
			return patch(ctx, agent, guests, `{"spec":{"schedulingGates":[{"name":"broker.fluidos.eu/hand-over"}]}}`)
		}, false},
		{"removing its scheduling gate", func() error {
			return patch(ctx, agent, guests, `{"spec":{"schedulingGates":[{"name":"example.com/other"}]}}`)
		}, true},
		{"deleting a placeholder", func() error { return agent.Delete(ctx, placeholder("spillway-holds", "p")) }, true},
		{"reading a guest's Secret", readSecret(t, agent, guests, "private"), false},
		{"creating a token in another namespace", func() error {
			return agent.SubResource("token").Create(ctx, &corev1.ServiceAccount{ObjectMeta: within(namespace, "spillway-virtual-node")}, &authenticationv1.TokenRequest{})
		}, false},
	})
}

func (f *directFixture) testVirtualNode(t *testing.T) {
	ctx, virtualNode := t.Context(), f.virtualNode
	lease := func(namespace, name string) *coordinationv1.Lease {
		lease := &coordinationv1.Lease{ObjectMeta: within(namespace, name)}
		lease.Labels = newLease("paris")
		return lease
	}
	runSteps(t, []step{
		{"listing the configurations", func() error { return virtualNode.List(ctx, &corev1.SecretList{}, client.InNamespace(configNamespace)) }, true},
		{"deleting a configuration", func() error {
			return virtualNode.Delete(ctx, &corev1.Secret{ObjectMeta: within(configNamespace, "spillway-direct-paris")})
		}, false},
		{"reading a Secret of its own namespace", readSecret(t, virtualNode, namespace, "private"), false},
		{"listing Secrets of a namespace with overflowed pods", func() error {
			return virtualNode.List(ctx, &corev1.SecretList{}, client.InNamespace("shop"))
		}, true},
		{"reading a Secret of another namespace", readSecret(t, virtualNode, "kube-system", "private"), false},
		{"creating a virtual node", func() error { return virtualNode.Create(ctx, virtual("spillway-berlin", "berlin")) }, true},
		{"creating a node without a provider", func() error { return virtualNode.Create(ctx, &corev1.Node{ObjectMeta: named("spillway-oslo")}) }, false},
		{"deleting a real node with the name of a virtual one", func() error { return virtualNode.Delete(ctx, &corev1.Node{ObjectMeta: named("spillway-worker")}) }, false},
		{"updating its status", func() error {
			node := &corev1.Node{}
			if err := virtualNode.Get(ctx, types.NamespacedName{Name: "spillway-berlin"}, node); err != nil {
				return err
			}
			node.Status.Allocatable = corev1.ResourceList{"cpu": resource.MustParse("1")}
			return virtualNode.Status().Update(ctx, node)
		}, true},
		{"deleting it", func() error { return virtualNode.Delete(ctx, &corev1.Node{ObjectMeta: named("spillway-berlin")}) }, true},
		{"creating a real node", func() error { return virtualNode.Create(ctx, &corev1.Node{ObjectMeta: named("mine")}) }, false},
		{"deleting a real node", func() error { return virtualNode.Delete(ctx, &corev1.Node{ObjectMeta: named("worker")}) }, false},
		{"creating the Lease of a virtual node", func() error { return virtualNode.Create(ctx, lease("kube-node-lease", "spillway-paris")) }, true},
		{"creating the Lease of a real node", func() error { return virtualNode.Create(ctx, lease("kube-node-lease", "worker")) }, false},
		{"creating the Lease for leader election", func() error { return virtualNode.Create(ctx, lease(configNamespace, "spillway-virtual-node")) }, true},
		{"updating the status of a pod on a real node", func() error {
			pod := &corev1.Pod{}
			if err := virtualNode.Get(ctx, types.NamespacedName{Namespace: "default", Name: "local"}, pod); err != nil {
				return err
			}
			pod.Status.Phase = corev1.PodFailed
			return virtualNode.Status().Update(ctx, pod)
		}, false},
		{"updating the status of a pod on a virtual node", func() error {
			pod := &corev1.Pod{}
			if err := virtualNode.Get(ctx, types.NamespacedName{Namespace: "default", Name: "overflowed"}, pod); err != nil {
				return err
			}
			pod.Status.Phase = corev1.PodRunning
			return virtualNode.Status().Update(ctx, pod)
		}, true},
		{"deleting a pod on a real node", func() error { return virtualNode.Delete(ctx, podOn("worker", "local")) }, false},
		{"deleting a pod on a virtual node", func() error { return virtualNode.Delete(ctx, podOn("spillway-paris", "overflowed")) }, true},
		{"creating a TokenReview", func() error {
			return virtualNode.Create(ctx, &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: "x"}})
		}, true},
		{"binding a role", func() error {
			return virtualNode.Create(ctx, roleBinding("default", "x", "view", "default", "default"))
		}, false},
	})
}

func (f *directFixture) testDeletion(t *testing.T) {
	ctx := t.Context()
	expect.NoError(t, f.agent.Delete(ctx, roleBinding(guests, "spillway-virtual-node", "", "", "")))
	expect.NoError(t, f.agent.Delete(ctx, &corev1.ServiceAccount{ObjectMeta: within(guests, "spillway-virtual-node")}))
	expect.NoError(t, f.agent.Delete(ctx, &corev1.Namespace{ObjectMeta: named(guests)}))
	expect.NoError(t, f.agent.Delete(ctx, roleBinding("shop", "spillway-virtual-node", "", "", "")))
}

// placeholder is a pod as the agent creates them to keep a place.
func placeholder(namespace, name string) *corev1.Pod {
	spec := guestSpec()
	spec.PriorityClassName = "spillway-hold"
	return &corev1.Pod{ObjectMeta: within(namespace, name), Spec: spec}
}

// gatedGuest waits for the agent, and for another program.
func gatedGuest() *corev1.Pod {
	guest := &corev1.Pod{ObjectMeta: within(guests, "gated"), Spec: guestSpec()}
	guest.Spec.PriorityClassName = "spillway-guest"
	guest.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "broker.fluidos.eu/hand-over"}, {Name: "example.com/other"}}
	return guest
}

// setConditions sets conditions of gatedGuest, beside those that it has.
func setConditions(ctx context.Context, c client.Client, conditions string) error {
	return c.Status().Patch(ctx, &corev1.Pod{ObjectMeta: within(guests, "gated")}, client.RawPatch(types.StrategicMergePatchType, []byte(`{"status":{"conditions":[`+conditions+`]}}`)))
}

// patch merges a patch into gatedGuest.
func patch[O any](ctx context.Context, writer interface {
	Patch(ctx context.Context, o client.Object, patch client.Patch, options ...O) error
}, namespace, patch string) error {
	return writer.Patch(ctx, &corev1.Pod{ObjectMeta: within(namespace, "gated")}, client.RawPatch(types.MergePatchType, []byte(patch)))
}
