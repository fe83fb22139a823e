package charts_test

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/e2e/expect"
)

// step is a request that must be admitted or denied.
type step struct {
	what    string
	do      func() error
	allowed bool
}

// runSteps makes requests in order. One that is allowed is retried, because a
// RoleBinding takes effect a moment after its creation.
func runSteps(t *testing.T, steps []step) {
	t.Helper()
	for _, step := range steps {
		if step.allowed {
			eventually(t, step.what, step.do)
		} else if err := step.do(); !apierrors.IsForbidden(err) {
			t.Errorf("%s: want Forbidden, got %v", step.what, err)
		}
	}
}

func eventually(t *testing.T, what string, do func() error) {
	t.Helper()
	expect.Eventually(t, what, func() (bool, string) {
		err := do()
		return err == nil, fmt.Sprint(err)
	})
}

// eventuallyForbidden waits until a request is denied, for a policy takes effect a
// moment after its creation.
func eventuallyForbidden(t *testing.T, what string, do func() error) {
	t.Helper()
	expect.Eventually(t, what+" to be denied", func() (bool, string) {
		err := do()
		return apierrors.IsForbidden(err), fmt.Sprint(err)
	})
}

// as returns a client of a ServiceAccount in the charts' namespace, or of the admin
// for "".
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
	expect.NoError(t, err)
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

// overflowedPod is a pod that tolerates the virtual node of paris.
func overflowedPod(name string) *corev1.Pod {
	pod := podOn("", name)
	pod.Spec.Tolerations = []corev1.Toleration{{Key: "broker.fluidos.eu/overflow", Operator: corev1.TolerationOpEqual, Value: "paris", Effect: corev1.TaintEffectNoSchedule}}
	return pod
}

func virtual(name, provider string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"broker.fluidos.eu/provider": provider}}}
}

func roleBinding(namespace, name, role, accountNamespace, account string) *rbacv1.RoleBinding {
	return &rbacv1.RoleBinding{
		ObjectMeta: within(namespace, name),
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: accountNamespace, Name: account}},
	}
}

// bindPod returns a request that binds a pod of namespace default to a node.
func bindPod(t *testing.T, c client.Client, pod, node string) func() error {
	return func() error {
		return c.SubResource("binding").Create(t.Context(), podOn("", pod), &corev1.Binding{Target: corev1.ObjectReference{Kind: "Node", Name: node}})
	}
}

// bindOverflowed returns a request that binds a pod as the scheduler does.
func bindOverflowed(t *testing.T, scheduler client.Client, pod string) func() error {
	return func() error {
		binding := &corev1.Binding{Target: corev1.ObjectReference{Kind: "Node", Name: "spillway-paris"}}
		binding.Labels = map[string]string{"broker.fluidos.eu/hold": "rome-1", "broker.fluidos.eu/shape": "0123456789abcdef"}
		return scheduler.SubResource("binding").Create(t.Context(), podOn("", pod), binding)
	}
}

// readSecret returns a request that reads a Secret, whether or not it exists.
func readSecret(t *testing.T, c client.Client, namespace, name string) func() error {
	return func() error {
		return client.IgnoreNotFound(c.Get(t.Context(), types.NamespacedName{Namespace: namespace, Name: name}, &corev1.Secret{}))
	}
}

// kubeconfig writes a kubeconfig and returns Helm's argument for it.
func kubeconfig(t *testing.T, config *rest.Config) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	expect.NoError(t, clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters:       map[string]*clientcmdapi.Cluster{"c": {Server: config.Host, CertificateAuthorityData: config.CAData}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{"u": {ClientCertificateData: config.CertData, ClientKeyData: config.KeyData}},
		Contexts:       map[string]*clientcmdapi.Context{"c": {Cluster: "c", AuthInfo: "u"}},
		CurrentContext: "c",
	}, path))
	return "--kubeconfig=" + path
}

// install installs or, with "upgrade", upgrades a chart, and waits until its policies are in
// force.
func install(t *testing.T, command, chart, access string, values []string) {
	t.Helper()
	_, err := helm(t, append([]string{command, "spillway-" + chart, chart, access, "--create-namespace"}, set(values)...)...)
	expect.NoError(t, err)
	config, err := clientcmd.BuildConfigFromFlags("", strings.TrimPrefix(access, "--kubeconfig="))
	expect.NoError(t, err)
	awaitPolicies(t, as(t, config, ""))
}

