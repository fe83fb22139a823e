package charts_test

import (
	"bytes"
	"context"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/e2e/controlplane"
)

// as makes a client of a service account in the charts' namespace, or of
// whoever config is where it is "".
func as(t *testing.T, config *rest.Config, account string) client.Client {
	t.Helper()
	config = rest.CopyConfig(config)
	if account != "" {
		config.Impersonate = rest.ImpersonationConfig{
			UserName: "system:serviceaccount:" + namespace + ":" + account,
			Groups:   []string{"system:serviceaccounts", "system:serviceaccounts:" + namespace, "system:authenticated"},
		}
	}
	c, err := client.New(config, client.Options{Scheme: scheme.Scheme})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func named(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Name: name} }

func within(namespace, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: namespace, Name: name}
}

func podOn(node, name string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: within("default", name),
		Spec:       corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "c", Image: "pause"}}},
	}
}

func binding(namespace, role string) *rbacv1.RoleBinding {
	return &rbacv1.RoleBinding{
		ObjectMeta: within(namespace, "spillway-agent"),
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: "spillway-system", Name: "spillway-agent"}},
	}
}

// kubeconfig writes a file by which Helm reaches an API server.
func kubeconfig(t *testing.T, config *rest.Config) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	err := clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters:       map[string]*clientcmdapi.Cluster{"c": {Server: config.Host, CertificateAuthorityData: config.CAData}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{"u": {ClientCertificateData: config.CertData, ClientKeyData: config.KeyData}},
		Contexts:       map[string]*clientcmdapi.Context{"c": {Cluster: "c", AuthInfo: "u"}},
		CurrentContext: "c",
	}, path)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// Helm installs, upgrades and uninstalls both charts at an API server, which
