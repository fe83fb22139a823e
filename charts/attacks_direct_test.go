package charts_test

import (
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	nodev1 "k8s.io/api/node/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/broker/guest"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/e2e/lab/binaries"
)

// hostileConsumer is a provider's cluster with the namespace of a consumer's guests,
// and the consumer's client with a token as the agent issues it.
type hostileConsumer struct {
	t               *testing.T
	config          *rest.Config
	admin, consumer client.Client
	namespace       *corev1.Namespace
	quota           *corev1.ResourceQuota
	running         *corev1.Pod
}

// With driver direct a consumer gets nothing that its grant does not say.
func TestAttacksWithDirect(t *testing.T) {
	config := controlplane.Start(t)
	h := &hostileConsumer{t: t, config: config, admin: as(t, config, "")}
	access := kubeconfig(t, config)
	h.namespace = &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: guests, Labels: map[string]string{
		"app.kubernetes.io/managed-by": "spillway", "broker.fluidos.eu/guests-of": "rome", "pod-security.kubernetes.io/enforce": "restricted",
	}}}
	expect.NoError(t, h.admin.Create(t.Context(), h.namespace))
	install(t, "install", "agent", access, slices.Concat(needed, []string{"clusterID=paris", "driver=direct"}))
	h.prepare()
	t.Run("kubectl drain", func(t *testing.T) { h.testDrain(t, access) })
	allowed := h.allowed()
	for name, object := range largestObjects(guests) {
		allowed[name] = h.create(object)
	}
	for name, do := range allowed {
		t.Run("allowed/"+name, func(t *testing.T) {
			expect.Eventually(t, name, func() (bool, string) {
				err := do()
				return err == nil, fmt.Sprint(err)
			})
		})
	}
	expectTooLarge(t, h.consumer, guests)
	// Any guest must fit while the others are tried.
	guards := []guard{
		{"quota", func() error { return h.setQuota("1000", "1000Ti", false) }},
		{"Pod Security", func() error {
			patch := client.MergeFrom(h.namespace.DeepCopy())
			delete(h.namespace.Labels, "pod-security.kubernetes.io/enforce")
			return h.admin.Patch(t.Context(), h.namespace, patch)
		}},
	}
	for _, name := range []string{"spillway-guest-objects", "spillway-guests"} {
		guards = append(guards, policyGuard(t, h.admin, name))
	}
	guards = append(guards, permissionGuard(t, h.admin, rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Namespace: guests, Name: "spillway-virtual-node"}))
	attacks := slices.Concat(h.podAttacks(), h.objectAttacks(), listAttacks(t, h.consumer))
	for _, a := range everyPodAttack {
		attacks = append(attacks, attack{a.name, h.spec(a.change), []string{"spillway-guests"}, a.want})
	}
	for _, a := range podSecurityAttacks {
		attacks = append(attacks, attack{a.name, h.spec(a.change), []string{"Pod Security"}, "violates PodSecurity"})
	}
	for _, a := range memoryAttacks {
		attacks = append(attacks, attack{a.name, h.spec(a.change), []string{"quota"}, "limits.memory"})
	}
	runAttacks(t, guards, attacks)
}

// create returns a request by which the consumer creates an object, without storing it.
func (h *hostileConsumer) create(object client.Object) func() error {
	return func() error {
		return h.consumer.Create(h.t.Context(), object.DeepCopyObject().(client.Object), client.DryRunAll)
	}
}

// prepare creates what the agent creates for a consumer, and a running guest.
func (h *hostileConsumer) prepare() {
	t, ctx := h.t, h.t.Context()
	for _, object := range []client.Object{
		&corev1.ServiceAccount{ObjectMeta: within("default", "default")}, &corev1.ServiceAccount{ObjectMeta: within(guests, "default")},
		&corev1.ServiceAccount{ObjectMeta: within(guests, "spillway-virtual-node")}, &corev1.ServiceAccount{ObjectMeta: within(guests, "admin")},
		roleBinding(guests, "spillway-virtual-node", "spillway-direct-guest", guests, "spillway-virtual-node"),
		&corev1.ResourceQuota{ObjectMeta: within(guests, "spillway-guests")},
		&networkingv1.NetworkPolicy{ObjectMeta: within(guests, "spillway-deny")},
		podOn("worker", "local"), &corev1.Secret{ObjectMeta: within("default", "private")},
		&nodev1.RuntimeClass{ObjectMeta: named("kata"), Handler: "kata"},
	} {
		expect.NoError(t, h.admin.Create(ctx, object))
	}
	h.quota = &corev1.ResourceQuota{}
	expect.NoError(t, h.setQuota("2", "1Gi", true))
	request := &authenticationv1.TokenRequest{}
	expect.NoError(t, h.admin.SubResource("token").Create(ctx, &corev1.ServiceAccount{ObjectMeta: within(guests, "spillway-virtual-node")}, request))
	var err error
	h.consumer, err = client.New(&rest.Config{
		Host: h.config.Host, BearerToken: request.Status.Token, TLSClientConfig: rest.TLSClientConfig{CAData: h.config.CAData},
	}, client.Options{Scheme: scheme.Scheme})
	expect.NoError(t, err)
	eventually(t, "a guest", func() error {
		h.running = h.pod()
		return h.consumer.Create(ctx, h.running)
	})
}

