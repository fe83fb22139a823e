package provider

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	offloadingv1beta1 "github.com/liqotech/liqo/apis/offloading/v1beta1"
	"github.com/liqotech/liqo/pkg/consts"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	testclock "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering/confine"
	"github.com/spillway-dev/spillway/agent/internal/peering/liqo"
	"github.com/spillway-dev/spillway/agent/internal/peering/liqo/liqotest"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// notYetPermitted refuses a number of NetworkPolicies, as an API server that has not
// observed a RoleBinding yet.
type notYetPermitted struct {
	client.Client
	refusals int
}

func (c *notYetPermitted) Create(ctx context.Context, object client.Object, options ...client.CreateOption) error {
	if _, is := object.(*networkingv1.NetworkPolicy); is && c.refusals > 0 {
		c.refusals--
		return apierrors.NewForbidden(networkingv1.Resource("networkpolicies"), object.GetName(), nil)
	}
	return c.Client.Create(ctx, object, options...)
}

// TestConfineNewNamespace: the watch of namespaces repeats what the agent is not permitted
// in a new one yet. Without an error, it would wait for the next event.
func TestConfineNewNamespace(t *testing.T) {
	paris := liqotest.NewClient(t, controlplane.Start(t, liqotest.CRDs(t)))
	tenant := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: liqo.TenantNamespace("rome"), Labels: liqo.ManagedLabels("rome")}}
	tenant.Labels[consts.TenantNamespaceLabel] = "true"
	guests := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop-rome", Labels: map[string]string{consts.RemoteClusterID: "rome"}}}
	for _, namespace := range []*corev1.Namespace{tenant, guests} {
		expect.NoError(t, paris.Create(t.Context(), namespace))
	}
	p, err := New(Options{Options: liqo.Options{Options: session.Options{Client: &notYetPermitted{Client: paris, refusals: 1}, ClusterID: "paris", Log: testr.New(t)}, PodCIDRs: []string{"10.0.0.0/16"}}})
	expect.NoError(t, err)
	expect.NoError(t, p.changed(t.Context(), "rome")) // nothing is granted yet
	p.grants.Set("rome", expect.Resources("cpu", "1"), 1)

	if err := p.changed(t.Context(), "rome"); !apierrors.IsForbidden(err) {
		t.Fatalf("without permission: %v, want an error so that it is repeated", err)
	}
	expect.NoError(t, p.changed(t.Context(), "rome"))
	quota, err := session.Find(t.Context(), paris, "shop-rome", confine.Quota, &corev1.ResourceQuota{})
	expect.NoError(t, err)
	if quota == nil {
		t.Error("the guests of the new namespace are not limited")
	}
}

