package controlplane

import (
	"context"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestReset: a reset removes what a test has made, also what finalizers and policies protect.
// What is made again, and what was changed of the API server's own objects, is an error.
func TestReset(t *testing.T) {
	config := StartBare(t)
	scheme := runtime.NewScheme()
	expect.NoError(t, clientgoscheme.AddToScheme(scheme))
	expect.NoError(t, broker.AddToScheme(scheme))
	c, err := client.New(config, client.Options{Scheme: scheme})
	expect.NoError(t, err)
	r, err := newResetter(t.Context(), config)
	expect.NoError(t, err)

	InstallCRDs(t, config)
	finalizers := []string{"example.com/hold"}
	rules := []admissionv1.NamedRuleWithOperations{{RuleWithOperations: admissionv1.RuleWithOperations{
		Operations: []admissionv1.OperationType{admissionv1.Delete}, Rule: admissionv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"configmaps"}},
	}}}
	for _, o := range []client.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}},
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "held", Finalizers: finalizers}},
		&broker.ClusterRegistration{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "rome", Finalizers: finalizers}, Spec: broker.ClusterRegistrationSpec{ClusterID: "rome"}},
		&admissionv1.ValidatingAdmissionPolicy{ObjectMeta: metav1.ObjectMeta{Name: "keep"}, Spec: admissionv1.ValidatingAdmissionPolicySpec{
			MatchConstraints: &admissionv1.MatchResources{ResourceRules: rules}, Validations: []admissionv1.Validation{{Expression: "false"}},
		}},
		&admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{Name: "keep"}, Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{
			PolicyName: "keep", ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny},
		}},
	} {
		expect.NoError(t, c.Create(t.Context(), o))
	}
	expect.Eventually(t, "the policy to refuse", func() (bool, string) {
		err := c.Delete(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "held"}}, client.DryRunAll)
		return err != nil, "it allows a deletion"
	})
	if err := r.run(t.Context()); err != nil {
		t.Fatal(err)
	}
	after, err := r.objects(t.Context(), nil)
	expect.NoError(t, err)
	if len(after) != len(r.before) {
		t.Errorf("%d objects after a reset, %d before", len(after), len(r.before))
	}

	again := func(ctx context.Context) {
		for ctx.Err() == nil {
			_ = c.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "again"}})
		}
	}
	wrong := func(want string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		if err := r.run(ctx); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("want an error with %q, got %v", want, err)
		}
	}
	ctx, stop := context.WithCancel(t.Context())
	stopped := make(chan struct{})
	go func() { defer close(stopped); again(ctx) }()
	wrong("configmaps default/again")
	stop()
	<-stopped

	label := func(o client.Object, patch string) {
		t.Helper()
		expect.NoError(t, c.Patch(t.Context(), o, client.RawPatch("application/merge-patch+json", []byte(patch))))
	}
	view := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "view"}}
	label(view, `{"metadata":{"labels":{"team":"shop"}}}`)
	wrong("clusterroles.rbac.authorization.k8s.io /view has labels")
	label(view, `{"metadata":{"labels":{"team":null}}}`)
	home := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default"}}
	label(home, `{"metadata":{"labels":{"team":"shop"}}}`)
	expect.NoError(t, r.run(t.Context()))
	if expect.NoError(t, c.Get(t.Context(), client.ObjectKeyFromObject(home), home)); home.Labels["team"] != "" {
		t.Errorf("namespace default keeps labels %v", home.Labels)
	}
}