// testDrain checks that kubectl drain accepts a node with a guest, and refuses one with a
// guest that has no owner.
func (h *hostileConsumer) testDrain(t *testing.T, access string) {
	ctx := t.Context()
	expect.NoError(t, h.admin.Create(ctx, &corev1.Node{ObjectMeta: named("drained")}))
	kubectl, err := binaries.Program(ctx, "kubectl", t.Logf)
	expect.NoError(t, err)
	drain := func() (string, error) {
		out, err := exec.CommandContext(ctx, kubectl, access, "drain", "drained", "--dry-run=server").CombinedOutput()
		return string(out), err
	}
	run := func(guest *corev1.Pod) {
		expect.NoError(t, h.admin.SubResource("binding").Create(ctx, guest, &corev1.Binding{Target: corev1.ObjectReference{Kind: "Node", Name: "drained"}}))
	}
	guest := h.pod()
	expect.NoError(t, h.consumer.Create(ctx, guest))
	run(guest)
	if out, err := drain(); err != nil || !strings.Contains(out, "evicting pod "+guests+"/"+guest.Name) {
		t.Errorf("a node with a guest: %v\n%s", err, out)
	}
	bare := h.pod()
	bare.OwnerReferences = nil
	expect.NoError(t, h.admin.Create(ctx, bare))
	run(bare)
	if out, err := drain(); err == nil || !strings.Contains(out, "cannot delete") {
		t.Errorf("a node with a guest without an owner: %v\n%s", err, out)
	}
	expect.NoError(t, h.admin.Delete(ctx, bare, client.GracePeriodSeconds(0)))
}

// setQuota sets the quota of guests, and its status as the quota controller does.
func (h *hostileConsumer) setQuota(cpu, memory string, limited bool) error {
	ctx := h.t.Context()
	if err := h.admin.Get(ctx, client.ObjectKey{Namespace: guests, Name: "spillway-guests"}, h.quota); err != nil {
		return err
	}
	h.quota.Spec.Hard = expect.Resources("requests.cpu", cpu, "requests.memory", memory, "requests.ephemeral-storage", "0", "requests.example.com/fpga", "1", "pods", "9")
	if limited {
		h.quota.Spec.Hard[corev1.ResourceLimitsMemory] = resource.MustParse(memory)
	}
	if err := h.admin.Update(ctx, h.quota); err != nil {
		return err
	}
	h.quota.Status = corev1.ResourceQuotaStatus{Hard: h.quota.Spec.Hard, Used: corev1.ResourceList{}}
	for name := range h.quota.Spec.Hard {
		h.quota.Status.Used[name] = resource.MustParse("0")
	}
	return h.admin.Status().Update(ctx, h.quota)
}

// pod is an ordinary guest.
func (h *hostileConsumer) pod() *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: guests, GenerateName: "guest-"}, Spec: guestSpec()}
	p.Spec.PriorityClassName = "spillway-guest"
	p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Namespace", Name: guests, UID: h.namespace.UID, Controller: ptr.To(true)}}
	return p
}

// guest returns a request by which the consumer creates a guest, without storing it.
func (h *hostileConsumer) guest(change func(*corev1.Pod)) func() error {
	return func() error {
		p := h.pod()
		change(p)
		return h.consumer.Create(h.t.Context(), p, client.DryRunAll)
	}
}

func (h *hostileConsumer) spec(change func(*corev1.PodSpec)) func() error {
	return h.guest(func(p *corev1.Pod) { change(&p.Spec) })
}