// TestTrialNamespace: before Liqo has created a namespace for guests, they are tried in another
// one that is limited as those, which is removed then.
func TestTrialNamespace(t *testing.T) {
	paris := liqotest.NewClient(t, controlplane.Start(t, liqotest.CRDs(t)))
	clock := testclock.NewFakePassiveClock(time.Now())
	p, err := New(Options{Options: liqo.Options{Options: session.Options{Client: paris, ClusterID: "paris", Clock: clock, Log: testr.New(t)}, PodCIDRs: []string{"10.0.0.0/16"}}})
	expect.NoError(t, err)
	ctx := t.Context()
	const trial = "spillway-trial-rome"
	for range 2 {
		if name, progress, err := p.EnsureTrialNamespace(ctx, "rome"); err != nil || name != trial || !progress.Done {
			t.Fatalf("guests are tried in %q: %+v, %v", name, progress, err)
		}
	}
	namespace := liqotest.Read(t, paris, "", trial, &corev1.Namespace{})
	if namespace.Labels[consts.RemoteClusterID] != "rome" || namespace.Labels[labelLimited] != "true" || namespace.Labels[labelPodSecurity] != broker.PodSecurityRestricted {
		t.Errorf("the labels are %v", namespace.Labels)
	}
	liqotest.Read(t, paris, trial, confine.Quota, &corev1.ResourceQuota{})
	liqotest.Read(t, paris, trial, confine.Quota, &corev1.LimitRange{})
	// The value may change.
	p.PodSecurity = broker.PodSecurityBaseline
	if _, _, err := p.EnsureTrialNamespace(ctx, "rome"); err != nil || liqotest.Read(t, paris, "", trial, &corev1.Namespace{}).Labels[labelPodSecurity] != broker.PodSecurityBaseline {
		t.Errorf("with another Pod Security Standard: %v", err)
	}
	consumers, err := p.Consumers(ctx)
	expect.NoError(t, err)
	guests, err := p.GuestNamespaces(ctx, "rome")
	expect.NoError(t, err)
	if !slices.Equal(consumers, []string{"rome"}) || len(guests) > 0 {
		t.Errorf("consumers %v, namespaces of guests %v", consumers, guests)
	}

	tenant := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: liqo.TenantNamespace("rome"), Labels: liqo.ManagedLabels("rome")}}
	tenant.Labels[consts.TenantNamespaceLabel] = "true"
	shop := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop-rome", Labels: map[string]string{consts.RemoteClusterID: "rome"}}}
	expect.NoError(t, paris.Create(ctx, tenant))
	_, err = p.EnsureGrant(ctx, "rome", expect.Resources("cpu", "1"), 1)
	expect.NoError(t, err)
	if namespace := liqotest.Read(t, paris, "", trial, &corev1.Namespace{}); !namespace.DeletionTimestamp.IsZero() {
		t.Error("the namespace is deleted before there is one for guests")
	}
	expect.NoError(t, paris.Create(ctx, shop))
	expect.NoError(t, p.changed(ctx, "rome"))
	if namespace := liqotest.Read(t, paris, "", trial, &corev1.Namespace{}); namespace.DeletionTimestamp.IsZero() {
		t.Error("the namespace is not deleted when there is one for guests")
	}
	for _, tooLong := range []bool{false, true} {
		if tooLong {
			clock.SetTime(time.Now().Add(trialEndsWithin))
		}
		if name, progress, err := p.EnsureTrialNamespace(ctx, "rome"); err != nil || name != "" || progress.Done != tooLong || progress.Reason != session.ReasonTerminating {
			t.Errorf("while it is being deleted, for too long: %t: %+v, %v", tooLong, progress, err)
		}
	}

	if _, _, err := p.EnsureTrialNamespace(ctx, "berlin"); err != nil {
		t.Fatal(err)
	}
	expect.NoError(t, p.RemoveTrialNamespace(ctx, "berlin"))
	if namespace := liqotest.Read(t, paris, "", "spillway-trial-berlin", &corev1.Namespace{}); namespace.DeletionTimestamp.IsZero() {
		t.Error("the namespace is not deleted")
	}
	other := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "spillway-trial-oslo"}}
	expect.NoError(t, paris.Create(ctx, other))
	if _, progress, err := p.EnsureTrialNamespace(ctx, "oslo"); err != nil || progress.Reason != "NamespaceTaken" {
		t.Errorf("a namespace of this cluster: %+v, %v", progress, err)
	}
	expect.NoError(t, p.RemoveTrialNamespace(ctx, "oslo"))
	if namespace := liqotest.Read(t, paris, "", other.Name, &corev1.Namespace{}); !namespace.DeletionTimestamp.IsZero() {
		t.Error("a namespace of this cluster is deleted")
	}
}

