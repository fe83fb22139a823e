package owners_test

import (
	"fmt"
	"net/http"
	"sync/atomic"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/owners"
)

const group, version = "batch.example.com", "v1"

// installKind installs a kind that is defined by a CRD.
func installKind(t *testing.T, config *rest.Config, kind, plural string) {
	t.Helper()
	crd := &apiextensionsv1.CustomResourceDefinition{
		ObjectMeta: metav1.ObjectMeta{Name: plural + "." + group},
		Spec: apiextensionsv1.CustomResourceDefinitionSpec{
			Group: group, Scope: apiextensionsv1.NamespaceScoped,
			Names: apiextensionsv1.CustomResourceDefinitionNames{Plural: plural, Kind: kind},
			Versions: []apiextensionsv1.CustomResourceDefinitionVersion{{Name: version, Served: true, Storage: true,
				Schema: &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{Type: "object"}}}},
		},
	}
	_, err := envtest.InstallCRDs(config, envtest.CRDInstallOptions{CRDs: []*apiextensionsv1.CustomResourceDefinition{crd}})
	expect.NoError(t, err)
}

// counting counts requests.
type counting struct {
	http.RoundTripper
	n *atomic.Int32
}

func (c counting) RoundTrip(r *http.Request) (*http.Response, error) {
	c.n.Add(1)
	return c.RoundTripper.RoundTrip(r)
}

// TestLookup looks up owners of kinds that CRDs define, with an identity that may read one
// of these kinds.
func TestLookup(t *testing.T) {
	config := controlplane.StartBare(t)
	installKind(t, config, "Run", "runs")
	installKind(t, config, "Plan", "plans")
	c, err := client.New(config, client.Options{Scheme: clientgoscheme.Scheme})
	expect.NoError(t, err)
	expect.NoError(t, c.Create(t.Context(), &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "runs"}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{group}, Resources: []string{"runs"}, Verbs: []string{"get"}},
		{APIGroups: []string{group}, Resources: []string{"absents"}, Verbs: []string{"get"}},
	}}))
	expect.NoError(t, c.Create(t.Context(), &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "runs"},
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "runs"},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: "reader"}}}))

	create := func(kind, name string, owners ...metav1.OwnerReference) metav1.OwnerReference {
		o := &unstructured.Unstructured{Object: map[string]any{"apiVersion": group + "/" + version, "kind": kind}}
		o.SetNamespace("default")
		o.SetName(name)
		o.SetOwnerReferences(owners)
		expect.NoError(t, c.Create(t.Context(), o))
		return metav1.OwnerReference{APIVersion: group + "/" + version, Kind: kind, Name: name, UID: o.GetUID(), Controller: ptr.To(true)}
	}
	plan := create("Plan", "nightly")
	run, root := create("Run", "nightly-1", plan), create("Run", "by-hand")
	with := func(ref metav1.OwnerReference, change func(*metav1.OwnerReference)) metav1.OwnerReference {
		change(&ref)
		return ref
	}
	other := rest.CopyConfig(config)
	other.Impersonate = rest.ImpersonationConfig{UserName: "reader", Groups: []string{"system:authenticated"}}
	reader, err := client.New(other, client.Options{Scheme: clientgoscheme.Scheme})
	expect.NoError(t, err)
	expect.Eventually(t, "the role to be in force", func() (bool, string) {
		o := &unstructured.Unstructured{Object: map[string]any{"apiVersion": group + "/" + version, "kind": "Run"}}
		err := reader.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: run.Name}, o)
		return err == nil, fmt.Sprint(err)
	})
	var requests atomic.Int32
	other.Wrap(func(next http.RoundTripper) http.RoundTripper { return counting{next, &requests} })
	lookup, err := owners.New(klog.Background(), other, []owners.Kind{
		{Group: group, Kind: "Run", Resource: "runs"}, {Group: group, Kind: "Plan", Resource: "plans"}, {Group: group, Kind: "Absent", Resource: "absents"},
	})
	expect.NoError(t, err)
	var resolved atomic.Int32
	go lookup.Run(t.Context(), func() { resolved.Add(1) })

	for _, tc := range []struct {
		name, reason string
		ref          metav1.OwnerReference
		controller   types.UID
		missing      bool
		requests     int32
	}{
		{"a run", "its controller is in its metadata", run, plan.UID, false, 1},
		{"a run by hand", "it has no controller", root, "", false, 1},
		{"a plan", "a kind that must not be read ends the chain", plan, "", false, 1},
		{"a kind that is not served", "it ends the chain", with(run, func(r *metav1.OwnerReference) { r.Kind, r.UID = "Absent", "absent" }), "", false, 1},
		{"a version that is not served", "it ends the chain", with(run, func(r *metav1.OwnerReference) { r.APIVersion, r.UID = group+"/v2", "v2" }), "", false, 1},
		{"a kind that is not listed", "it is not read", with(run, func(r *metav1.OwnerReference) { r.Kind, r.UID = "Other", "other" }), "", false, 0},
		{"another object of the name", "the owner is gone", with(run, func(r *metav1.OwnerReference) { r.UID = "former" }), "", true, 1},
		{"a run that is gone", "the pod is about to be deleted", with(run, func(r *metav1.OwnerReference) { r.Name, r.UID = "gone", "gone" }), "", true, 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			before := requests.Load()
			if _, found := lookup.Resolve("default", tc.ref); found != (tc.requests == 0) {
				t.Errorf("found %t at once", found)
			}
			expect.Eventually(t, "the result", func() (bool, string) {
				_, found := lookup.Resolve("default", tc.ref)
				n := requests.Load() - before
				return found != tc.missing && n >= tc.requests, fmt.Sprintf("found %t after %d requests", found, n)
			})
			for range 100 {
				controller, found := lookup.Resolve("default", tc.ref)
				if found == tc.missing || found && ptr.Deref(controller, metav1.OwnerReference{}).UID != tc.controller {
					t.Fatalf("controller %+v (found %t), want %q, because %s", controller, found, tc.controller, tc.reason)
				}
			}
			if n := requests.Load() - before; n != tc.requests && !tc.missing {
				t.Errorf("%d requests, want %d: results are kept", n, tc.requests)
			}
		})
	}
	expect.Eventually(t, "the callbacks", func() (bool, string) { return resolved.Load() == 5, fmt.Sprint(resolved.Load()) })
}

func TestParseKind(t *testing.T) {
	for text, valid := range map[string]bool{
		"JobSet=jobsets.jobset.x-k8s.io": true,
		"JobSet":                         false,
		"JobSet=jobsets":                 false,
		"JobSet=Jobsets.jobset.x-k8s.io": false,
		"Job Set=jobsets.x":              false,
		"=jobsets.x":                     false,
	} {
		kind, err := owners.ParseKind(text)
		if (err == nil) != valid || valid && kind.String() != text {
			t.Errorf("%s: %+v, %v", text, kind, err)
		}
	}
}