// update returns a request that changes the running guest.
func (h *hostileConsumer) update(change func(*corev1.Pod)) func() error {
	return func() error {
		changed := h.running.DeepCopy()
		change(changed)
		return h.consumer.Patch(h.t.Context(), changed, client.MergeFrom(h.running), client.DryRunAll)
	}
}

// requesting makes a container request an amount, limited to the same.
func requesting(name corev1.ResourceName, amount string) func(*corev1.PodSpec) {
	return func(s *corev1.PodSpec) {
		r := &s.Containers[0].Resources
		r.Requests[name], r.Limits[name] = resource.MustParse(amount), resource.MustParse(amount)
	}
}

// allowed are the requests of an honest consumer.
func (h *hostileConsumer) allowed() map[string]func() error {
	return map[string]func() error{
		"an ordinary guest":       h.guest(func(*corev1.Pod) {}),
		"a granted resource":      h.spec(requesting("example.com/fpga", "1")),
		"tolerating a GPU's node": h.spec(toleration(corev1.Toleration{Key: "nvidia.com/gpu", Operator: corev1.TolerationOpExists})),
		"selecting nodes":         h.spec(func(s *corev1.PodSpec) { s.NodeSelector = map[string]string{"zone": "a"} }),
		"a bounded emptyDir in memory": h.spec(volume(corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{
			Medium: corev1.StorageMediumMemory, SizeLimit: ptr.To(resource.MustParse("64Mi")),
		}})),
		"an emptyDir in memory of a pod with a limit of its own": h.spec(func(s *corev1.PodSpec) {
			r := &s.Containers[0].Resources
			delete(r.Requests, corev1.ResourceMemory)
			delete(r.Limits, corev1.ResourceMemory)
			s.Resources = &corev1.ResourceRequirements{Requests: expect.Resources("memory", "64Mi"), Limits: expect.Resources("memory", "64Mi")}
			volume(corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory}})(s)
			guest.BoundMemory(s)
		}),
		"a ConfigMap as a volume": h.spec(volume(corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "x"}}})),
		"labelling a guest":       h.update(func(p *corev1.Pod) { p.Labels = map[string]string{"app": "web"} }),
		"creating a ConfigMap": func() error {
			return h.consumer.Create(h.t.Context(), &corev1.ConfigMap{ObjectMeta: within(guests, "x")}, client.DryRunAll)
		},
		"creating a Secret": func() error {
			return h.consumer.Create(h.t.Context(), &corev1.Secret{ObjectMeta: within(guests, "x")}, client.DryRunAll)
		},
		"reading its namespace": func() error {
			return h.consumer.Get(h.t.Context(), client.ObjectKey{Name: guests}, &corev1.Namespace{})
		},
	}
}

// podAttacks are those with a guest that only driver direct refuses.
func (h *hostileConsumer) podAttacks() []attack {
	quota, pods, objects := []string{"quota"}, []string{"spillway-guests"}, []string{"spillway-guest-objects"}
	unowned := func(p *corev1.Pod) { p.OwnerReferences = nil }
	daemon := func(p *corev1.Pod) {
		p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "x", UID: "1", Controller: ptr.To(true)}}
	}
	unlimited := func(s *corev1.PodSpec) { s.Containers[0].Resources.Limits = nil }
	return []attack{
		{"one core more than granted", h.spec(requesting("cpu", "3")), quota, "exceeded quota"},
		{"no memory limit", h.spec(unlimited), []string{"quota"}, "limits.memory"},
		{"a memory limit beyond what is granted", h.spec(requesting("memory", "1Ti")), quota, "exceeded quota"},
		{"a resource that is not granted", h.spec(requesting("nvidia.com/gpu", "1")), pods, "granted to its cluster"},
		{"none of a resource that is not granted: guests do not name it", h.spec(requesting("nvidia.com/gpu", "0")), pods, "granted to its cluster"},
		{"no priority class", h.spec(func(s *corev1.PodSpec) { s.PriorityClassName = "" }), pods, "priority"},
		{"a system priority class", h.spec(func(s *corev1.PodSpec) { s.PriorityClassName = "system-node-critical" }), pods, "priority"},
		{"a ServiceAccount", h.spec(func(s *corev1.PodSpec) { s.ServiceAccountName = "admin" }), pods, "ServiceAccount"},
		{"a token", h.spec(func(s *corev1.PodSpec) { s.AutomountServiceAccountToken = nil }), pods, "token"},
		{"a projected token", h.spec(func(s *corev1.PodSpec) {
			s.ServiceAccountName = "default" // as the ServiceAccount admission plugin sets it
			volume(corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{{
				ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "token"},
			}}}})(s)
		}), pods, "volumes of type"},
		{"tolerating virtual nodes", h.spec(toleration(corev1.Toleration{Key: "broker.fluidos.eu/overflow", Operator: corev1.TolerationOpExists})), pods, "tolerate"},
		{"tolerating the virtual node of a third cluster", h.spec(toleration(corev1.Toleration{
			Key: "broker.fluidos.eu/overflow", Operator: corev1.TolerationOpEqual, Value: "berlin",
		})), pods, "tolerate"},
		{"tolerating virtual nodes later", h.update(func(p *corev1.Pod) {
			p.Spec.Tolerations = append(p.Spec.Tolerations, corev1.Toleration{Key: "broker.fluidos.eu/overflow", Operator: corev1.TolerationOpExists})
		}), pods, "tolerate"},
		{"a guest that blocks kubectl drain", h.guest(unowned), objects, "controlled by its namespace"},
		{"a guest that claims to be a daemon", h.guest(daemon), objects, "controlled by its namespace"},
		{"another owner later", h.update(daemon), objects, "controlled by its namespace"},
		{"a guest that keeps its node", h.guest(func(p *corev1.Pod) {
			p.Annotations = map[string]string{"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
		}), pods, "safe-to-evict"},
		{"keeping its node later", h.update(func(p *corev1.Pod) {
			p.Annotations = map[string]string{"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
		}), pods, "safe-to-evict"},
		{"a guest that cannot be deleted", h.guest(func(p *corev1.Pod) { p.Finalizers = []string{"example.com/keep"} }), objects, "finalizers"},
	}
}

