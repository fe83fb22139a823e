package liqo

import (
	"context"
	"testing"

	"github.com/go-logr/logr/testr"
	"github.com/liqotech/liqo/pkg/consts"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering/confine"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
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
	paris := newClient(t, controlplane.Start(t, liqoCRDs(t)))
	tenant := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: tenantNamespace("rome"), Labels: managedLabels("rome")}}
	tenant.Labels[consts.TenantNamespaceLabel] = "true"
	guests := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop-rome", Labels: map[string]string{consts.RemoteClusterID: "rome"}}}
	for _, namespace := range []*corev1.Namespace{tenant, guests} {
		expect.NoError(t, paris.Create(t.Context(), namespace))
	}
	p, err := NewProvider(Options{
		Options:  session.Options{Client: &notYetPermitted{Client: paris, refusals: 1}, ClusterID: "paris", Log: testr.New(t)},
		PodCIDRs: []string{"10.0.0.0/16"},
	})
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
