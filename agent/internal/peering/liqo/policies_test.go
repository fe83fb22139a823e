package liqo

import (
	"bytes"
	"path/filepath"
	"strings"
	"testing"
	"text/template"
	"time"

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
	"github.com/spillway-dev/spillway/e2e/lab/binaries"
)

// policies are those of the agent's chart, with its standard values.
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

// TestPolicies checks on a real API server what the chart's policies refuse and,
// as much, what they do not.
func TestPolicies(t *testing.T) {
	t.Parallel()
	config := controlplane.Start(t, liqoCRDs(t))
	admin := newClient(t, config)
	as := func(user string, groups ...string) client.Client {
		impersonating := rest.CopyConfig(config)
		// The right to do it all is lent, so that only a policy can refuse.
		impersonating.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: append(groups, "system:masters", "system:authenticated")}
		return newClient(t, impersonating)
	}
	ctx := t.Context()
	for _, namespace := range []*corev1.Namespace{
		{ObjectMeta: metav1.ObjectMeta{Name: "liqo-tenant-rome", Labels: ours("rome")}},
		{ObjectMeta: metav1.ObjectMeta{Name: "liqo-tenant-oslo", Labels: map[string]string{"liqo.io/remote-cluster-id": "oslo"}}},
	} {
		if err := admin.Create(ctx, namespace); err != nil {
			t.Fatal(err)
		}
	}
	for _, object := range policies(t, "binding.yaml", "liqo-consumers.yaml") {
		if err := admin.Create(ctx, object); err != nil {
			t.Fatalf("%s %s: %v", object.GetKind(), object.GetName(), err)
		}
	}
	rome, oslo := as("rome", "liqo.io"), as("oslo", "liqo.io")
	slice := func(namespace, name string, class authv1beta1.ResourceSliceClass) *authv1beta1.ResourceSlice {
		return &authv1beta1.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: authv1beta1.ResourceSliceSpec{Class: class, Resources: list("cpu", "1")}}
	}
	nsMap := func(name string, mapping map[string]string) *offloadingv1beta1.NamespaceMap {
		return &offloadingv1beta1.NamespaceMap{ObjectMeta: metav1.ObjectMeta{Namespace: "liqo-tenant-rome", Name: name}, Spec: offloadingv1beta1.NamespaceMapSpec{DesiredMapping: mapping}}
	}
	pod := func(name string, change func(*corev1.Pod)) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}}}
		change(p)
		return p
	}
	guest := func(name string, change func(*corev1.PodSpec)) *offloadingv1beta1.ShadowPod {
		p := &offloadingv1beta1.ShadowPod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
		p.Spec.Pod.Containers = []corev1.Container{{Name: "c", Image: "i", SecurityContext: &corev1.SecurityContext{}}}
		change(&p.Spec.Pod)
		return p
	}
	asGuest := func(name string, change func(*corev1.PodSpec)) func() error {
		return func() error { return rome.Create(ctx, guest(name, change)) }
	}
	daemon := func(node string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "proxy", UID: "1"}}
			p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchFields: []corev1.NodeSelectorRequirement{{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{node}}},
			}}}}}
		}
	}
	bind := func(c client.Client, name, node string) error {
		p := pod(name, func(*corev1.Pod) {})
		if err := admin.Create(ctx, p); err != nil {
			t.Fatal(err)
		}
		return c.SubResource("binding").Create(ctx, p, &corev1.Binding{Target: corev1.ObjectReference{Kind: "Node", Name: node}})
	}
	ourScheduler := as("system:serviceaccount:spillway-system:spillway-scheduler")
	theirScheduler := as("system:kube-scheduler")

	// Policies work a moment after they are made.
	deadline := time.Now().Add(30 * time.Second)
	for admin.Create(ctx, pod("probe", func(p *corev1.Pod) { p.Spec.NodeName = "spillway-paris" }), client.DryRunAll) == nil ||
		rome.Create(ctx, slice("liqo-tenant-rome", "probe", "default"), client.DryRunAll) == nil ||
		rome.Create(ctx, nsMap("probe", map[string]string{"a": "b"}), client.DryRunAll) == nil ||
		rome.Create(ctx, guest("probe", func(p *corev1.PodSpec) { p.HostPID = true }), client.DryRunAll) == nil {
		if time.Now().After(deadline) {
			t.Fatal("the policies do not work")
		}
		<-time.After(50 * time.Millisecond)
	}

	cases := []struct {
		name    string
		try     func() error
		refused string
	}{
		{"an ordinary guest", asGuest("plain", func(p *corev1.PodSpec) {
			p.Containers[0].SecurityContext.Capabilities = &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}, Add: []corev1.Capability{"NET_BIND_SERVICE"}}
			p.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: 80}}
			p.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
			p.Priority = new(int32)
		}), ""},
		{"a privileged guest", asGuest("g1", func(p *corev1.PodSpec) { p.Containers[0].SecurityContext.Privileged = ptr.To(true) }), "privileged"},
		{"a privileged init container", asGuest("g2", func(p *corev1.PodSpec) {
			p.InitContainers = []corev1.Container{{Name: "i", Image: "i", SecurityContext: &corev1.SecurityContext{Privileged: ptr.To(true)}}}
		}), "privileged"},
		{"a guest with a capability", asGuest("g3", func(p *corev1.PodSpec) {
			p.Containers[0].SecurityContext.Capabilities = &corev1.Capabilities{Add: []corev1.Capability{"SYS_ADMIN"}}
		}), "capabilities"},
		{"a guest on the node's files", asGuest("g4", func(p *corev1.PodSpec) {
			p.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/"}}}}
		}), "hostPath"},
		{"a guest on the node's network", asGuest("g5", func(p *corev1.PodSpec) { p.HostNetwork = true }), "hostNetwork"},
		{"a guest on a node's port", asGuest("g6", func(p *corev1.PodSpec) {
			p.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: 80, HostPort: 80}}
		}), "hostPort"},
		{"a guest that chooses its node", asGuest("g7", func(p *corev1.PodSpec) { p.NodeName = "n" }), "choose its node"},
		{"a guest of high rank", asGuest("g8", func(p *corev1.PodSpec) { p.PriorityClassName = "system-node-critical" }), "priority class"},
		{"a slice of ours", func() error { return rome.Create(ctx, slice("liqo-tenant-rome", "a", SliceClass)) }, ""},
		{"a slice of the default class", func() error { return rome.Create(ctx, slice("liqo-tenant-rome", "b", "default")) }, "class spillway"},
		{"a slice of no class", func() error { return rome.Create(ctx, slice("liqo-tenant-rome", "c", "")) }, "class spillway"},
		{"another class later", func() error {
			s := read(&world{t: t}, admin, "liqo-tenant-rome", "a", &authv1beta1.ResourceSlice{})
			s.Spec.Class = "default"
			return rome.Update(ctx, s)
		}, "class spillway"},
		{"more of ours later", func() error {
			s := read(&world{t: t}, admin, "liqo-tenant-rome", "a", &authv1beta1.ResourceSlice{})
			s.Spec.Resources = list("cpu", "9")
			return rome.Update(ctx, s)
		}, ""},
		{"a grant to itself", func() error {
			s := read(&world{t: t}, admin, "liqo-tenant-rome", "a", &authv1beta1.ResourceSlice{})
			s.Status.Resources = list("cpu", "9")
			return rome.Status().Update(ctx, s)
		}, "only the provider may write the status"},
		{"the provider's grant", func() error {
			s := read(&world{t: t}, admin, "liqo-tenant-rome", "a", &authv1beta1.ResourceSlice{})
			s.Status.Resources = list("cpu", "9")
			return admin.Status().Update(ctx, s)
		}, ""},
		{"a peering made by hand", func() error { return oslo.Create(ctx, slice("liqo-tenant-oslo", "a", "default")) }, ""},
		{"a namespace of its own", func() error { return rome.Create(ctx, nsMap("a", map[string]string{"shop": "shop-rome"})) }, ""},
		{"no namespace", func() error { return rome.Create(ctx, nsMap("b", nil)) }, ""},
		{"somebody else's namespace", func() error { return rome.Create(ctx, nsMap("c", map[string]string{"shop": "production"})) }, "named <its own name>-rome"},

		{"bound by our scheduler", func() error { return bind(ourScheduler, "ours", "spillway-paris") }, ""},
		{"bound by another", func() error { return bind(theirScheduler, "theirs", "spillway-paris") }, "may bind pods to it, not system:kube-scheduler"},
		{"bound to a real node", func() error { return bind(theirScheduler, "elsewhere", "worker") }, ""},
		{"created on a virtual node", func() error {
			return theirScheduler.Create(ctx, pod("placed", func(p *corev1.Pod) { p.Spec.NodeName = "spillway-paris" }))
		}, "leave spec.nodeName empty"},
		{"created on a real node", func() error {
			return theirScheduler.Create(ctx, pod("static", func(p *corev1.Pod) { p.Spec.NodeName = "worker" }))
		}, ""},
		{"a daemon for a virtual node", func() error { return admin.Create(ctx, pod("proxy-a", daemon("spillway-paris"))) }, "DaemonSets have no pods on virtual nodes"},
		{"a daemon for a real node", func() error { return admin.Create(ctx, pod("proxy-b", daemon("worker"))) }, ""},
		{"an ordinary pod", func() error { return admin.Create(ctx, pod("web", func(*corev1.Pod) {})) }, ""},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			err := tc.try()
			switch {
			case tc.refused == "" && err != nil:
				t.Fatalf("refused: %v", err)
			case tc.refused != "" && (!apierrors.IsForbidden(err) || !strings.Contains(err.Error(), tc.refused)):
				t.Fatalf("want a refusal with %q, got %v", tc.refused, err)
			}
		})
	}
}