// awaitPolicies waits until all policies are in force that exist: the API server sees policies
// and bindings in the order of their creation, so that another one is in force after them.
func awaitPolicies(t *testing.T, admin client.Client) {
	t.Helper()
	const name = "last-policy"
	configMap := &corev1.ConfigMap{ObjectMeta: within("default", name)}
	policy := &admissionv1.ValidatingAdmissionPolicy{ObjectMeta: named(name), Spec: admissionv1.ValidatingAdmissionPolicySpec{
		MatchConstraints: &admissionv1.MatchResources{ResourceRules: []admissionv1.NamedRuleWithOperations{{RuleWithOperations: admissionv1.RuleWithOperations{
			Operations: []admissionv1.OperationType{admissionv1.Create},
			Rule:       admissionv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"configmaps"}},
		}}}},
		Validations: []admissionv1.Validation{{Expression: "object.metadata.name != '" + name + "'", Reason: ptr.To(metav1.StatusReasonForbidden)}},
	}}
	binding := &admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: named(name), Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{
		PolicyName: name, ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny},
	}}
	expect.NoError(t, admin.Create(t.Context(), policy))
	expect.NoError(t, admin.Create(t.Context(), binding))
	eventuallyForbidden(t, "what the last policy denies", func() error { return admin.Create(t.Context(), configMap.DeepCopy(), client.DryRunAll) })
	expect.NoError(t, admin.Delete(t.Context(), binding))
	expect.NoError(t, admin.Delete(t.Context(), policy))
}

// uninstall uninstalls a chart and checks that none of its objects remains.
func uninstall(t *testing.T, admin client.Client, chart, access string, values []string) {
	t.Helper()
	objects := render(t, chart, values)
	_, err := helm(t, "uninstall", "spillway-"+chart, access)
	expect.NoError(t, err)
	for _, object := range objects {
		remaining := &unstructured.Unstructured{Object: object.Object}
		if err := admin.Get(t.Context(), client.ObjectKeyFromObject(remaining), remaining); !apierrors.IsNotFound(err) && remaining.GetDeletionTimestamp() == nil {
			t.Errorf("%s %s still exists (%v)", object.GetKind(), object.GetName(), err)
		}
	}
}

// daemonSetPod is a pod that the controller of DaemonSets has created for a node.
func daemonSetPod(node string) *corev1.Pod {
	pod := podOn("", "kube-proxy-"+node)
	pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "kube-proxy", UID: "1", Controller: ptr.To(true)}}
	pod.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
	pod.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
		NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchFields: []corev1.NodeSelectorRequirement{{
			Key: metav1.ObjectNameField, Operator: corev1.NodeSelectorOpIn, Values: []string{node},
		}}}},
	}}}
	return pod
}

// createWorkload creates what a cluster has before Spillway comes: a real and a
// virtual node, a pod on the real one, four pending pods, and a user's Secret in
// namespaces default and that of the charts.
func createWorkload(t *testing.T, admin client.Client) {
	t.Helper()
	system := podOn("", "system")
	system.Namespace, system.Spec.AutomountServiceAccountToken = "kube-system", ptr.To(false)
	// As those of most DaemonSets.
	tolerant := podOn("", "second")
	tolerant.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
	// As the webhook steers pods that may overflow.
	steered := podOn("", "third")
	steered.Spec.Tolerations = []corev1.Toleration{{Key: "broker.fluidos.eu/overflow", Operator: corev1.TolerationOpExists}}
	for _, object := range []client.Object{
		&corev1.Node{ObjectMeta: named("worker")}, virtual("spillway-paris", "paris"),
		// A real node may have the name of a virtual one.
		&corev1.Node{ObjectMeta: named("spillway-worker")},
		&corev1.ServiceAccount{ObjectMeta: within("kube-system", "default")}, system,
		// Pods require their namespace's ServiceAccount, which no controller creates here.
		&corev1.ServiceAccount{ObjectMeta: within("default", "default")},
		podOn("worker", "local"), overflowedPod("overflowed"), podOn("", "pending"), tolerant, steered,
		&corev1.Secret{ObjectMeta: within("default", "private")}, &corev1.Secret{ObjectMeta: within(namespace, "private")},
	} {
		expect.NoError(t, admin.Create(t.Context(), object))
	}
}
