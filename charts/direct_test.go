package charts_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/e2e/controlplane"
)

const guests = "spillway-guests-rome"

// step is something that somebody may do, or may not.
type step struct {
	what string
	do   func() error
	may  bool
}

func runSteps(t *testing.T, steps []step) {
	t.Helper()
	for _, step := range steps {
		switch err := step.do(); {
		case step.may && err != nil:
			t.Errorf("%s: %v", step.what, err)
		case !step.may && !apierrors.IsForbidden(err):
			t.Errorf("%s, and gets %v", step.what, err)
		}
	}
}

// soon repeats what counts only a moment after something else was made.
func soon(t *testing.T, do func() error) error {
	t.Helper()
	var last error
	err := wait.PollUntilContextTimeout(t.Context(), 50*time.Millisecond, 20*time.Second, true, func(context.Context) (bool, error) {
		last = do()
		return last == nil, nil
	})
	if err != nil {
		return errors.Join(err, last)
	}
	return nil
}

func roleBinding(namespace, name, role, accountNamespace, account string) *rbacv1.RoleBinding {
	return &rbacv1.RoleBinding{
		ObjectMeta: within(namespace, name),
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: accountNamespace, Name: account}},
	}
}

// With driver direct the chart holds the agent, virtual-node and consumers to
// what each has to do.
func TestDirectOnARealAPIServer(t *testing.T) {
	config := controlplane.Start(t)
	ctx := t.Context()
	admin := as(t, config, "")
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	access := "--kubeconfig=" + kubeconfig(t, config)
	_, err := helm(t, append([]string{"install", "spillway-agent", "agent", access, "--create-namespace"}, set(withDirect)...)...)
	must(err)
	for _, name := range []string{"worker", "spillway-paris"} {
		must(admin.Create(ctx, &corev1.Node{ObjectMeta: named(name)}))
	}
	must(admin.Create(ctx, &corev1.ServiceAccount{ObjectMeta: within("default", "default")}))
	must(admin.Create(ctx, podOn("worker", "home")))
	must(admin.Create(ctx, podOn("", "away")))
	must(admin.Create(ctx, &corev1.Namespace{ObjectMeta: named("shop")}))
	for _, namespace := range []string{"default", "shop", namespace} {
		must(admin.Create(ctx, &corev1.Secret{ObjectMeta: within(namespace, "private")}))
	}
	agent, scheduler, virtualNode := as(t, config, "spillway-agent"), as(t, config, "spillway-scheduler"), as(t, config, "spillway-virtual-node")
	must(soon(t, func() error {
		err := agent.Delete(ctx, &corev1.Node{ObjectMeta: named("worker")}, client.DryRunAll)
		if apierrors.IsForbidden(err) {
			return nil
		}
		return errors.Join(errors.New("the agent may delete a real node"), err)
	}))
	must(scheduler.SubResource("binding").Create(ctx, podOn("", "away"), &corev1.Binding{Target: corev1.ObjectReference{Kind: "Node", Name: "spillway-paris"}}))
	secret := func(c client.Client, namespace, name string) func() error {
		return func() error {
			return client.IgnoreNotFound(c.Get(ctx, types.NamespacedName{Namespace: namespace, Name: name}, &corev1.Secret{}))
		}
	}
	quota := &corev1.ResourceQuota{ObjectMeta: within(guests, "spillway-guests"), Spec: corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{
		"requests.cpu": resource.MustParse("2"), "requests.memory": resource.MustParse("1Gi"), "requests.ephemeral-storage": resource.MustParse("0"),
		"requests.example.com/fpga": resource.MustParse("1"), "pods": resource.MustParse("9"),
	}}}

	t.Run("agent", func(t *testing.T) {
		runSteps(t, []step{
			{"keeps a link", func() error {
				return agent.Create(ctx, &corev1.Secret{ObjectMeta: within("spillway-links", "spillway-direct-paris")})
			}, true},
			{"looks for links", func() error { return agent.List(ctx, &corev1.SecretList{}, client.InNamespace("spillway-links")) }, true},
			{"looks at Secrets beside it", func() error { return agent.List(ctx, &corev1.SecretList{}, client.InNamespace(namespace)) }, false},
			{"reads a user's Secret", secret(agent, "default", "private"), false},
			{"sees whether virtual-node lives", func() error {
				return client.IgnoreNotFound(agent.Get(ctx, types.NamespacedName{Namespace: "kube-node-lease", Name: "spillway-paris"}, &coordinationv1.Lease{}))
			}, true},
			{"opens a namespace to virtual-node", func() error {
				return agent.Create(ctx, roleBinding("shop", "spillway-virtual-node", "spillway-virtual-node-namespace", namespace, "spillway-virtual-node"))
			}, true},
			{"opens it to somebody else", func() error {
				return agent.Create(ctx, roleBinding("default", "spillway-virtual-node", "spillway-virtual-node-namespace", namespace, "spillway-agent"))
			}, false},
			{"opens its own namespace to virtual-node", func() error {
				return agent.Create(ctx, roleBinding(namespace, "spillway-virtual-node", "spillway-virtual-node-namespace", namespace, "spillway-virtual-node"))
			}, false},
			{"takes its role for guests in a user's namespace", func() error {
				return agent.Create(ctx, roleBinding("default", "spillway-virtual-node", "spillway-agent-guests", namespace, "spillway-agent"))
			}, false},
			{"takes away a user's binding", func() error {
				must(admin.Create(ctx, roleBinding("default", "mine", "view", "default", "default")))
				return agent.Delete(ctx, roleBinding("default", "mine", "", "", ""))
			}, false},
			{"makes another namespace", func() error { return agent.Create(ctx, &corev1.Namespace{ObjectMeta: named("liqo-tenant-rome")}) }, false},
			{"makes a namespace for guests", func() error {
				meta := named(guests)
				meta.Labels = map[string]string{
					"app.kubernetes.io/managed-by": "spillway", "broker.fluidos.eu/guests-of": "rome", "pod-security.kubernetes.io/enforce": "baseline",
				}
				return agent.Create(ctx, &corev1.Namespace{ObjectMeta: meta})
			}, true},
			{"bounds guests unasked", func() error { return agent.Create(ctx, quota.DeepCopy()) }, false},
			{"takes every right there", func() error {
				return agent.Create(ctx, roleBinding(guests, "spillway-agent", "cluster-admin", namespace, "spillway-agent"))
			}, false},
			{"takes its role there", func() error {
				return agent.Create(ctx, roleBinding(guests, "spillway-agent", "spillway-agent-guests", namespace, "spillway-agent"))
			}, true},
			{"bounds guests", func() error { return soon(t, func() error { return agent.Create(ctx, quota.DeepCopy()) }) }, true},
			{"walls guests in", func() error {
				return agent.Create(ctx, &networkingv1.NetworkPolicy{ObjectMeta: within(guests, "spillway-deny")})
			}, true},
			{"makes the consumer's account", func() error {
				return agent.Create(ctx, &corev1.ServiceAccount{ObjectMeta: within(guests, "spillway-virtual-node")})
			}, true},
			{"lets it run pods", func() error {
				return agent.Create(ctx, roleBinding(guests, "spillway-virtual-node", "spillway-direct-guest", guests, "spillway-virtual-node"))
			}, true},
			{"reads a guest's Secret", secret(agent, guests, "private"), false},
			{"makes a token elsewhere", func() error {
				return agent.SubResource("token").Create(ctx, &corev1.ServiceAccount{ObjectMeta: within(namespace, "spillway-virtual-node")}, &authenticationv1.TokenRequest{})
			}, false},
		})
	})

	t.Run("virtual-node", func(t *testing.T) {
		lease := func(namespace, name string) *coordinationv1.Lease {
			return &coordinationv1.Lease{ObjectMeta: within(namespace, name)}
		}
		runSteps(t, []step{
			{"reads links", func() error { return virtualNode.List(ctx, &corev1.SecretList{}, client.InNamespace("spillway-links")) }, true},
			{"changes a link", func() error {
				return virtualNode.Delete(ctx, &corev1.Secret{ObjectMeta: within("spillway-links", "spillway-direct-paris")})
			}, false},
			{"reads Secrets of its own namespace", secret(virtualNode, namespace, "private"), false},
			{"reads what pods mount where they overflow", func() error {
				return soon(t, func() error { return virtualNode.List(ctx, &corev1.SecretList{}, client.InNamespace("shop")) })
			}, true},
			{"reads it elsewhere", secret(virtualNode, "default", "private"), false},
			{"makes a virtual node", func() error { return virtualNode.Create(ctx, &corev1.Node{ObjectMeta: named("spillway-berlin")}) }, true},
			{"says how it is", func() error {
				node := &corev1.Node{}
				if err := virtualNode.Get(ctx, types.NamespacedName{Name: "spillway-berlin"}, node); err != nil {
					return err
				}
				node.Status.Allocatable = corev1.ResourceList{"cpu": resource.MustParse("1")}
				return virtualNode.Status().Update(ctx, node)
			}, true},
			{"removes it", func() error { return virtualNode.Delete(ctx, &corev1.Node{ObjectMeta: named("spillway-berlin")}) }, true},
			{"makes a real node", func() error { return virtualNode.Create(ctx, &corev1.Node{ObjectMeta: named("mine")}) }, false},
			{"removes a real node", func() error { return virtualNode.Delete(ctx, &corev1.Node{ObjectMeta: named("worker")}) }, false},
			{"keeps its node's lease", func() error { return virtualNode.Create(ctx, lease("kube-node-lease", "spillway-paris")) }, true},
			{"keeps another node's lease", func() error { return virtualNode.Create(ctx, lease("kube-node-lease", "worker")) }, false},
			{"leads", func() error { return virtualNode.Create(ctx, lease("spillway-links", "spillway-virtual-node")) }, true},
			{"says how a pod at home is", func() error {
				pod := &corev1.Pod{}
				if err := virtualNode.Get(ctx, types.NamespacedName{Namespace: "default", Name: "home"}, pod); err != nil {
					return err
				}
				pod.Status.Phase = corev1.PodFailed
				return virtualNode.Status().Update(ctx, pod)
			}, false},
			{"says how its pod is", func() error {
				pod := &corev1.Pod{}
				if err := virtualNode.Get(ctx, types.NamespacedName{Namespace: "default", Name: "away"}, pod); err != nil {
					return err
				}
				pod.Status.Phase = corev1.PodRunning
				return virtualNode.Status().Update(ctx, pod)
			}, true},
			{"ends a pod at home", func() error { return virtualNode.Delete(ctx, podOn("worker", "home")) }, false},
			{"ends its pod", func() error { return virtualNode.Delete(ctx, podOn("spillway-paris", "away")) }, true},
			{"asks who somebody is", func() error {
				return virtualNode.Create(ctx, &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: "x"}})
			}, true},
			{"binds a role", func() error {
				return virtualNode.Create(ctx, roleBinding("default", "x", "view", "default", "default"))
			}, false},
		})
	})

	// The consumer, by a token as the agent hands it out.
	var token string
	must(soon(t, func() error {
		request := &authenticationv1.TokenRequest{}
		err := agent.SubResource("token").Create(ctx, &corev1.ServiceAccount{ObjectMeta: within(guests, "spillway-virtual-node")}, request)
		token = request.Status.Token
		return err
	}))
	consumer, err := client.New(&rest.Config{Host: config.Host, BearerToken: token, TLSClientConfig: rest.TLSClientConfig{CAData: config.CAData}}, client.Options{Scheme: scheme.Scheme})
	must(err)
	// What the controllers of a real cluster make.
	must(admin.Create(ctx, &corev1.ServiceAccount{ObjectMeta: within(guests, "default")}))
	must(admin.Get(ctx, client.ObjectKeyFromObject(quota), quota))
	quota.Status = corev1.ResourceQuotaStatus{Hard: quota.Spec.Hard, Used: corev1.ResourceList{}}
	for name := range quota.Spec.Hard {
		quota.Status.Used[name] = resource.MustParse("0")
	}
	must(admin.Status().Update(ctx, quota))
	must(admin.Create(ctx, &schedulingv1.PriorityClass{ObjectMeta: named("precious"), Value: 1000}))

	guest := func(change func(*corev1.Pod)) func() error {
		return func() error {
			pod := &corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Namespace: guests, GenerateName: "guest-"},
				Spec: corev1.PodSpec{
					AutomountServiceAccountToken: ptr.To(false),
					Containers: []corev1.Container{{Name: "c", Image: "pause", Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{
						"cpu": resource.MustParse("100m"), "memory": resource.MustParse("0"), "ephemeral-storage": resource.MustParse("0"),
					}}}},
				},
			}
			change(pod)
			return consumer.Create(ctx, pod)
		}
	}
	asks := func(name corev1.ResourceName, amount string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			r := &p.Spec.Containers[0].Resources
			r.Requests[name] = resource.MustParse(amount)
			if strings.Contains(string(name), "/") {
				r.Limits = corev1.ResourceList{name: resource.MustParse(amount)}
			}
		}
	}
	tolerates := func(toleration corev1.Toleration) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.Spec.Tolerations = append(p.Spec.Tolerations, toleration) }
	}
	mounts := func(source corev1.VolumeSource) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: source}} }
	}
	plain := func(*corev1.Pod) {}
	projects := func(p *corev1.Pod) {
		p.Spec.ServiceAccountName = "default" // as the service account admission writes it
		mounts(corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{{
			ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "token"},
		}}}})(p)
	}
	if err := soon(t, guest(plain)); err != nil {
		t.Fatalf("an ordinary guest: %v", err)
	}
	must(soon(t, func() error {
		if err := guest(func(p *corev1.Pod) { p.Spec.PriorityClassName = "precious" })(); !apierrors.IsForbidden(err) {
			return errors.Join(errors.New("a guest is more precious than others"), err)
		}
		return nil
	}))
	t.Run("consumer", func(t *testing.T) {
		runSteps(t, []step{
			{"requests what is lent", guest(asks("example.com/fpga", "1")), true},
			{"requests more than is lent", guest(asks("cpu", "3")), false},
			{"requests a kind that is not lent", guest(asks("nvidia.com/gpu", "1")), false},
			{"requests storage that is not lent", guest(asks("ephemeral-storage", "1Mi")), false},
			{"requests nothing at all", guest(func(p *corev1.Pod) { p.Spec.Containers[0].Resources = corev1.ResourceRequirements{} }), false},
			{"chooses a node", guest(func(p *corev1.Pod) { p.Spec.NodeName = "worker" }), false},
			{"takes a system's priority", guest(func(p *corev1.Pod) { p.Spec.PriorityClassName = "system-node-critical" }), false},
			{"tolerates a GPU node", guest(tolerates(corev1.Toleration{Key: "nvidia.com/gpu", Operator: corev1.TolerationOpExists})), true},
			{"tolerates everything", guest(tolerates(corev1.Toleration{Operator: corev1.TolerationOpExists})), false},
			{"tolerates virtual nodes", guest(tolerates(corev1.Toleration{Key: "broker.fluidos.eu/overflow", Operator: corev1.TolerationOpExists})), false},
			{"tolerates the control plane", guest(tolerates(corev1.Toleration{Key: "node-role.kubernetes.io/control-plane", Operator: corev1.TolerationOpExists})), false},
			{"tolerates virtual nodes afterwards", func() error {
				var pods corev1.PodList
				if err := consumer.List(ctx, &pods, client.InNamespace(guests)); err != nil || len(pods.Items) == 0 {
					return errors.Join(err, errors.New("no guest"))
				}
				pod := pods.Items[0].DeepCopy()
				pod.Spec.Tolerations = append(pod.Spec.Tolerations, corev1.Toleration{Key: "broker.fluidos.eu/overflow", Operator: corev1.TolerationOpExists})
				return consumer.Patch(ctx, pod, client.MergeFrom(&pods.Items[0]))
			}, false},
			{"takes a token", guest(func(p *corev1.Pod) { p.Spec.AutomountServiceAccountToken = nil }), false},
			{"projects a token", guest(projects), false},
			{"takes another account", guest(func(p *corev1.Pod) { p.Spec.ServiceAccountName = "spillway-virtual-node" }), false},
			{"mounts a ConfigMap", guest(mounts(corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "x"}}})), true},
			{"mounts its node", guest(mounts(corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/"}})), false},
			{"mounts storage", guest(mounts(corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "x"}})), false},
			{"is privileged", guest(func(p *corev1.Pod) {
				p.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{Privileged: ptr.To(true)}
			}), false},
			{"keeps a ConfigMap", func() error { return consumer.Create(ctx, &corev1.ConfigMap{ObjectMeta: within(guests, "x")}) }, true},
			{"keeps a Secret", func() error { return consumer.Create(ctx, &corev1.Secret{ObjectMeta: within(guests, "x")}) }, true},
			{"widens its quota", func() error { return consumer.Update(ctx, quota.DeepCopy()) }, false},
			{"opens its walls", func() error {
				return consumer.Delete(ctx, &networkingv1.NetworkPolicy{ObjectMeta: within(guests, "spillway-deny")})
			}, false},
			{"makes a service", func() error { return consumer.Create(ctx, &corev1.Service{ObjectMeta: within(guests, "x")}) }, false},
			{"looks elsewhere", func() error { return consumer.List(ctx, &corev1.PodList{}, client.InNamespace("default")) }, false},
			{"looks at nodes", func() error { return consumer.List(ctx, &corev1.NodeList{}) }, false},
		})
	})
	t.Run("a default priority is nobody's fault", func(t *testing.T) {
		must(admin.Create(ctx, &schedulingv1.PriorityClass{ObjectMeta: named("usual"), Value: 10, GlobalDefault: true}))
		must(soon(t, func() error {
			if err := guest(plain)(); err != nil {
				return err
			}
			var pods corev1.PodList
			if err := admin.List(ctx, &pods, client.InNamespace(guests)); err != nil {
				return err
			}
			if !slices.ContainsFunc(pods.Items, func(p corev1.Pod) bool { return p.Spec.PriorityClassName == "usual" }) {
				return errors.New("no guest has the default priority yet")
			}
			return admin.DeleteAllOf(ctx, &corev1.Pod{}, client.InNamespace(guests), client.GracePeriodSeconds(0))
		}))
	})
	t.Run("the end takes effect at once", func(t *testing.T) {
		must(agent.Delete(ctx, roleBinding(guests, "spillway-virtual-node", "", "", "")))
		must(soon(t, func() error {
			if err := guest(plain)(); !apierrors.IsForbidden(err) {
				return errors.Join(errors.New("the consumer may still start a guest"), err)
			}
			return nil
		}))
		must(agent.Delete(ctx, &corev1.ServiceAccount{ObjectMeta: within(guests, "spillway-virtual-node")}))
		must(agent.Delete(ctx, &corev1.Namespace{ObjectMeta: named(guests)}))
		must(agent.Delete(ctx, roleBinding("shop", "spillway-virtual-node", "", "", "")))
	})
	t.Run("uninstalling leaves nothing", func(t *testing.T) {
		made := render(t, "agent", withDirect)
		_, err := helm(t, "uninstall", "spillway-agent", access)
		must(err)
		for _, object := range made {
			if err := admin.Get(ctx, client.ObjectKeyFromObject(&object), &object); !apierrors.IsNotFound(err) && object.GetDeletionTimestamp() == nil {
				t.Errorf("%s %s is still there (%v)", object.GetKind(), object.GetName(), err)
			}
		}
	})
}