// TestEndingGuestsCount: Liqo's Quota has room for another guest as soon as one is deleted. In a
// namespace for guests no pod is created while those that still run use the grant.
func TestEndingGuestsCount(t *testing.T) {
	config := controlplane.Start(t, liqotest.CRDs(t))
	controlplane.StartControllers(t, config, "resourcequota-controller")
	paris := liqotest.NewClient(t, config)
	ctx := t.Context()
	tenant := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: liqo.TenantNamespace("rome"), Labels: liqo.ManagedLabels("rome")}}
	tenant.Labels[consts.TenantNamespaceLabel] = "true"
	for _, object := range []client.Object{tenant, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop-rome", Labels: map[string]string{consts.RemoteClusterID: "rome"}}}} {
		expect.NoError(t, paris.Create(ctx, object))
	}
	p, err := New(Options{Options: liqo.Options{Options: session.Options{Client: paris, ClusterID: "paris", Log: testr.New(t)}, PodCIDRs: []string{"10.0.0.0/16"}}, PodSecurity: broker.PodSecurityBaseline})
	expect.NoError(t, err)
	granted := func(pods int32, total corev1.ResourceList) {
		t.Helper()
		expect.Eventually(t, "the grant", func() (bool, string) {
			progress, err := p.EnsureGrant(ctx, "rome", total, pods)
			if err != nil || !progress.Done {
				return false, fmt.Sprint(progress, err)
			}
			quota := liqotest.Read(t, paris, "shop-rome", confine.Quota, &corev1.ResourceQuota{})
			return session.Equal(quota.Spec.Hard, quota.Status.Hard), fmt.Sprintf("%+v", quota)
		})
	}
	guest := func(name, cpu string) *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop-rome", Name: name}, Spec: corev1.PodSpec{
			NodeName: "worker", TerminationGracePeriodSeconds: ptr.To[int64](3600),
			Containers: []corev1.Container{{Name: "c", Image: "i", Resources: corev1.ResourceRequirements{Requests: expect.Resources("cpu", cpu)}}},
		}}
	}
	create := func(name string) error { return paris.Create(ctx, guest(name, "1")) }
	created := func(name string) {
		t.Helper()
		expect.Eventually(t, "the quota to be in force", func() (bool, string) {
			err := paris.Create(ctx, guest("beyond", "1000"), client.DryRunAll)
			return apierrors.IsForbidden(err) && strings.Contains(err.Error(), "exceeded quota: "+confine.Quota), fmt.Sprint(err)
		})
		expect.Eventually(t, name+" to be created", func() (bool, string) {
			err := client.IgnoreAlreadyExists(create(name))
			return err == nil, fmt.Sprint(err)
		})
	}
	remove := func(name string, options ...client.DeleteOption) {
		t.Helper()
		expect.NoError(t, paris.Delete(ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop-rome", Name: name}}, options...))
	}
	refused := func(name string) {
		t.Helper()
		if err := create(name); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "exceeded quota: "+confine.Quota) {
			t.Errorf("beside a guest that is being deleted: %v", err)
		}
	}

	granted(2, expect.Resources("cpu", "1"))
	created("first")
	remove("first")
	refused("second")
	granted(3, expect.Resources("cpu", "2"))
	created("second")
	remove("second")
	refused("third")
	remove("first", client.GracePeriodSeconds(0))
	created("third")
}

// TestLiqoObjectsAreCounted: what a consumer may create of Liqo's own types in a namespace for
// guests is limited in number. Liqo's Quota counts no ShadowPod that requests nothing.
func TestLiqoObjectsAreCounted(t *testing.T) {
	config := controlplane.Start(t, liqotest.CRDs(t))
	controlplane.StartControllers(t, config, "resourcequota-controller")
	paris := liqotest.NewClient(t, config)
	ctx := t.Context()
	expect.NoError(t, paris.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop-rome", Labels: map[string]string{consts.RemoteClusterID: "rome"}}}))
	p, err := New(Options{Options: liqo.Options{Options: session.Options{Client: paris, ClusterID: "paris", Log: testr.New(t)}}})
	expect.NoError(t, err)
	p.grants.Set("rome", expect.Resources("cpu", "1"), 1)
	expect.NoError(t, p.ensureNamespaceQuota(ctx, confine.Namespace{Client: paris, Name: "shop-rome"}, "rome"))

	pod := corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}}
	created := 0
	for resource, object := range map[corev1.ResourceName]func(name string) client.Object{
		countEndpointSlices: func(name string) client.Object {
			return &offloadingv1beta1.ShadowEndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "shop-rome", Name: name}}
		},
		countShadowPods: func(name string) client.Object {
			return &offloadingv1beta1.ShadowPod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop-rome", Name: name}, Spec: offloadingv1beta1.ShadowPodSpec{Pod: pod}}
		},
	} {
		expect.Eventually(t, "objects are counted", func() (bool, string) {
			// What is created while the controller counts for the first time may be left out until
			// the next resync; and an object that exists already is charged as one more. So each
			// attempt creates another object, and any of them may be the one that counts.
			created++
			err := paris.Create(ctx, object(fmt.Sprintf("object-%d", created)))
			used := liqotest.Read(t, paris, "shop-rome", confine.Quota, &corev1.ResourceQuota{}).Status.Used[resource]
			return used.Value() > 0, fmt.Sprint(resource, ": ", used.Value(), ", ", err)
		})
		expect.Eventually(t, "one more is refused", func() (bool, string) {
			// As if there were as many as the limit, also if the controller has counted since.
			quota := liqotest.Read(t, paris, "shop-rome", confine.Quota, &corev1.ResourceQuota{})
			before := quota.DeepCopy()
			quota.Status.Used[resource] = quota.Spec.Hard[resource]
			expect.NoError(t, paris.Status().Patch(ctx, quota, client.MergeFrom(before)))
			err := paris.Create(ctx, object("one-more"), client.DryRunAll)
			return apierrors.IsForbidden(err) && strings.Contains(err.Error(), "exceeded quota: "+confine.Quota+", requested: "+string(resource)+"=1"), fmt.Sprint(err)
		})
	}
}
