package owners_test

import (
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	clocktesting "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/owners"
)

func TestMain(m *testing.M) { controlplane.Main(m) }

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

// startReader starts an API server with some kinds, and returns a client of its
// administrator and the configuration of an identity without rights.
func startReader(t *testing.T, kinds ...string) (c client.Client, reader *rest.Config) {
	t.Helper()
	config := controlplane.StartBare(t)
	for _, kind := range kinds {
		installKind(t, config, kind, strings.ToLower(kind)+"s")
	}
	c, err := client.New(config, client.Options{Scheme: clientgoscheme.Scheme})
	expect.NoError(t, err)
	reader = rest.CopyConfig(config)
	reader.Impersonate = rest.ImpersonationConfig{UserName: "reader", Groups: []string{"system:authenticated"}}
	return c, reader
}

// grantRead allows the reader to read resources.
func grantRead(t *testing.T, c client.Client, resources ...string) {
	t.Helper()
	expect.NoError(t, c.Create(t.Context(), &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "reader"}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{group}, Resources: resources, Verbs: []string{"get"}},
	}}))
	expect.NoError(t, c.Create(t.Context(), &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "reader"},
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "reader"},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: "reader"}}}))
}

// expectReadable waits until the reader may read an object.
func expectReadable(t *testing.T, config *rest.Config, ref metav1.OwnerReference) {
	t.Helper()
	reader, err := client.New(config, client.Options{Scheme: clientgoscheme.Scheme})
	expect.NoError(t, err)
	expect.Eventually(t, "the role to be in force", func() (bool, string) {
		o := &unstructured.Unstructured{Object: map[string]any{"apiVersion": ref.APIVersion, "kind": ref.Kind}}
		err := reader.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: ref.Name}, o)
		return err == nil, fmt.Sprint(err)
	})
}

// createOwner creates an object and returns a reference to it.
func createOwner(t *testing.T, c client.Client, kind, name string, owners ...metav1.OwnerReference) metav1.OwnerReference {
	t.Helper()
	o := &unstructured.Unstructured{Object: map[string]any{"apiVersion": group + "/" + version, "kind": kind}}
	o.SetNamespace("default")
	o.SetName(name)
	o.SetOwnerReferences(owners)
	expect.NoError(t, c.Create(t.Context(), o))
	return metav1.OwnerReference{APIVersion: group + "/" + version, Kind: kind, Name: name, UID: o.GetUID(), Controller: ptr.To(true)}
}

