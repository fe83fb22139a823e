package liqo

import (
	"bytes"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"text/template"

	authv1beta1 "github.com/liqotech/liqo/apis/authentication/v1beta1"
	offloadingv1beta1 "github.com/liqotech/liqo/apis/offloading/v1beta1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/e2e/lab/binaries"
)

// policies are those of the agent's chart with its default values.
func policies(t testing.TB, files ...string) []*unstructured.Unstructured {
	t.Helper()
	root, err := binaries.Root()
	if err != nil {
		t.Fatal(err)
	}
	chart := template.New("").Funcs(template.FuncMap{
		"nindent": func(_ int, text string) string { return " " + text },
		"include": func(name string, _ any) string {
			return map[string]string{"spillway-agent.schedulerName": "spillway-scheduler", "spillway-agent.labels": "{}"}[name]
		},
	})
	var objects []*unstructured.Unstructured
	for _, file := range files {
		parsed, err := chart.ParseFiles(filepath.Join(root, "charts/agent/templates", file))
		if err != nil {
			t.Fatal(err)
		}
		var rendered bytes.Buffer
		values := map[string]any{"driver": "liqo", "scheduler": map[string]any{"mode": "beside"}}
		if err := parsed.ExecuteTemplate(&rendered, file, map[string]any{"Values": values, "Release": map[string]any{"Namespace": "spillway-system"}}); err != nil {
			t.Fatal(err)
		}
		decoder := yaml.NewYAMLOrJSONDecoder(&rendered, 4096)
		for {
			object := &unstructured.Unstructured{}
			if decoder.Decode(object) != nil {
				break
			}
			if strings.HasPrefix(object.GetKind(), "ValidatingAdmissionPolicy") {
				objects = append(objects, object)
			}
		}
	}
	if len(objects) == 0 {
		t.Fatalf("no policies in %v", files)
	}
	return objects
}

// policyTest is an API server with the chart's policies and clients of those who are
// subject to them.
type policyTest struct {
	t                                               *testing.T
	admin, rome, oslo, ourScheduler, otherScheduler client.Client
}

// policyCase is a request that is allowed if rejected is empty, else rejected with
// that text.
type policyCase struct {
	name     string
	request  func() error
	rejected string
}

// TestPolicies checks on a real API server what the chart's policies reject and what
// they allow.
func TestPolicies(t *testing.T) {
	t.Parallel()
	p := newPolicyTest(t)
	for _, tc := range slices.Concat(p.guestCases(), p.replicationCases(), p.bindingCases()) {
		t.Run(tc.name, func(t *testing.T) {
			err := tc.request()
			switch {
			case tc.rejected == "" && err != nil:
				t.Fatalf("rejected: %v", err)
			case tc.rejected != "" && (!apierrors.IsForbidden(err) || !strings.Contains(err.Error(), tc.rejected)):
				t.Fatalf("want a rejection with %q, got %v", tc.rejected, err)
			}
		})
	}
}

func newPolicyTest(t *testing.T) *policyTest {
	config := controlplane.Start(t, liqoCRDs(t))
	as := func(user string, groups ...string) client.Client {
		impersonating := rest.CopyConfig(config)
		// With all permissions, so that only a policy can reject.
		impersonating.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: append(groups, "system:masters", "system:authenticated")}
		return newClient(t, impersonating)
	}
	p := &policyTest{
		t: t, admin: newClient(t, config), rome: as("rome", "liqo.io"), oslo: as("oslo", "liqo.io"),
		ourScheduler: as("system:serviceaccount:spillway-system:spillway-scheduler"), otherScheduler: as("system:kube-scheduler"),
	}
	ctx := t.Context()
	for _, namespace := range []*corev1.Namespace{
		{ObjectMeta: metav1.ObjectMeta{Name: "liqo-tenant-rome", Labels: managedLabels("rome")}},
		{ObjectMeta: metav1.ObjectMeta{Name: "liqo-tenant-oslo", Labels: map[string]string{"liqo.io/remote-cluster-id": "oslo"}}},
	} {
		expect.NoError(t, p.admin.Create(ctx, namespace))
	}
	for _, object := range policies(t, "binding.yaml", "liqo-consumers.yaml") {
		if err := p.admin.Create(ctx, object); err != nil {
			t.Fatalf("%s %s: %v", object.GetKind(), object.GetName(), err)
		}
	}
	expect.Eventually(t, "the policies take effect", func() (bool, string) {
		for probe, err := range map[string]error{
			"binding":       p.admin.Create(ctx, pod("probe", func(p *corev1.Pod) { p.Spec.NodeName = "spillway-paris" }), client.DryRunAll),
			"ResourceSlice": p.rome.Create(ctx, slice("liqo-tenant-rome", "probe", "default"), client.DryRunAll),
			"NamespaceMap":  p.rome.Create(ctx, namespaceMap("probe", map[string]string{"a": "b"}), client.DryRunAll),
			"ShadowPod":     p.rome.Create(ctx, shadowPod("probe", func(p *corev1.PodSpec) { p.HostPID = true }), client.DryRunAll),
		} {
			if err == nil {
				return false, probe + " is still allowed"
			}
		}
		return true, ""
	})
	return p
}