// objectAttacks are those with other objects.
func (h *hostileConsumer) objectAttacks() []attack {
	ctx, rbac, objects := h.t.Context(), []string{"RBAC"}, []string{"spillway-guest-objects"}
	token := &corev1.Secret{ObjectMeta: within(guests, "token"), Type: corev1.SecretTypeServiceAccountToken}
	token.Annotations = map[string]string{corev1.ServiceAccountNameKey: "default"}
	nodePort := &corev1.Service{ObjectMeta: within(guests, "x"), Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeNodePort, Ports: []corev1.ServicePort{{Port: 80}}}}
	claim := &corev1.PersistentVolumeClaim{ObjectMeta: within(guests, "x"), Spec: corev1.PersistentVolumeClaimSpec{
		AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, Resources: corev1.VolumeResourceRequirements{Requests: expect.Resources("storage", "1Ti")},
	}}
	raise := func() error {
		changed := h.quota.DeepCopy()
		changed.Spec.Hard["requests.cpu"] = resource.MustParse("5000")
		return h.consumer.Patch(ctx, changed, client.MergeFrom(h.quota), client.DryRunAll)
	}
	relabel := func() error {
		changed := h.namespace.DeepCopy()
		changed.Labels["broker.fluidos.eu/overflow"] = "enabled"
		return h.consumer.Patch(ctx, changed, client.MergeFrom(h.namespace), client.DryRunAll)
	}
	elsewhere := h.pod()
	elsewhere.Namespace, elsewhere.OwnerReferences = "default", nil
	user := "system:serviceaccount:" + guests + ":spillway-virtual-node"
	return []attack{
		{"granting itself capacity", raise, rbac, "cannot patch resource"},
		{"letting guests overflow again", relabel, rbac, "cannot patch resource"},
		{"a ServiceAccount token", h.create(token), objects, "service-account-token"},
		{"a Service of type NodePort", h.create(nodePort), rbac, "cannot create resource"},
		{"a PersistentVolumeClaim", h.create(claim), rbac, "cannot create resource"},
		{"opening the network", func() error {
			return h.consumer.Delete(ctx, &networkingv1.NetworkPolicy{ObjectMeta: within(guests, "spillway-deny")}, client.DryRunAll)
		}, rbac, "cannot delete resource"},
		{"a guest in another namespace", h.create(elsewhere), rbac, "cannot create resource"},
		{"the provider's Secrets", readSecret(h.t, h.consumer, "default", "private"), rbac, "cannot get resource"},
		{"exec into a pod of the provider", func() error {
			return execInto(h.t, h.config, user, "system:serviceaccounts", "system:serviceaccounts:"+guests)
		}, rbac, "cannot create resource"},
		{"a binding of its own", h.create(roleBinding(guests, "x", "admin", guests, "spillway-virtual-node")), rbac, "cannot create resource"},
	}
}
