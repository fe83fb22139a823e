package charts_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
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
	config                                         *rest.Config
	admin, agent, scheduler, virtualNode, consumer client.Client
	quota                                          *corev1.ResourceQuota
}

// With driver direct the chart limits the agent, virtual-node and consumers to what
// each needs.
func TestDirectOnARealAPIServer(t *testing.T) {
	config := controlplane.Start(t)
	f := &directFixture{
		config: config, admin: as(t, config, ""), agent: as(t, config, "spillway-agent"),
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
	eventually(t, "binding to a virtual node by the scheduler", bindPod(t, f.scheduler, "overflowed", "spillway-paris"))

	t.Run("agent", f.testAgent)
	t.Run("virtual-node", f.testVirtualNode)
	f.startConsumer(t)
	t.Run("consumer", f.testConsumer)
	t.Run("the cluster's default priority class is admitted", f.testDefaultPriority)
	t.Run("deletion takes effect at once", f.testDeletion)
	t.Run("uninstalling removes everything", func(t *testing.T) { uninstall(t, f.admin, "agent", access, withDirect) })
}

func (f *directFixture) testAgent(t *testing.T) {
	ctx, agent := t.Context(), f.agent
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
		{"opening a namespace to virtual-node", func() error {
			return agent.Create(ctx, roleBinding("shop", "spillway-virtual-node", "spillway-virtual-node-namespace", namespace, "spillway-virtual-node"))
		}, true},
		{"opening a namespace to another account", func() error {
			return agent.Create(ctx, roleBinding("default", "spillway-virtual-node", "spillway-virtual-node-namespace", namespace, "spillway-agent"))
		}, false},
		{"opening its own namespace to virtual-node", func() error {
			return agent.Create(ctx, roleBinding(namespace, "spillway-virtual-node", "spillway-virtual-node-namespace", namespace, "spillway-virtual-node"))
		}, false},
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
				"app.kubernetes.io/managed-by": "spillway", "broker.fluidos.eu/guests-of": "rome", "pod-security.kubernetes.io/enforce": "baseline",
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
		{"creating a NetworkPolicy", func() error {
			return agent.Create(ctx, &networkingv1.NetworkPolicy{ObjectMeta: within(guests, "spillway-deny")})
		}, true},
		{"creating the consumer's ServiceAccount", func() error {
			return agent.Create(ctx, &corev1.ServiceAccount{ObjectMeta: within(guests, "spillway-virtual-node")})
		}, true},
		{"binding the consumer's role", func() error {
			return agent.Create(ctx, roleBinding(guests, "spillway-virtual-node", "spillway-direct-guest", guests, "spillway-virtual-node"))
		}, true},
		{"reading a guest's Secret", readSecret(t, agent, guests, "private"), false},
		{"creating a token in another namespace", func() error {
			return agent.SubResource("token").Create(ctx, &corev1.ServiceAccount{ObjectMeta: within(namespace, "spillway-virtual-node")}, &authenticationv1.TokenRequest{})
		}, false},
	})
}

