package charts_test

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/spillway-dev/spillway/broker/guest"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// liqoDir is the folder of Liqo's deployment files in the module cache.
func liqoDir(t *testing.T) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "github.com/liqotech/liqo").Output()
	expect.NoError(t, err)
	return filepath.Join(strings.TrimSpace(string(out)), "deployments/liqo")
}

// liqoFixture is a provider with Liqo's objects for the consumer rome, and clients
// with the identities that Liqo issues.
type liqoFixture struct {
	t      *testing.T
	config *rest.Config
	admin  client.Client
	// slice is the identity of the consumer's virtual kubelet: its user is the
	// ResourceSlice's name with a hash of the consumer's ID, its group that ID.
	// controlPlane is the one of its crd-replicator: its user is the consumer's ID.
	slice, controlPlane client.Client
}

func newLiqoFixture(t *testing.T) *liqoFixture {
	dir := liqoDir(t)
	config := controlplane.Start(t, filepath.Join(dir, "charts/liqo-crds/crds"))
	f := &liqoFixture{t: t, config: config, admin: as(t, config, "")}
	f.slice = impersonating(t, config, fmt.Sprintf("spillway-paris-%x", sha256.Sum256([]byte("rome")))[:len("spillway-paris-")+12], "rome")
	f.controlPlane = impersonating(t, config, "rome", "liqo.io")
	for _, object := range []client.Object{
		&corev1.Namespace{ObjectMeta: named("liqo")},
		// As the agent creates it.
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "liqo-tenant-rome", Labels: map[string]string{
			"liqo.io/remote-cluster-id": "rome", "liqo.io/tenant-namespace": "true", "app.kubernetes.io/managed-by": "spillway",
		}}},
		// As Liqo creates it for a NamespaceMap, and the agent limits it.
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop-rome", Labels: map[string]string{
			"liqo.io/remote-cluster-id": "rome", "broker.fluidos.eu/limited": "true", "pod-security.kubernetes.io/enforce": "restricted",
		}}},
		// A peering that a user made.
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "liqo-tenant-oslo", Labels: map[string]string{"liqo.io/remote-cluster-id": "oslo", "liqo.io/tenant-namespace": "true"}}},
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop-oslo", Labels: map[string]string{"liqo.io/remote-cluster-id": "oslo"}}},
		&corev1.ServiceAccount{ObjectMeta: within("shop-rome", "default")},
		&corev1.ServiceAccount{ObjectMeta: within("default", "default")}, podOn("worker", "local"), event("stored"),
		// Not limited yet.
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "new-rome", Labels: map[string]string{"liqo.io/remote-cluster-id": "rome"}}},
	} {
		expect.NoError(t, f.admin.Create(t.Context(), object))
	}
	expect.NoError(f.t, f.admin.Create(f.t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: within("new-rome", "liqo-virtual-kubelet-remote"), RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "liqo-virtual-kubelet-remote"},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: "rome"}},
	}))
	f.bindRole(dir, "liqo-virtual-kubelet-remote", "shop-rome", rbacv1.Subject{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: "rome"})
	f.bindRole(dir, "liqo-remote-controlplane", "liqo-tenant-rome", rbacv1.Subject{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: "rome"})
	return f
}

// bindRole creates a ClusterRole of Liqo's chart and binds it as Liqo does.
func (f *liqoFixture) bindRole(dir, name, namespace string, subject rbacv1.Subject) {
	f.t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, "files", name+"-ClusterRole.yaml"))
	expect.NoError(f.t, err)
	role := &rbacv1.ClusterRole{}
	expect.NoError(f.t, yaml.Unmarshal(text, role))
	role.Name = name
	expect.NoError(f.t, f.admin.Create(f.t.Context(), role))
	expect.NoError(f.t, f.admin.Create(f.t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: within(namespace, name), RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name}, Subjects: []rbacv1.Subject{subject},
	}))
}

// liqoObject is an object of one of Liqo's types.
func liqoObject(group, kind, namespace, name string, spec map[string]any) *unstructured.Unstructured {
	object := &unstructured.Unstructured{Object: map[string]any{"spec": spec}}
	object.SetAPIVersion(group + ".liqo.io/v1beta1")
	object.SetKind(kind)
	object.SetNamespace(namespace)
	object.SetName(name)
	return object
}

// create returns a request that creates an object without storing it.
func (f *liqoFixture) create(c client.Client, object func() client.Object) func() error {
	return func() error { return c.Create(f.t.Context(), object(), client.DryRunAll) }
}

// shadowPod is an ordinary guest, as the webhook completes it, with a change.
func shadowPod(t *testing.T, namespace, name string, change func(*corev1.PodSpec)) *unstructured.Unstructured {
	t.Helper()
	spec := guestSpec()
	spec.PriorityClassName, spec.SchedulingGates = "spillway-guest", []corev1.PodSchedulingGate{{Name: "broker.fluidos.eu/hand-over"}}
	change(&spec)
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&spec)
	expect.NoError(t, err)
	return liqoObject("offloading", "ShadowPod", namespace, name, map[string]any{"pod": content})
}