// holds the programs to what the charts allow them.
func TestInstalledOnARealAPIServer(t *testing.T) {
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
	must(admin.Create(ctx, &corev1.Namespace{ObjectMeta: named("liqo")}))
	for chart, values := range everything {
		_, err := helm(t, append([]string{"install", "spillway-" + chart, chart, access, "--create-namespace"}, set(values)...)...)
		must(err)
	}

	for _, name := range []string{"worker", "spillway-paris"} {
		must(admin.Create(ctx, &corev1.Node{ObjectMeta: named(name)}))
	}
	// Pods need their namespace's service account, which no controller makes here.
	must(admin.Create(ctx, &corev1.ServiceAccount{ObjectMeta: within("default", "default")}))
	must(admin.Create(ctx, podOn("worker", "home")))
	must(admin.Create(ctx, podOn("", "away")))
	must(admin.Create(ctx, podOn("", "waiting")))
	must(admin.Create(ctx, &corev1.Secret{ObjectMeta: within("default", "private")}))
	must(admin.Create(ctx, &corev1.Secret{ObjectMeta: within(namespace, "private")}))

	agent, scheduler, broker := as(t, config, "spillway-agent"), as(t, config, "spillway-scheduler"), as(t, config, "spillway-broker")
	cordon := client.RawPatch(types.MergePatchType, []byte(`{"spec":{"unschedulable":true}}`))
	// A policy counts a moment after it is made.
	err := wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, 20*time.Second, true, func(ctx context.Context) (bool, error) {
		return apierrors.IsForbidden(agent.Patch(ctx, &corev1.Node{ObjectMeta: named("worker")}, cordon, client.DryRunAll)), nil
	})
	if err != nil {
		t.Fatalf("the agent may cordon a real node: %v", err)
	}

	bind := func(c client.Client, pod, node string) func() error {
		return func() error {
			return c.SubResource("binding").Create(ctx, podOn("", pod), &corev1.Binding{Target: corev1.ObjectReference{Kind: "Node", Name: node}})
		}
	}
	for _, step := range []struct {
		what string
		do   func() error
		may  bool
	}{
		{"agent cordons a virtual node", func() error { return agent.Patch(ctx, &corev1.Node{ObjectMeta: named("spillway-paris")}, cordon) }, true},
		{"agent deletes a real node", func() error { return agent.Delete(ctx, &corev1.Node{ObjectMeta: named("worker")}) }, false},
		{"agent makes a namespace for a peer", func() error {
			return agent.Create(ctx, &corev1.Namespace{ObjectMeta: named("liqo-tenant-paris")})
		}, true},
		{"agent makes another namespace", func() error { return agent.Create(ctx, &corev1.Namespace{ObjectMeta: named("mine")}) }, false},
		{"agent deletes another namespace", func() error { return agent.Delete(ctx, &corev1.Namespace{ObjectMeta: named("default")}) }, false},
		{"agent reads Secrets of a peer's namespace unasked", func() error {
			return client.IgnoreNotFound(agent.Get(ctx, types.NamespacedName{Namespace: "liqo-tenant-paris", Name: "liqo-nonce"}, &corev1.Secret{}))
		}, false},
		{"agent binds more than its role", func() error { return agent.Create(ctx, binding("liqo-tenant-paris", "cluster-admin")) }, false},
		{"agent binds its role elsewhere", func() error { return agent.Create(ctx, binding("default", "spillway-agent-tenant")) }, false},
		{"agent binds its role in a peer's namespace", func() error { return agent.Create(ctx, binding("liqo-tenant-paris", "spillway-agent-tenant")) }, true},
		{"agent makes a Secret in a peer's namespace", func() error {
			// The binding counts a moment after it is made.
			var last error
			err := wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, 20*time.Second, true, func(ctx context.Context) (bool, error) {
				last = agent.Create(ctx, &corev1.Secret{ObjectMeta: within("liqo-tenant-paris", "liqo-nonce")})
				return last == nil, nil
			})
			return errors.Join(err, last)
		}, true},
		{"agent makes a service account's token", func() error {
			return agent.Create(ctx, &corev1.Secret{
				ObjectMeta: metav1.ObjectMeta{
					Namespace: "liqo-tenant-paris", Name: "token",
					Annotations: map[string]string{corev1.ServiceAccountNameKey: "virtual-kubelet"},
				},
				Type: corev1.SecretTypeServiceAccountToken,
			})
		}, false},
		{"agent reads a user's Secret", func() error {
			return agent.Get(ctx, types.NamespacedName{Namespace: "default", Name: "private"}, &corev1.Secret{})
		}, false},
		{"agent reads another Secret beside it", func() error {
			return agent.Get(ctx, types.NamespacedName{Namespace: namespace, Name: "private"}, &corev1.Secret{})
		}, false},
		{"agent keeps its key", func() error {
			return agent.Create(ctx, &corev1.Secret{ObjectMeta: within(namespace, "spillway-agent-peer-key")})
		}, true},
		{"agent deletes a pod at home", func() error { return agent.Delete(ctx, podOn("worker", "home")) }, false},
		{"another scheduler binds to a real node", bind(admin, "waiting", "worker"), true},
		{"another scheduler binds to a virtual node", bind(admin, "away", "spillway-paris"), false},
		{"somebody creates a pod on a virtual node", func() error { return admin.Create(ctx, podOn("spillway-paris", "pinned")) }, false},
		{"a DaemonSet that tolerates everything comes to a virtual node", func() error {
			pod := podOn("", "kube-proxy")
			pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "kube-proxy", UID: "1"}}
			pod.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
				NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchFields: []corev1.NodeSelectorRequirement{{
					Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{"spillway-paris"},
				}}}},
			}}}
			return admin.Create(ctx, pod)
		}, false},
		{"the scheduler binds to a virtual node", bind(scheduler, "away", "spillway-paris"), true},
		{"agent deletes a pod on a virtual node", func() error { return agent.Delete(ctx, podOn("spillway-paris", "away")) }, true},
		{"scheduler reads a user's Secret", func() error {
			return scheduler.Get(ctx, types.NamespacedName{Namespace: "default", Name: "private"}, &corev1.Secret{})
		}, false},
		{"broker keeps its CA", func() error {
			return broker.Create(ctx, &corev1.Secret{ObjectMeta: within(namespace, "spillway-broker-ca")})
		}, true},
		{"broker reads its CA", func() error {
			return broker.Get(ctx, types.NamespacedName{Namespace: namespace, Name: "spillway-broker-ca"}, &corev1.Secret{})
		}, true},
		{"broker reads another Secret beside it", func() error {
			return broker.Get(ctx, types.NamespacedName{Namespace: namespace, Name: "private"}, &corev1.Secret{})
		}, false},
		{"broker looks at nodes", func() error { return broker.List(ctx, &corev1.NodeList{}) }, false},
	} {
		switch err := step.do(); {
		case step.may && err != nil:
			t.Errorf("%s: %v", step.what, err)
		case !step.may && !apierrors.IsForbidden(err):
			t.Errorf("%s, and gets %v", step.what, err)
		}
	}

	t.Run("an upgrade keeps the webhook's certificate", func(t *testing.T) {
		name := types.NamespacedName{Namespace: namespace, Name: "spillway-scheduler-steering"}
		var before, after corev1.Secret
		must(admin.Get(ctx, name, &before))
		_, err := helm(t, append([]string{"upgrade", "spillway-agent", "agent", access}, set(needed)...)...)
		must(err)
		must(admin.Get(ctx, name, &after))
		if !bytes.Equal(before.Data[corev1.TLSCertKey], after.Data[corev1.TLSCertKey]) {
			t.Error("there is another one, which the API server refuses until every pod has read it")
		}
	})
	t.Run("uninstalling leaves nothing", func(t *testing.T) {
		made := map[string]unstructured.Unstructured{}
		for chart, values := range everything {
			for _, object := range render(t, chart, values) {
				made[object.GetKind()+" "+object.GetName()] = object
			}
			_, err := helm(t, "uninstall", "spillway-"+chart, access)
			must(err)
		}
		for name, object := range made {
			if err := admin.Get(ctx, client.ObjectKeyFromObject(&object), &object); !apierrors.IsNotFound(err) && object.GetDeletionTimestamp() == nil {
				t.Errorf("%s is still there (%v)", name, err)
			}
		}
	})
}

// The policy speaks of the same account that the pods run as.
func TestLimitsAreTheAgents(t *testing.T) {
	text, err := template(t, "agent", slices.Concat(needed, []string{"scheduler.mode=none"}))
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(text, "system:serviceaccount:"+namespace+":spillway-agent'") || !strings.Contains(text, "serviceAccountName: spillway-agent\n") {
		t.Error("the agent runs as another account than the one that is limited")
	}
}