func (f *directFixture) testVirtualNode(t *testing.T) {
	ctx, virtualNode := t.Context(), f.virtualNode
	lease := func(namespace, name string) *coordinationv1.Lease {
		return &coordinationv1.Lease{ObjectMeta: within(namespace, name)}
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
		{"reading a Secret of another namespace", readSecret(t, virtualNode, "default", "private"), false},
		{"creating a virtual node", func() error { return virtualNode.Create(ctx, &corev1.Node{ObjectMeta: named("spillway-berlin")}) }, true},
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

// startConsumer makes f.consumer use a token as the agent issues it, and creates what
// the controllers of a real cluster create in the namespace of guests.
func (f *directFixture) startConsumer(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	request := &authenticationv1.TokenRequest{}
	eventually(t, "a token for the consumer", func() error {
		return f.agent.SubResource("token").Create(ctx, &corev1.ServiceAccount{ObjectMeta: within(guests, "spillway-virtual-node")}, request)
	})
	var err error
	f.consumer, err = client.New(&rest.Config{
		Host: f.config.Host, BearerToken: request.Status.Token, TLSClientConfig: rest.TLSClientConfig{CAData: f.config.CAData},
	}, client.Options{Scheme: scheme.Scheme})
	expect.NoError(t, err)
	expect.NoError(t, f.admin.Create(ctx, &corev1.ServiceAccount{ObjectMeta: within(guests, "default")}))
	expect.NoError(t, f.admin.Get(ctx, client.ObjectKeyFromObject(f.quota), f.quota))
	f.quota.Status = corev1.ResourceQuotaStatus{Hard: f.quota.Spec.Hard, Used: corev1.ResourceList{}}
	for name := range f.quota.Spec.Hard {
		f.quota.Status.Used[name] = resource.MustParse("0")
	}
	expect.NoError(t, f.admin.Status().Update(ctx, f.quota))
	expect.NoError(t, f.admin.Create(ctx, &schedulingv1.PriorityClass{ObjectMeta: named("precious"), Value: 1000}))
	eventually(t, "an ordinary guest", f.guest(t, ordinary))
	eventuallyForbidden(t, "a guest with a priority class", f.guest(t, func(p *corev1.Pod) { p.Spec.PriorityClassName = "precious" }))
}

// guest returns a request by which the consumer creates a guest.
func (f *directFixture) guest(t *testing.T, change func(*corev1.Pod)) func() error {
	return func() error {
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: guests, GenerateName: "guest-"},
			Spec: corev1.PodSpec{
				AutomountServiceAccountToken: ptr.To(false),
				Containers: []corev1.Container{{Name: "c", Image: "pause", Resources: corev1.ResourceRequirements{
					Requests: expect.Resources("cpu", "100m", "memory", "0", "ephemeral-storage", "0"),
				}}},
			},
		}
		change(pod)
		return f.consumer.Create(t.Context(), pod)
	}
}

func ordinary(*corev1.Pod) {}

func requests(name corev1.ResourceName, amount string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		r := &p.Spec.Containers[0].Resources
		r.Requests[name] = resource.MustParse(amount)
		if strings.Contains(string(name), "/") {
			r.Limits = corev1.ResourceList{name: resource.MustParse(amount)}
		}
	}
}

func tolerates(toleration corev1.Toleration) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Spec.Tolerations = append(p.Spec.Tolerations, toleration) }
}

func mounts(source corev1.VolumeSource) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: source}} }
}

func projects(p *corev1.Pod) {
	p.Spec.ServiceAccountName = "default" // as the ServiceAccount admission plugin sets it
	mounts(corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{{
		ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "token"},
	}}}})(p)
}