func slice(namespace, name string, class authv1beta1.ResourceSliceClass) *authv1beta1.ResourceSlice {
	return &authv1beta1.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: authv1beta1.ResourceSliceSpec{Class: class, Resources: expect.Resources("cpu", "1")}}
}

func namespaceMap(name string, mapping map[string]string) *offloadingv1beta1.NamespaceMap {
	return &offloadingv1beta1.NamespaceMap{ObjectMeta: metav1.ObjectMeta{Namespace: "liqo-tenant-rome", Name: name}, Spec: offloadingv1beta1.NamespaceMapSpec{DesiredMapping: mapping}}
}

func pod(name string, change func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}}}
	change(p)
	return p
}

// daemon makes a pod one of a DaemonSet for a node.
func daemon(node string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "proxy", UID: "1"}}
		p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
			MatchFields: []corev1.NodeSelectorRequirement{{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{node}}},
		}}}}}
	}
}

func shadowPod(name string, change func(*corev1.PodSpec)) *offloadingv1beta1.ShadowPod {
	p := &offloadingv1beta1.ShadowPod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
	p.Spec.Pod.Containers = []corev1.Container{{Name: "c", Image: "i", SecurityContext: &corev1.SecurityContext{}}}
	change(&p.Spec.Pod)
	return p
}

func (p *policyTest) createGuest(name string, change func(*corev1.PodSpec)) func() error {
	return func() error { return p.rome.Create(p.t.Context(), shadowPod(name, change)) }
}

func (p *policyTest) bind(c client.Client, name, node string) error {
	object := pod(name, func(*corev1.Pod) {})
	expect.NoError(p.t, p.admin.Create(p.t.Context(), object))
	return c.SubResource("binding").Create(p.t.Context(), object, &corev1.Binding{Target: corev1.ObjectReference{Kind: "Node", Name: node}})
}

// guestCases are ShadowPods of a consumer.
func (p *policyTest) guestCases() []policyCase {
	return []policyCase{
		{"an ordinary guest", p.createGuest("plain", func(p *corev1.PodSpec) {
			p.Containers[0].SecurityContext.Capabilities = &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}, Add: []corev1.Capability{"NET_BIND_SERVICE"}}
			p.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: 80}}
			p.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
			p.Priority = new(int32)
		}), ""},
		{"a privileged guest", p.createGuest("g1", func(p *corev1.PodSpec) { p.Containers[0].SecurityContext.Privileged = ptr.To(true) }), "privileged"},
		{"a privileged init container", p.createGuest("g2", func(p *corev1.PodSpec) {
			p.InitContainers = []corev1.Container{{Name: "i", Image: "i", SecurityContext: &corev1.SecurityContext{Privileged: ptr.To(true)}}}
		}), "privileged"},
		{"a guest with a capability", p.createGuest("g3", func(p *corev1.PodSpec) {
			p.Containers[0].SecurityContext.Capabilities = &corev1.Capabilities{Add: []corev1.Capability{"SYS_ADMIN"}}
		}), "capabilities"},
		{"a guest with the node's files", p.createGuest("g4", func(p *corev1.PodSpec) {
			p.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/"}}}}
		}), "hostPath"},
		{"a guest on the node's network", p.createGuest("g5", func(p *corev1.PodSpec) { p.HostNetwork = true }), "hostNetwork"},
		{"a guest on a node's port", p.createGuest("g6", func(p *corev1.PodSpec) {
			p.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: 80, HostPort: 80}}
		}), "hostPort"},
		{"a guest with a node name", p.createGuest("g7", func(p *corev1.PodSpec) { p.NodeName = "n" }), "choose its node"},
		{"a guest with a priority class", p.createGuest("g8", func(p *corev1.PodSpec) { p.PriorityClassName = "system-node-critical" }), "priority class"},
	}
}