func (f *liqoFixture) guest(c client.Client, namespace string, change func(*corev1.PodSpec)) func() error {
	return f.create(c, func() client.Object { return shadowPod(f.t, namespace, "another", change) })
}

// replicated gives an object the labels with which the crd-replicator of rome creates it.
func replicated(object *unstructured.Unstructured) *unstructured.Unstructured {
	object.SetLabels(map[string]string{
		"liqo.io/originID": "rome", "liqo.io/remote-cluster-id": "rome", "liqo.io/remoteID": "paris", "liqo.io/replicated": "true", "liqo.io/replication": "false",
	})
	return object
}

// toReplicate gives an object of this cluster the labels by which its own crd-replicator
// creates it in rome.
func toReplicate(object *unstructured.Unstructured) *unstructured.Unstructured {
	object.SetLabels(map[string]string{"liqo.io/remote-cluster-id": "rome", "liqo.io/remoteID": "rome", "liqo.io/replication": "true"})
	return object
}

func resourceSlice(namespace, class string) *unstructured.Unstructured {
	return replicated(liqoObject("authentication", "ResourceSlice", namespace, "spillway-paris", map[string]any{
		"class": class, "consumerClusterID": "rome", "providerClusterID": "paris", "resources": map[string]any{"cpu": "1"},
	}))
}

func renew(name string) *unstructured.Unstructured {
	return replicated(liqoObject("authentication", "Renew", "liqo-tenant-rome", name, map[string]any{"consumerClusterID": "rome", "identityType": "ControlPlane"}))
}

func namespaceMap(mapping map[string]any) *unstructured.Unstructured {
	return replicated(liqoObject("offloading", "NamespaceMap", "liqo-tenant-rome", "paris", map[string]any{"desiredMapping": mapping}))
}

// mappings maps a number of namespaces.
func mappings(count int) map[string]any {
	mapping := map[string]any{}
	for i := range count {
		mapping[fmt.Sprintf("x%d", i)] = fmt.Sprintf("x%d-rome", i)
	}
	return mapping
}

// namespaceMaps are from before an upgrade: many has more namespaces than a consumer may use,
// those of ending are all being deleted, and Liqo has not created those of pending yet.
type namespaceMaps struct{ many, ending, pending *unstructured.Unstructured }

func (f *liqoFixture) createNamespaceMaps() *namespaceMaps {
	f.t.Helper()
	maps := &namespaceMaps{many: namespaceMap(mappings(101)), ending: namespaceMap(nil), pending: namespaceMap(mappings(1))}
	for name, m := range map[string]*unstructured.Unstructured{"many": maps.many, "ending": maps.ending, "pending": maps.pending} {
		m.SetName(name)
		m.SetFinalizers([]string{"namespacemap-controller.liqo.io/finalizer"})
		expect.NoError(f.t, f.controlPlane.Create(f.t.Context(), m))
	}
	for m, count := range map[*unstructured.Unstructured]int{maps.many: 101, maps.ending: 100} {
		current := map[string]any{}
		for local, remote := range mappings(count) {
			current[local] = map[string]any{"remoteNamespace": remote, "phase": "Accepted"}
		}
		expect.NoError(f.t, unstructured.SetNestedMap(m.Object, current, "status", "currentMapping"))
		expect.NoError(f.t, f.admin.Status().Update(f.t.Context(), m))
	}
	return maps
}

