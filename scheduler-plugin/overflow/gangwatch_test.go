package overflow

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestAbsentKinds: an API server that starts refuses what it allows a moment later. A kind
// counts as not served only after several refusals over some time, and no longer than that.
func TestAbsentKinds(t *testing.T) {
	config := controlplane.StartBare(t)
	reader := rest.CopyConfig(config)
	reader.Impersonate = rest.ImpersonationConfig{UserName: "reader", Groups: []string{"system:authenticated"}}
	dynamicClient, err := dynamic.NewForConfig(reader)
	expect.NoError(t, err)
	c, err := client.New(config, client.Options{Scheme: clientgoscheme.Scheme})
	expect.NoError(t, err)

	now := clocktesting.NewFakePassiveClock(time.Unix(1000, 0))
	informers := map[string]*gangInformer{}
	for _, name := range []string{"configmaps", "secrets", "absents"} {
		i, err := newGangInformer(klog.Background(), now, dynamicClient, schema.GroupVersionResource{Version: "v1", Resource: name}, name+" are not served")
		expect.NoError(t, err)
		informers[name] = i
		go i.run(t.Context(), cache.ResourceEventHandlerFuncs{}, func() {})
	}
	const longest = 3 * time.Minute // between two requests of a reflector, 1 min
	expectKnown := func(when string, want map[string]bool) {
		t.Helper()
		expect.EventuallyWithin(t, longest, when, func() (bool, string) {
			got := map[string]bool{}
			for name, i := range informers {
				got[name] = i.known()
			}
			return fmt.Sprint(got) == fmt.Sprint(want), fmt.Sprintf("known: %v, want %v", got, want)
		})
	}
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
	expectKnown("the kind that may be read from now on", map[string]bool{"configmaps": true, "secrets": false, "absents": false})
	if informers["configmaps"].absent.Load() {
		t.Error("a kind counted as absent that was refused for a moment")
	}
	now.SetTime(now.Now().Add(refusalLasts))
	expectKnown("the kinds that are refused for long", map[string]bool{"configmaps": true, "secrets": true, "absents": true})
	if informers["secrets"].HasSynced() || informers["absents"].HasSynced() {
		t.Fatal("kinds that are refused were read")
	}
	role.Rules[0].Resources = append(role.Rules[0].Resources, "secrets")
	expect.NoError(t, c.Update(t.Context(), role))
	expect.EventuallyWithin(t, longest, "a later success to count", func() (bool, string) { return informers["secrets"].HasSynced(), "not synced" })
}

// servedLater serves a kind while served is set: to a client, and to an informer that has not found it
// absent before.
type servedLater struct {
	dynamic.ResourceInterface
	served atomic.Bool
}

func (s *servedLater) List(context.Context, metav1.ListOptions) (*unstructured.UnstructuredList, error) {
	if !s.served.Load() {
		return nil, apierrors.NewNotFound(schema.GroupResource{Resource: "podgroups"}, "")
	}
	return &unstructured.UnstructuredList{Object: map[string]any{"metadata": map[string]any{"resourceVersion": "1"}}}, nil
}

// IsWatchListSemanticsUnSupported tells informers to list.
func (*servedLater) IsWatchListSemanticsUnSupported() bool { return true }

// informer returns one that asks for the kind once only.
func (s *servedLater) informer() (cache.SharedIndexInformer, error) {
	asked := false
	return cache.NewSharedIndexInformer(cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			if asked {
				<-ctx.Done()
			}
			asked = true
			return s.List(ctx, options)
		},
		WatchFuncWithContext: func(context.Context, metav1.ListOptions) (watch.Interface, error) { return watch.NewFake(), nil },
	}, s), &unstructured.Unstructured{}, 0, cache.Indexers{}), nil
}

// TestLooksForKind: a pod that names an object of an absent kind has it looked for, without waiting
// for the informer. A kind that is uninstalled later is absent again.
func TestLooksForKind(t *testing.T) {
	now, of := clocktesting.NewFakePassiveClock(time.Unix(1000, 0)), &servedLater{}
	i := &gangInformer{clock: now, objects: of, newInformer: of.informer, look: make(chan struct{}, 1), uninstalled: make(chan struct{}, 1)}
	var err error
	i.informer, err = i.newInformer()
	expect.NoError(t, err)
	i.absent.Store(true)
	var changes atomic.Int64
	go i.run(t.Context(), cache.ResourceEventHandlerFuncs{}, func() { changes.Add(1) })

	expectAbsent := func(when string, seen time.Time) {
		t.Helper()
		before := changes.Load() // it may be found absent at once
		if i.absentSince(seen) {
			t.Errorf("%s: absent before it was looked for", when)
		}
		expect.Eventually(t, when+": the kind to be looked for", func() (bool, string) {
			return i.absentSince(seen) && changes.Load() > before, fmt.Sprintf("%d changes", changes.Load())
		})
		if !i.isAbsent() || !i.known() {
			t.Errorf("%s: absent %t, known %t, want both", when, i.isAbsent(), i.known())
		}
	}
	expectAbsent("at first", now.Now())

	of.served.Store(true)
	if !i.absentSince(now.Now()) {
		t.Error("a pod that was there when the kind was looked for has it looked for again")
	}
	now.SetTime(now.Now().Add(time.Second))
	if i.absentSince(now.Now()) {
		t.Error("what was found before a pod was created counts for it")
	}
	expect.Eventually(t, "the kind to be found", func() (bool, string) { return i.HasSynced() && !i.isAbsent(), "not synced" })

	of.served.Store(false)
	for range minRefusals {
		if i.isAbsent() {
			t.Error("one refusal makes a kind absent")
		}
		i.failed(apierrors.NewNotFound(schema.GroupResource{Resource: "podgroups"}, ""))
		now.SetTime(now.Now().Add(refusalLasts))
	}
	expect.Eventually(t, "the kind to be uninstalled", func() (bool, string) { return i.isAbsent(), "still known" })
	expectAbsent("uninstalled", now.Now())

	of.served.Store(true)
	now.SetTime(now.Now().Add(time.Second))
	expect.Eventually(t, "the kind to be found again", func() (bool, string) {
		i.absentSince(now.Now())
		return i.HasSynced() && !i.isAbsent(), "not synced"
	})
}