// replicationCases are objects that a consumer's crd-replicator writes.
func (p *policyTest) replicationCases() []policyCase {
	return []policyCase{
		{"a slice of ours", func() error { return p.rome.Create(p.t.Context(), slice("liqo-tenant-rome", "a", SliceClass)) }, ""},
		{"a slice of the default class", func() error { return p.rome.Create(p.t.Context(), slice("liqo-tenant-rome", "b", "default")) }, "class spillway"},
		{"a slice of no class", func() error { return p.rome.Create(p.t.Context(), slice("liqo-tenant-rome", "c", "")) }, "class spillway"},
		{"another class in an update", func() error {
			s := read(p.t, p.admin, "liqo-tenant-rome", "a", &authv1beta1.ResourceSlice{})
			s.Spec.Class = "default"
			return p.rome.Update(p.t.Context(), s)
		}, "class spillway"},
		{"other resources in an update", func() error {
			s := read(p.t, p.admin, "liqo-tenant-rome", "a", &authv1beta1.ResourceSlice{})
			s.Spec.Resources = expect.Resources("cpu", "9")
			return p.rome.Update(p.t.Context(), s)
		}, ""},
		{"a status written by the consumer", func() error {
			s := read(p.t, p.admin, "liqo-tenant-rome", "a", &authv1beta1.ResourceSlice{})
			s.Status.Resources = expect.Resources("cpu", "9")
			return p.rome.Status().Update(p.t.Context(), s)
		}, "only the provider may write the status"},
		{"a status written by the provider", func() error {
			s := read(p.t, p.admin, "liqo-tenant-rome", "a", &authv1beta1.ResourceSlice{})
			s.Status.Resources = expect.Resources("cpu", "9")
			return p.admin.Status().Update(p.t.Context(), s)
		}, ""},
		{"a manual peering", func() error { return p.oslo.Create(p.t.Context(), slice("liqo-tenant-oslo", "a", "default")) }, ""},
		{"a namespace of its own", func() error {
			return p.rome.Create(p.t.Context(), namespaceMap("a", map[string]string{"shop": "shop-rome"}))
		}, ""},
		{"no namespace", func() error { return p.rome.Create(p.t.Context(), namespaceMap("b", nil)) }, ""},
		{"a namespace of others", func() error {
			return p.rome.Create(p.t.Context(), namespaceMap("c", map[string]string{"shop": "production"}))
		}, "named <its own name>-rome"},
	}
}

// bindingCases are pods on nodes.
func (p *policyTest) bindingCases() []policyCase {
	return []policyCase{
		{"bound by our scheduler", func() error { return p.bind(p.ourScheduler, "ours", "spillway-paris") }, ""},
		{"bound by another", func() error { return p.bind(p.otherScheduler, "theirs", "spillway-paris") }, "may bind pods to it, not system:kube-scheduler"},
		{"bound to a real node", func() error { return p.bind(p.otherScheduler, "elsewhere", "worker") }, ""},
		{"created with a virtual node", func() error {
			return p.otherScheduler.Create(p.t.Context(), pod("placed", func(p *corev1.Pod) { p.Spec.NodeName = "spillway-paris" }))
		}, "leave spec.nodeName empty"},
		{"created with a real node", func() error {
			return p.otherScheduler.Create(p.t.Context(), pod("static", func(p *corev1.Pod) { p.Spec.NodeName = "worker" }))
		}, ""},
		{"a daemon for a virtual node", func() error { return p.admin.Create(p.t.Context(), pod("proxy-a", daemon("spillway-paris"))) }, "DaemonSets have no pods on virtual nodes"},
		{"a daemon for a real node", func() error { return p.admin.Create(p.t.Context(), pod("proxy-b", daemon("worker"))) }, ""},
		{"an ordinary pod", func() error { return p.admin.Create(p.t.Context(), pod("web", func(*corev1.Pod) {})) }, ""},
	}
}
