package gang

import (
	"context"
	"errors"
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestAbsentKinds: an API server that starts refuses what it allows a moment later. A kind
// counts as not served only after several refusals, and no longer than that.
func TestAbsentKinds(t *testing.T) {
	config := controlplane.StartBare(t)
	reader := rest.CopyConfig(config)
	reader.Impersonate = rest.ImpersonationConfig{UserName: "reader", Groups: []string{"system:authenticated"}}
	dynamicClient, err := dynamic.NewForConfig(reader)
	expect.NoError(t, err)
	c, err := client.New(config, client.Options{Scheme: clientgoscheme.Scheme})
	expect.NoError(t, err)

	informers := map[string]*gangInformer{}
	for _, name := range []string{"configmaps", "secrets", "absents"} {
		i, err := newGangInformer(clock.RealClock{}, dynamicClient, schema.GroupVersionResource{Version: "v1", Resource: name}, ignoreErrors)
		expect.NoError(t, err)
		informers[name] = i
		go i.run(t.Context(), cache.ResourceEventHandlerFuncs{}, func() {})
	}
	const longest = 3 * time.Minute // between two requests of a reflector, 1 min
	expect.Consistently(t, 4*time.Second, "no kind to count as absent at once", func() (bool, string) {
		for name, i := range informers {
			if i.known() {
				return false, name
			}
		}
		return true, ""
	})
	expect.NoError(t, c.Create(t.Context(), &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "reader"},
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "reader"},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: "reader"}}}))
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "reader"},
		Rules: []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: []string{"list", "watch"}}}}
	expect.NoError(t, c.Create(t.Context(), role))
	expect.EventuallyWithin(t, longest, "the kind that may be read from now on", func() (bool, string) { return informers["configmaps"].served(), "not served" })
	for _, name := range []string{"secrets", "absents"} {
		expect.EventuallyWithin(t, longest, "the kinds that are refused for long", func() (bool, string) { return informers[name].absent(), name })
		if informers[name].HasSynced() {
			t.Fatalf("%s are refused, and were read", name)
		}
	}
	role.Rules[0].Resources = append(role.Rules[0].Resources, "secrets")
	expect.NoError(t, c.Update(t.Context(), role))
	expect.EventuallyWithin(t, longest, "a later success to count", func() (bool, string) { return informers["secrets"].served(), "not served" })
}

// readInformer has read its kind at a version.
type readInformer struct {
	cache.SharedIndexInformer
	version string
}

func (*readInformer) HasSynced() bool                   { return true }
func (i *readInformer) LastSyncResourceVersion() string { return i.version }

// TestUninstalledKind: a kind that was read becomes absent after some refusals in a row, until it is
// read again.
func TestUninstalledKind(t *testing.T) {
	read := &readInformer{version: "7"}
	now := clocktesting.NewFakePassiveClock(time.Unix(1000, 0))
	i := &gangInformer{SharedIndexInformer: read, clock: now}
	missing, down := apierrors.NewNotFound(schema.GroupResource{Resource: "podgroups"}, ""), apierrors.NewInternalError(errors.New("down"))
	for n, step := range []struct {
		err     error
		version string
		absent  bool
	}{
		{missing, "7", false}, {missing, "7", false}, {missing, "7", false}, {missing, "7", false},
		{down, "7", false}, // another failure says nothing of the kind
		{missing, "7", false}, {missing, "7", false}, {missing, "7", false}, {missing, "7", false}, {missing, "7", true}, {missing, "7", true},
		{nil, "9", false}, // read again
		{missing, "9", false},
	} {
		read.version = step.version
		pod := now.Now()
		if i.absentAfter(pod) {
			t.Errorf("step %d: absent for a pod that came later than the last answer", n)
		}
		now.SetTime(pod.Add(2 * spreads))
		if step.err != nil && i.failed(step.err) != step.absent {
			t.Errorf("step %d: not said that it is absent", n)
		}
		if step.err != nil && i.absentAfter(pod) != step.absent {
			t.Errorf("step %d: absent %t for a pod that came before the answer", n, !step.absent)
		}
		if i.absent() != step.absent || i.served() == step.absent || !i.known() {
			t.Errorf("step %d: absent %t, served %t, known %t, want absent %t", n, i.absent(), i.served(), i.known(), step.absent)
		}
	}
}

func ignoreErrors(string, string) cache.WatchErrorHandlerWithContext {
	return func(context.Context, *cache.Reflector, error) {}
}