// TestLookup looks up owners of kinds that CRDs define, with an identity that may read one
// of these kinds.
func TestLookup(t *testing.T) {
	c, other := startReader(t, "Run", "Plan")
	grantRead(t, c, "runs", "absents")
	plan := createOwner(t, c, "Plan", "nightly")
	run, root := createOwner(t, c, "Run", "nightly-1", plan), createOwner(t, c, "Run", "by-hand")
	with := func(ref metav1.OwnerReference, change func(*metav1.OwnerReference)) metav1.OwnerReference {
		change(&ref)
		return ref
	}
	expectReadable(t, other, run)
	now := clocktesting.NewFakeClock(time.Now())
	var requests atomic.Int32
	other.Wrap(func(next http.RoundTripper) http.RoundTripper { return counting{next, &requests} })
	lookup, err := owners.New(klog.Background(), now, other, []owners.Kind{
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
		requests     int32 // at least as many for a refusal, which has to last
		refused      bool
	}{
		{"a run", "its controller is in its metadata", run, plan.UID, false, 1, false},
		{"a run by hand", "it has no controller", root, "", false, 1, false},
		{"a plan", "a kind that must not be read ends the chain", plan, "", false, 1, true},
		{"a kind that is not served", "it ends the chain", with(run, func(r *metav1.OwnerReference) { r.Kind, r.UID = "Absent", "absent" }), "", false, 1, true},
		{"a version that is not served", "it ends the chain", with(run, func(r *metav1.OwnerReference) { r.APIVersion, r.UID = group+"/v2", "v2" }), "", false, 1, true},
		{"a kind that is not listed", "it is not read", with(run, func(r *metav1.OwnerReference) { r.Kind, r.UID = "Other", "other" }), "", false, 0, false},
		{"another object of the name", "the owner is gone", with(run, func(r *metav1.OwnerReference) { r.UID = "former" }), "", true, 1, false},
		{"a run that is gone", "the pod is about to be deleted", with(run, func(r *metav1.OwnerReference) { r.Name, r.UID = "gone", "gone" }), "", true, 1, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			before := requests.Load()
			if _, found := lookup.Resolve("default", tc.ref); found != (tc.requests == 0) {
				t.Errorf("found %t at once", found)
			}
			expect.Eventually(t, "the result", func() (bool, string) {
				if tc.refused {
					now.Step(time.Second)
				}
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
			if n := requests.Load() - before; n != tc.requests && !tc.missing && !tc.refused {
				t.Errorf("%d requests, want %d: results are kept", n, tc.requests)
			}
		})
	}
	expect.Eventually(t, "the callbacks", func() (bool, string) { return resolved.Load() == 5, fmt.Sprint(resolved.Load()) })
}

// TestRefusals: an API server that starts refuses what it allows a moment later, and does not
// serve yet what it does then. Only a refusal that lasts makes an owner the root; one that
// ends later ends that.
func TestRefusals(t *testing.T) {
	c, reader := startReader(t, "Run", "Plan")
	schedule := metav1.OwnerReference{APIVersion: group + "/" + version, Kind: "Schedule", Name: "schedule", UID: "schedule", Controller: ptr.To(true)}
	run, plan := createOwner(t, c, "Run", "nightly-1", schedule), createOwner(t, c, "Plan", "nightly", schedule)
	now := clocktesting.NewFakeClock(time.Now())
	var requests atomic.Int32
	counted := rest.CopyConfig(reader)
	counted.Wrap(func(next http.RoundTripper) http.RoundTripper { return counting{next, &requests} })
	lookup, err := owners.New(klog.Background(), now, counted, []owners.Kind{
		{Group: group, Kind: "Run", Resource: "runs"}, {Group: group, Kind: "Plan", Resource: "plans"}, {Group: group, Kind: "Absent", Resource: "absents"},
	})
	expect.NoError(t, err)
	go lookup.Run(t.Context(), func() {})
	absent := run
	absent.Kind, absent.UID = "Absent", "absent"
	refused := map[string]metav1.OwnerReference{"refused": plan, "not served": absent}
	find := func(ref metav1.OwnerReference) (root string, refused bool) {
		controller, found, refused := lookup.Find("default", ref)
		if !found {
			return "unknown", refused
		}
		return string(ptr.Deref(controller, metav1.OwnerReference{}).UID), refused
	}
	expectRequests := func(what string, want int32, meanwhile func()) {
		t.Helper()
		expect.Eventually(t, what, func() (bool, string) {
			meanwhile()
			return requests.Load() >= want, fmt.Sprintf("%d of %d requests", requests.Load(), want)
		})
	}
	// On a slow machine the clock may pass what it takes for a refusal to be believed.
	started := now.Now()
	early := func() bool { return now.Since(started) < 15*time.Second }
	for _, ref := range []metav1.OwnerReference{run, plan, absent} {
		find(ref)
	}
	expectRequests("the first refusals", 3, func() {})
	expectRequests("another look at each, which no pod has asked for", 6, func() { now.Step(500 * time.Millisecond) })
	for name, ref := range refused {
		if got, _ := find(ref); got != "unknown" && early() {
			t.Errorf("%s: root %q after a moment, want none yet", name, got)
		}
	}
	grantRead(t, c, "runs", "absents")
	expectReadable(t, reader, run)
	expect.Eventually(t, "the owner to be read", func() (bool, string) {
		got, refused := find(run)
		if got == "" && early() {
			t.Fatal("the owner became the root because of a refusal that did not last")
		}
		now.Step(time.Second)
		return got == string(schedule.UID) && !refused, got
	})
	for name, ref := range refused {
		expect.Eventually(t, name+" to be believed", func() (bool, string) {
			now.Step(time.Second)
			got, refused := find(ref)
			return got == "" && refused, got
		})
	}
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "reader"}}
	expect.NoError(t, c.Get(t.Context(), client.ObjectKeyFromObject(role), role))
	role.Rules[0].Resources = append(role.Rules[0].Resources, "plans")
	expect.NoError(t, c.Update(t.Context(), role))
	expectReadable(t, reader, plan)
	expect.Eventually(t, "the refusal to end", func() (bool, string) {
		now.Step(time.Second) // a look that fails otherwise is repeated after owners.CheckRefused
		got, refused := find(plan)
		if got == "unknown" {
			t.Fatal("the root of a pod became unknown while its owner was looked up again")
		}
		return got == string(schedule.UID) && !refused, got
	})
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