func (f *directFixture) testConsumer(t *testing.T) {
	ctx := t.Context()
	runSteps(t, []step{
		{"requesting a granted resource", f.guest(t, requests("example.com/fpga", "1")), true},
		{"requesting more than is granted", f.guest(t, requests("cpu", "3")), false},
		{"requesting another resource", f.guest(t, requests("nvidia.com/gpu", "1")), false},
		{"requesting storage that is not granted", f.guest(t, requests("ephemeral-storage", "1Mi")), false},
		{"requesting nothing", f.guest(t, func(p *corev1.Pod) { p.Spec.Containers[0].Resources = corev1.ResourceRequirements{} }), false},
		{"choosing a node", f.guest(t, func(p *corev1.Pod) { p.Spec.NodeName = "worker" }), false},
		{"using a system priority class", f.guest(t, func(p *corev1.Pod) { p.Spec.PriorityClassName = "system-node-critical" }), false},
		{"tolerating a GPU node", f.guest(t, tolerates(corev1.Toleration{Key: "nvidia.com/gpu", Operator: corev1.TolerationOpExists})), true},
		{"tolerating all taints", f.guest(t, tolerates(corev1.Toleration{Operator: corev1.TolerationOpExists})), false},
		{"tolerating virtual nodes", f.guest(t, tolerates(corev1.Toleration{Key: "broker.fluidos.eu/overflow", Operator: corev1.TolerationOpExists})), false},
		{"tolerating the control plane", f.guest(t, tolerates(corev1.Toleration{Key: "node-role.kubernetes.io/control-plane", Operator: corev1.TolerationOpExists})), false},
		{"adding a toleration of virtual nodes", func() error {
			var pods corev1.PodList
			if err := f.consumer.List(ctx, &pods, client.InNamespace(guests)); err != nil || len(pods.Items) == 0 {
				return errors.Join(err, errors.New("there is no guest"))
			}
			pod := pods.Items[0].DeepCopy()
			pod.Spec.Tolerations = append(pod.Spec.Tolerations, corev1.Toleration{Key: "broker.fluidos.eu/overflow", Operator: corev1.TolerationOpExists})
			return f.consumer.Patch(ctx, pod, client.MergeFrom(&pods.Items[0]))
		}, false},
		{"mounting a token", f.guest(t, func(p *corev1.Pod) { p.Spec.AutomountServiceAccountToken = nil }), false},
		{"projecting a token", f.guest(t, projects), false},
		{"using another ServiceAccount", f.guest(t, func(p *corev1.Pod) { p.Spec.ServiceAccountName = "spillway-virtual-node" }), false},
		{"mounting a ConfigMap", f.guest(t, mounts(corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "x"}}})), true},
		{"mounting a directory of its node", f.guest(t, mounts(corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/"}})), false},
		{"mounting a PersistentVolumeClaim", f.guest(t, mounts(corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "x"}})), false},
		{"running privileged", f.guest(t, func(p *corev1.Pod) {
			p.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{Privileged: ptr.To(true)}
		}), false},
		{"creating a ConfigMap", func() error { return f.consumer.Create(ctx, &corev1.ConfigMap{ObjectMeta: within(guests, "x")}) }, true},
		{"creating a Secret", func() error { return f.consumer.Create(ctx, &corev1.Secret{ObjectMeta: within(guests, "x")}) }, true},
		{"changing its quota", func() error { return f.consumer.Update(ctx, f.quota.DeepCopy()) }, false},
		{"deleting the NetworkPolicy", func() error {
			return f.consumer.Delete(ctx, &networkingv1.NetworkPolicy{ObjectMeta: within(guests, "spillway-deny")})
		}, false},
		{"creating a Service", func() error { return f.consumer.Create(ctx, &corev1.Service{ObjectMeta: within(guests, "x")}) }, false},
		{"listing pods of another namespace", func() error { return f.consumer.List(ctx, &corev1.PodList{}, client.InNamespace("default")) }, false},
		{"listing nodes", func() error { return f.consumer.List(ctx, &corev1.NodeList{}) }, false},
	})
}

func (f *directFixture) testDefaultPriority(t *testing.T) {
	ctx := t.Context()
	expect.NoError(t, f.admin.Create(ctx, &schedulingv1.PriorityClass{ObjectMeta: named("usual"), Value: 10, GlobalDefault: true}))
	eventually(t, "a guest with the default priority class", func() error {
		if err := f.guest(t, ordinary)(); err != nil {
			return err
		}
		var pods corev1.PodList
		if err := f.admin.List(ctx, &pods, client.InNamespace(guests)); err != nil {
			return err
		}
		if !slices.ContainsFunc(pods.Items, func(p corev1.Pod) bool { return p.Spec.PriorityClassName == "usual" }) {
			return errors.New("no guest has the default priority class yet")
		}
		return f.admin.DeleteAllOf(ctx, &corev1.Pod{}, client.InNamespace(guests), client.GracePeriodSeconds(0))
	})
}

func (f *directFixture) testDeletion(t *testing.T) {
	ctx := t.Context()
	expect.NoError(t, f.agent.Delete(ctx, roleBinding(guests, "spillway-virtual-node", "", "", "")))
	eventuallyForbidden(t, "a guest without a RoleBinding", f.guest(t, ordinary))
	expect.NoError(t, f.agent.Delete(ctx, &corev1.ServiceAccount{ObjectMeta: within(guests, "spillway-virtual-node")}))
	expect.NoError(t, f.agent.Delete(ctx, &corev1.Namespace{ObjectMeta: named(guests)}))
	expect.NoError(t, f.agent.Delete(ctx, roleBinding("shop", "spillway-virtual-node", "", "", "")))
}