// With driver liqo a consumer gets nothing that its grant does not say.
func TestAttacksWithLiqo(t *testing.T) {
	f := newLiqoFixture(t)
	maps := f.createNamespaceMaps()
	install(t, "install", "agent", kubeconfig(t, f.config), slices.Concat(needed, []string{"clusterID=paris", "liqo.otherPeers={oslo}"}))
	// Its server does not run here.
	expect.NoError(t, f.admin.Delete(t.Context(), &admissionv1.MutatingWebhookConfiguration{ObjectMeta: named("spillway-agent-guests")}))
	expect.NoError(t, f.admin.Create(t.Context(), &schedulingv1.PriorityClass{ObjectMeta: named("default"), Value: 1, GlobalDefault: true}))
	stored := resourceSlice("liqo-tenant-rome", "spillway")
	eventually(t, "a ResourceSlice of class spillway", func() error { return f.controlPlane.Create(t.Context(), stored) })
	expect.NoError(t, f.admin.Create(t.Context(), shadowPod(f.t, "shop-rome", "stored", func(*corev1.PodSpec) {})))

	allowed := f.allowed(stored, maps)
	for name, object := range largestObjects("shop-rome") {
		allowed[name] = f.create(f.slice, func() client.Object { return object.DeepCopyObject().(client.Object) })
	}
	for name, do := range allowed {
		t.Run("allowed/"+name, func(t *testing.T) {
			expect.Eventually(t, name, func() (bool, string) {
				err := do()
				return err == nil, fmt.Sprint(err)
			})
		})
	}
	expectTooLarge(t, f.slice, "shop-rome")
	t.Run("an annotation of a guest that runs", f.testLaterAppArmor)
	var guards []guard
	for _, name := range []string{"spillway-replicas", "spillway-namespace-maps", "spillway-guest-objects", "spillway-deletion", "spillway-guest-requests", "spillway-guests"} {
		guards = append(guards, policyGuard(t, f.admin, name))
	}
	guards = append(guards, f.quota(), guard{"Pod Security", func() error {
		return f.admin.Patch(t.Context(), &corev1.Namespace{ObjectMeta: named("shop-rome")}, client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"labels":{"pod-security.kubernetes.io/enforce":null}}}`)))
	}}, permissionGuard(t, f.admin, rbacv1.Subject{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: "rome"}))
	attacks := slices.Concat(f.replicationAttacks(stored), f.mappingAttacks(maps), f.originAttacks(stored, maps.many), f.objectAttacks(), listAttacks(t, f.slice))
	for _, a := range slices.Concat(everyPodAttack, f.podAttacks()) {
		attacks = append(attacks, attack{a.name, f.guest(f.slice, "shop-rome", a.change), []string{"spillway-guests"}, a.want})
	}
	for _, a := range slices.Concat(memoryAttacks, f.requestAttacks()) {
		attacks = append(attacks, attack{a.name, f.guest(f.slice, "shop-rome", a.change), []string{"spillway-guest-requests"}, a.want})
	}
	// The pod that Liqo creates of a ShadowPod.
	for _, a := range sidecarAttacks() {
		attacks = append(attacks, attack{a.name, f.createPod(func(p *corev1.Pod) { a.change(&p.Spec) }), []string{"ResourceQuota"}, a.want})
	}
	for _, a := range podSecurityAttacks {
		attacks = append(attacks, attack{a.name, f.createPod(func(p *corev1.Pod) { a.change(&p.Spec) }), []string{"Pod Security"}, "violates PodSecurity"})
	}
	attacks = append(attacks, f.annotationAttacks()...)
	attacks = append(attacks, f.deletionAttacks(stored)...)
	runAttacks(t, guards, attacks)
}

// allowed are the requests of an honest consumer, and those on which Liqo and the
// agent rely.
func (f *liqoFixture) allowed(stored *unstructured.Unstructured, maps *namespaceMaps) map[string]func() error {
	liqo := impersonating(f.t, f.config, "system:serviceaccount:liqo:liqo-controller-manager", "system:masters", "system:serviceaccounts", "system:serviceaccounts:liqo")
	agent := impersonating(f.t, f.config, "system:serviceaccount:"+namespace+":spillway-agent", "system:masters", "system:serviceaccounts")
	namespaces := impersonating(f.t, f.config, "system:serviceaccount:kube-system:namespace-controller", "system:masters", "system:serviceaccounts")
	status := func(c client.Client) func() error { return f.writeStatus(c, stored) }
	return map[string]func() error{
		"an ordinary guest":                                        f.guest(f.slice, "shop-rome", func(*corev1.PodSpec) {}),
		"a guest with its tolerations":                             f.guest(f.slice, "shop-rome", toleration(corev1.Toleration{Key: "broker.fluidos.eu/overflow", Operator: corev1.TolerationOpExists})),
		"a guest with a GPU's taint":                               f.guest(f.slice, "shop-rome", toleration(corev1.Toleration{Key: "nvidia.com/gpu", Operator: corev1.TolerationOpExists})),
		"a guest with terms of its own":                            f.guest(f.slice, "shop-rome", nodesOfItsOwn),
		"a guest with Liqo's spreading":                            f.guest(f.slice, "shop-rome", podAntiAffinity(corev1.PodAffinityTerm{TopologyKey: corev1.LabelHostname, LabelSelector: &metav1.LabelSelector{}})),
		"a guest with init containers":                             f.guest(f.slice, "shop-rome", initContainers(false, "50m", "2500m", "2", "0.1")),
		"a guest with an idle sidecar":                             f.guest(f.slice, "shop-rome", initContainers(true, "0")),
		"a guest with sidecars":                                    f.guest(f.slice, "shop-rome", initContainers(true, "150m", "50m")),
		"a guest of a peering by hand":                             f.guest(f.admin, "shop-oslo", func(s *corev1.PodSpec) { s.HostPID = true }),
		"labelling a guest":                                        f.labelGuest,
		"annotating a guest":                                       f.patch(f.slice, f.storedGuest(), `{"metadata":{"annotations":{"cluster-autoscaler.kubernetes.io/safe-to-evict":"true","note":"x"}}}`),
		"deleting a guest":                                         f.delete(f.slice, f.storedGuest(), client.PropagationPolicy(metav1.DeletePropagationBackground)),
		"deleting a guest after its pod":                           f.delete(f.slice, f.storedGuest(), client.PropagationPolicy(metav1.DeletePropagationForeground)),
		"deleting a slice":                                         f.delete(f.controlPlane, stored),
		"keeping a slice of this cluster until its copy is gone":   f.patch(liqo, stored, `{"metadata":{"finalizers":["crdreplicator.liqo.io/resource"]}}`),
		"the pod of a guest":                                       f.createPod(func(*corev1.Pod) {}),
		"a namespace of its own":                                   f.create(f.controlPlane, func() client.Object { return namespaceMap(map[string]any{"shop": "shop-rome"}) }),
		"as many namespaces as it may use":                         f.create(f.controlPlane, func() client.Object { return namespaceMap(mappings(100)) }),
		"no namespace":                                             f.create(f.controlPlane, func() client.Object { return namespaceMap(nil) }),
		"fewer namespaces than before":                             f.patch(f.controlPlane, maps.many, `{"spec":{"desiredMapping":{"x1":null}}}`),
		"renewing its certificate":                                 f.create(f.controlPlane, func() client.Object { return renew("controlplane-paris") }),
		"deleting the finalizer of Liqo by itself":                 f.patch(liqo, maps.many, `{"metadata":{"finalizers":null}}`),
		"deleting its NamespaceMap":                                f.delete(f.controlPlane, maps.many),
		"deleting a NamespaceMap while its namespaces are deleted": f.delete(f.controlPlane, maps.ending),
		"deleting a tenant namespace":                              f.delete(namespaces, maps.pending),
		"a slice of a peering by hand":                             f.create(f.admin, func() client.Object { return resourceSlice("liqo-tenant-oslo", "default") }),
		"the status by Liqo":                                       status(liqo),
		"the status by the agent":                                  status(agent),
		"other resources of the slice":                             f.patch(f.controlPlane, stored, `{"spec":{"resources":{"cpu":"9"}}}`),
		"a Service of type ClusterIP":                              f.create(f.slice, func() client.Object { return service(corev1.ServiceTypeClusterIP) }),
		"a Secret":                                                 f.create(f.slice, func() client.Object { return &corev1.Secret{ObjectMeta: within("shop-rome", "key")} }),
		"an Event of this cluster":                                 f.create(f.admin, func() client.Object { return event("another") }),
		"the mapping of this cluster": f.create(liqo, func() client.Object {
			return toReplicate(liqoObject("offloading", "NamespaceMap", "liqo-tenant-rome", "rome", map[string]any{"desiredMapping": map[string]any{"shop": "shop-paris"}}))
		}),
		"the slice of this cluster": f.create(agent, func() client.Object {
			return toReplicate(liqoObject("authentication", "ResourceSlice", "liqo-tenant-rome", "spillway-rome", map[string]any{"class": "spillway", "providerClusterID": "rome"}))
		}),
		"renewing a certificate of this cluster": f.create(liqo, func() client.Object { return toReplicate(renew("controlplane-rome")) }),
	}
}

// nodesOfItsOwn selects nodes as Liqo's VirtualNode may. The last term matches no node.
func nodesOfItsOwn(s *corev1.PodSpec) {
	s.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution = guest.NodeAffinity(&corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{
		{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "zone", Operator: corev1.NodeSelectorOpIn, Values: []string{"a"}}}},
		{MatchFields: []corev1.NodeSelectorRequirement{{Key: "metadata.name", Operator: corev1.NodeSelectorOpNotIn, Values: []string{"n"}}}},
		{},
	}})
}

// createPod returns a request by which Liqo creates the pod of a guest.
func (f *liqoFixture) createPod(change func(*corev1.Pod)) func() error {
	liqo := impersonating(f.t, f.config, "system:serviceaccount:liqo:liqo-controller-manager", "system:masters", "system:serviceaccounts", "system:serviceaccounts:liqo")
	return f.create(liqo, func() client.Object {
		pod := &corev1.Pod{ObjectMeta: within("shop-rome", "another"), Spec: guestSpec()}
		pod.Spec.PriorityClassName = "spillway-guest"
		change(pod)
		return pod
	})
}

// testLaterAppArmor: Liqo copies to the pod the annotations that its ShadowPod gets later, and the
// API server takes no such one.
func (f *liqoFixture) testLaterAppArmor(t *testing.T) {
	pod := &corev1.Pod{ObjectMeta: within("shop-rome", "running"), Spec: guestSpec()}
	expect.NoError(t, f.admin.Create(t.Context(), pod))
	err := f.patch(f.admin, pod, `{"metadata":{"annotations":{"`+appArmor+`":"unconfined"}}}`)()
	if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "AppArmor") {
		t.Errorf("no AppArmor, by an annotation after the pod is created: %v", err)
	}
}

// storedGuest identifies the guest that exists.
func (f *liqoFixture) storedGuest() *unstructured.Unstructured {
	return shadowPod(f.t, "shop-rome", "stored", func(*corev1.PodSpec) {})
}

func (f *liqoFixture) labelGuest() error {
	return f.patch(f.slice, f.storedGuest(), `{"metadata":{"labels":{"app":"web"}}}`)()
}

func (f *liqoFixture) delete(c client.Client, object client.Object, options ...client.DeleteOption) func() error {
	return func() error {
		return c.Delete(f.t.Context(), object.DeepCopyObject().(client.Object), append(options, client.DryRunAll)...)
	}
}

// deletionAttacks free Liqo's quota and keep what uses it.
func (f *liqoFixture) deletionAttacks(slice *unstructured.Unstructured) []attack {
	const finalizers = `{"metadata":{"finalizers":["example.com/keep"]}}`
	policy, orphan := []string{"spillway-deletion"}, client.PropagationPolicy(metav1.DeletePropagationOrphan)
	former := &metav1.DeleteOptions{}
	expect.NoError(f.t, json.Unmarshal([]byte(`{"orphanDependents":true}`), former))
	return []attack{
		{"deleting a guest, but not its pod", f.delete(f.slice, f.storedGuest(), orphan), policy, "without propagationPolicy Orphan"},
		{"deleting a guest, but not its pod, by the option's former name", f.delete(f.slice, f.storedGuest(), &client.DeleteOptions{Raw: former}), policy, "without propagationPolicy Orphan"},
		{"a guest that cannot be deleted", f.create(f.slice, func() client.Object {
			shadow := shadowPod(f.t, "shop-rome", "another", func(*corev1.PodSpec) {})
			shadow.SetFinalizers([]string{"example.com/keep"})
			return shadow
		}), policy, "remove metadata.finalizers"},
		{"keeping a guest from being deleted", f.patch(f.slice, f.storedGuest(), finalizers), policy, "remove metadata.finalizers"},
		{"keeping a guest from being deleted, but not its pod", f.patch(f.slice, f.storedGuest(), `{"metadata":{"finalizers":["orphan"]}}`), policy, "remove metadata.finalizers"},
		{"deleting a slice, but not its quota", f.delete(f.controlPlane, slice, orphan), policy, "without propagationPolicy Orphan"},
		{"keeping a slice from being deleted", f.patch(f.controlPlane, slice, finalizers), policy, "remove metadata.finalizers"},
	}
}

func (f *liqoFixture) patch(c client.Client, object client.Object, patch string) func() error {
	return func() error {
		return c.Patch(f.t.Context(), object.DeepCopyObject().(client.Object), client.RawPatch("application/merge-patch+json", []byte(patch)), client.DryRunAll)
	}
}

func (f *liqoFixture) writeStatus(c client.Client, object client.Object) func() error {
	return func() error {
		patch := client.RawPatch("application/merge-patch+json", []byte(`{"status":{"resources":{"cpu":"999"}}}`))
		return c.Status().Patch(f.t.Context(), object.DeepCopyObject().(client.Object), patch, client.DryRunAll)
	}
}

func service(kind corev1.ServiceType) *corev1.Service {
	s := &corev1.Service{ObjectMeta: within("shop-rome", "web"), Spec: corev1.ServiceSpec{Type: kind, Ports: []corev1.ServicePort{{Port: 80}}}}
	if kind == corev1.ServiceTypeExternalName {
		s.Spec = corev1.ServiceSpec{Type: kind, ExternalName: "example.org"}
	}
	return s
}

// replicationAttacks are those of a consumer's crd-replicator.
func (f *liqoFixture) replicationAttacks(stored *unstructured.Unstructured) []attack {
	another := func(class string) func() error {
		return f.create(f.controlPlane, func() client.Object {
			s := resourceSlice("liqo-tenant-rome", class)
			s.SetName("another")
			return s
		})
	}
	return []attack{
		{"a slice of Liqo's default class", another("default"), []string{"spillway-replicas"}, "class spillway"},
		{"a slice of no class", another(""), []string{"spillway-replicas"}, "class spillway"},
		{"another class in an update", f.patch(f.controlPlane, stored, `{"spec":{"class":"default"}}`), []string{"spillway-replicas"}, "class spillway"},
		{"granting itself capacity", f.writeStatus(f.controlPlane, stored), []string{"spillway-replicas"}, "only Liqo and Spillway"},
		{"another slice", another("spillway"), []string{"spillway-replicas"}, "spillway-paris"},
		{"another Renew", f.create(f.controlPlane, func() client.Object { return renew("another") }), []string{"spillway-replicas"}, "controlplane-paris"},
	}
}

// mappingAttacks make Liqo create namespaces.
func (f *liqoFixture) mappingAttacks(maps *namespaceMaps) []attack {
	policy := []string{"spillway-namespace-maps"}
	mapping := func(mapping map[string]any) func() error {
		return f.create(f.controlPlane, func() client.Object { return namespaceMap(mapping) })
	}
	return []attack{
		{"mapping onto a namespace of others", mapping(map[string]any{"shop": "production"}), policy, "-rome"},
		{"mapping onto kube-system", mapping(map[string]any{"kube": "kube-system"}), policy, "-rome"},
		{"mapping onto the namespace of a peering", mapping(map[string]any{"liqo-tenant-new": "liqo-tenant-new-rome"}), policy, "liqo-tenant-"},
		{"ten thousand namespaces", mapping(mappings(10000)), policy, "100 namespaces"},
		{"one namespace too many", mapping(mappings(101)), policy, "100 namespaces"},
		{"even more namespaces than before an upgrade", f.patch(f.controlPlane, maps.many, `{"spec":{"desiredMapping":{"x1":null,"shop":"shop-rome"}}}`), policy, "100 namespaces"},
		{"others for namespaces that are being deleted", f.patch(f.controlPlane, maps.ending, `{"spec":{"desiredMapping":{"shop":"shop-rome"}}}`), policy, "100 namespaces"},
		{"unmapping a namespace that Liqo is creating", f.patch(f.controlPlane, maps.pending, `{"spec":{"desiredMapping":null}}`), policy, "try again"},
		{"deleting the map of a namespace that Liqo is creating", f.delete(f.controlPlane, maps.pending), policy, "try again"},
		{"deleting a NamespaceMap before its namespaces", f.patch(f.controlPlane, maps.many, `{"metadata":{"finalizers":null}}`), policy, "finalizers"},
		{"another NamespaceMap", f.create(f.controlPlane, func() client.Object {
			another := namespaceMap(nil)
			another.SetName("another")
			return another
		}), policy, "NamespaceMap paris"},
	}
}

// originAttacks make Liqo take an object for one of another cluster: from label originID come
// the group to which it gives permissions in a namespace, and the namespace's consumer.
func (f *liqoFixture) originAttacks(slice, many *unstructured.Unstructured) []attack {
	policy := []string{"spillway-replicas"}
	labelled := func(label string, value any) string {
		text, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": map[string]any{label: value}}})
		expect.NoError(f.t, err)
		return string(text)
	}
	from := func(origin string) func() error {
		return f.create(f.controlPlane, func() client.Object {
			forged := namespaceMap(map[string]any{"shop": "shop-rome"})
			forged.SetLabels(map[string]string{"liqo.io/originID": origin, "liqo.io/replicated": "true"})
			return forged
		})
	}
	return []attack{
		{"a namespace for every control plane", from("liqo.io"), policy, "liqo.io/originID=rome"},
		{"a namespace of another consumer", from("berlin"), policy, "liqo.io/originID=rome"},
		{"a namespace of no consumer", from(""), policy, "liqo.io/originID=rome"},
		{"the next namespaces for every control plane", f.patch(f.controlPlane, many, labelled("liqo.io/originID", "liqo.io")), policy, "liqo.io/originID=rome"},
		{"the next namespaces of no consumer", f.patch(f.controlPlane, many, labelled("liqo.io/originID", nil)), policy, "liqo.io/originID=rome"},
		{"a slice of another consumer", f.patch(f.controlPlane, slice, labelled("liqo.io/originID", "berlin")), policy, "liqo.io/originID=rome"},
		{"namespaces of this cluster at another provider", f.patch(f.controlPlane, many, labelled("liqo.io/replication", "true")), policy, "liqo.io/replication=true"},
		{"a slice of this cluster", f.patch(f.controlPlane, slice, labelled("liqo.io/replication", "true")), policy, "liqo.io/replication=true"},
	}
}

// event is one about a guest.
func event(name string) *corev1.Event {
	return &corev1.Event{ObjectMeta: within("shop-rome", name), InvolvedObject: corev1.ObjectReference{Kind: "Pod", Namespace: "shop-rome", Name: "web"}}
}

// objectAttacks are objects beside guests, in the namespace of guests and elsewhere.
func (f *liqoFixture) objectAttacks() []attack {
	objects := []string{"spillway-guest-objects"}
	token := func() client.Object {
		meta := within("shop-rome", "token")
		meta.Annotations = map[string]string{corev1.ServiceAccountNameKey: "default"}
		return &corev1.Secret{ObjectMeta: meta, Type: corev1.SecretTypeServiceAccountToken}
	}
	external := func() client.Object {
		s := service(corev1.ServiceTypeClusterIP)
		s.Spec.ExternalIPs = []string{"192.0.2.1"}
		return s
	}
	claim := func() client.Object {
		return &corev1.PersistentVolumeClaim{ObjectMeta: within("shop-rome", "data"), Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, Resources: corev1.VolumeResourceRequirements{Requests: expect.Resources("storage", "1Ti")},
		}}
	}
	read := func(namespace string) func() error { return readSecret(f.t, f.slice, namespace, "private") }
	exec := func() error { return execInto(f.t, f.config, "spillway-paris", "rome") }
	return []attack{
		{"a Service of type NodePort", f.create(f.slice, func() client.Object { return service(corev1.ServiceTypeNodePort) }), objects, "NodePort"},
		{"a Service of type LoadBalancer", f.create(f.slice, func() client.Object { return service(corev1.ServiceTypeLoadBalancer) }), objects, "LoadBalancer"},
		{"a Service of type ExternalName", f.create(f.slice, func() client.Object { return service(corev1.ServiceTypeExternalName) }), objects, "ExternalName"},
		{"a Service with an external IP", f.create(f.slice, external), objects, "externalIPs"},
		{"a ServiceAccount token", f.create(f.slice, token), objects, "service-account-token"},
		{"a PersistentVolumeClaim", f.create(f.slice, claim), objects, "PersistentVolumeClaim"},
		{"an Event", f.create(f.slice, func() client.Object { return event("another") }), objects, "Events"},
		{"changing an Event", f.patch(f.slice, event("stored"), `{"message":"x"}`), objects, "Events"},
		{"the provider's Secrets", read("default"), []string{"RBAC"}, "cannot get resource"},
		{"a Secret of the peering", read("liqo-tenant-rome"), []string{"RBAC"}, "cannot get resource"},
		{"exec into a pod of the provider", exec, []string{"RBAC"}, "cannot create resource"},
		{"a guest in a namespace without limits", f.guest(f.slice, "new-rome", func(*corev1.PodSpec) {}), []string{"spillway-guests"}, "add that to the value liqo.otherPeers"},
		{"a pod in another namespace", f.create(f.slice, func() client.Object { return &corev1.Pod{ObjectMeta: within("default", "x"), Spec: guestSpec()} }), []string{"RBAC"}, "cannot create resource"},
		{"a guest in another namespace", f.guest(f.slice, "default", func(*corev1.PodSpec) {}), []string{"RBAC"}, "cannot create resource"},
	}
}

const appArmor = "container.apparmor.security.beta.kubernetes.io/c"

// annotationAttacks run a guest without AppArmor, or one that keeps its node: Liqo copies the
// annotations of the ShadowPod when it creates the pod, and the API server makes fields of some.
func (f *liqoFixture) annotationAttacks() []attack {
	const policy, evict = "spillway-guests", "cluster-autoscaler.kubernetes.io/safe-to-evict"
	return []attack{
		{"no AppArmor, by an annotation", f.createPod(func(p *corev1.Pod) { p.Annotations = map[string]string{appArmor: "unconfined"} }), []string{"Pod Security"}, "violates PodSecurity"},
		{"a guest that keeps its node", f.create(f.slice, func() client.Object {
			shadow := shadowPod(f.t, "shop-rome", "another", func(*corev1.PodSpec) {})
			shadow.SetAnnotations(map[string]string{evict: "false"})
			return shadow
		}), []string{policy}, "safe-to-evict"},
		{"keeping its node later", f.patch(f.slice, f.storedGuest(), `{"metadata":{"annotations":{"`+evict+`":"false"}}}`), []string{policy}, "safe-to-evict"},
		// Liqo creates its pod again if that is deleted.
		{"a guest of the cluster's default priority", f.patch(f.slice, f.storedGuest(), `{"spec":{"pod":{"priorityClassName":null}}}`), []string{policy}, "PriorityClass spillway-guest"},
		{"a guest that does not wait for its next place", f.patch(f.slice, f.storedGuest(), `{"spec":{"pod":{"schedulingGates":null}}}`), []string{policy}, "hand-over"},
	}
}

// initContainers adds an init container, or a sidecar, for each of some requests of CPU.
func initContainers(sidecars bool, cpu ...string) func(*corev1.PodSpec) {
	return func(s *corev1.PodSpec) {
		for i, amount := range cpu {
			c := *s.Containers[0].DeepCopy()
			c.Name, c.Resources = fmt.Sprintf("i%d", i), corev1.ResourceRequirements{Requests: expect.Resources("cpu", amount, "memory", "0"), Limits: expect.Resources("memory", "1Mi")}
			if sidecars {
				c.RestartPolicy = ptr.To(corev1.ContainerRestartPolicyAlways)
			}
			s.InitContainers = append(s.InitContainers, c)
		}
	}
}

// podAttacks are those that a ShadowPod alone allows.
func (f *liqoFixture) podAttacks() []podAttack {
	return []podAttack{
		{"a priority class", func(s *corev1.PodSpec) { s.PriorityClassName = "system-node-critical" }, "PriorityClass spillway-guest"},
		{"a priority", func(s *corev1.PodSpec) { p := int32(1000); s.Priority = &p }, "no priority but that of"},
		// As while no replica of the agent answers the webhook.
		{"a guest without the priority of guests", func(s *corev1.PodSpec) { s.PriorityClassName = "" }, "PriorityClass spillway-guest"},
		{"a guest that does not wait for its place", func(s *corev1.PodSpec) { s.SchedulingGates = nil }, "hand-over"},
		{"a ServiceAccount", func(s *corev1.PodSpec) { s.ServiceAccountName = "admin" }, "ServiceAccount"},
		{"a ServiceAccount by the field's former name", func(s *corev1.PodSpec) { s.DeprecatedServiceAccount = "admin" }, "ServiceAccount"},
		{"a token", func(s *corev1.PodSpec) { s.AutomountServiceAccountToken = nil }, "token"},
		{"a projected token", volume(corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{{
			ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "token"},
		}}}}), "volumes of type"},
	}
}

// requestAttacks use more than Liqo's quota counts.
func (f *liqoFixture) requestAttacks() []podAttack {
	return []podAttack{
		{"a limit without a request, which would be the request of its pod", func(s *corev1.PodSpec) {
			s.Containers[0].Resources.Limits["nvidia.com/gpu"] = resource.MustParse("8")
		}, "its requests"},
		{"a limit of an init container without a request", func(s *corev1.PodSpec) {
			s.InitContainers = []corev1.Container{*s.Containers[0].DeepCopy()}
			s.InitContainers[0].Name, s.InitContainers[0].Resources = "i", corev1.ResourceRequirements{Limits: expect.Resources("cpu", "64")}
		}, "its requests"},
		// As while no replica of the agent answers the webhook.
		{"a guest that may use the whole memory of its node", func(s *corev1.PodSpec) { s.Containers[0].Resources.Limits = nil }, "memory limit"},
		{"an init container that may", func(s *corev1.PodSpec) {
			initContainers(false, "1m")(s)
			s.InitContainers[0].Resources.Limits = nil
		}, "memory limit"},
		{"resources of the pod, which Liqo's quota does not count", func(s *corev1.PodSpec) {
			s.Resources = &corev1.ResourceRequirements{Requests: expect.Resources("cpu", "64")}
		}, "spec.resources"},
		{"a negative request, which frees Liqo's quota", func(s *corev1.PodSpec) {
			s.Containers[0].Resources.Requests["cpu"] = resource.MustParse("-64")
		}, "less than nothing"},
		{"a negative request of an init container", initContainers(false, "-1"), "less than nothing"},
	}
}

// sidecarAttacks use what Liqo's quota does not count. The pod that Liqo creates is refused.
func sidecarAttacks() []podAttack {
	const exceeded = "exceeded quota: spillway-guests"
	return []podAttack{
		{"a sidecar, which Liqo's quota does not add", initContainers(true, "64"), exceeded},
		{"a small sidecar", initContainers(true, "1m"), exceeded},
		{"a sidecar that starts before an init container", func(s *corev1.PodSpec) {
			initContainers(true, "1", "0")(s)
			s.InitContainers[1].RestartPolicy = nil
			s.InitContainers[1].Resources.Requests["cpu"] = resource.MustParse("64")
		}, exceeded},
		{"an init container that Liqo takes for one of the same size", initContainers(false, "1m", "1"), exceeded},
		{"the device of a sidecar", func(s *corev1.PodSpec) {
			initContainers(true, "0", "0")(s)
			for i := range s.InitContainers {
				s.InitContainers[i].Resources = corev1.ResourceRequirements{Requests: expect.Resources("nvidia.com/gpu", "1", "cpu", "0"), Limits: expect.Resources("nvidia.com/gpu", "1")}
			}
		}, exceeded},
	}
}

// quota is the ResourceQuota of a namespace for guests, which has room for the guest of guestSpec.
func (f *liqoFixture) quota() guard {
	f.t.Helper()
	spec := guestSpec()
	hard := corev1.ResourceList{"requests.nvidia.com/gpu": resource.MustParse("1"), "requests.cpu": spec.Containers[0].Resources.Requests["cpu"]}
	quota := &corev1.ResourceQuota{ObjectMeta: within("shop-rome", "spillway-guests"), Spec: corev1.ResourceQuotaSpec{Hard: hard}}
	expect.NoError(f.t, f.admin.Create(f.t.Context(), quota))
	quota.Status = corev1.ResourceQuotaStatus{Hard: hard, Used: expect.Resources("requests.nvidia.com/gpu", "0", "requests.cpu", "0")}
	expect.NoError(f.t, f.admin.Status().Update(f.t.Context(), quota))
	return guard{"ResourceQuota", func() error { return f.admin.Delete(f.t.Context(), quota) }}
}
