package liqo_test

import (
	"testing"

	offloadingv1beta1 "github.com/liqotech/liqo/apis/offloading/v1beta1"
	"github.com/liqotech/liqo/pkg/consts"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/contract"
	"github.com/spillway-dev/spillway/agent/internal/peering/liqo"
	"github.com/spillway-dev/spillway/agent/internal/peering/liqo/liqotest"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestTeardown covers teardowns that are hindered or interrupted.
func TestTeardown(t *testing.T) {
	e := newEnvironment(t)
	ctx := t.Context()
	half := expect.Resources("cpu", "500m", "memory", "512Mi")
	e.watch()
	up := func() {
		e.t.Helper()
		e.grant(2, half)
		e.capacity("Ready", peering.Capacity{Resources: half, Pods: 2, Namespaces: []string{"shop"}})
	}
	tearingDown := func() (peering.Progress, error) { return e.Driver().Teardown(ctx, contract.Paris) }

	for _, tc := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"crd-replicator lost track of its copies", func(*testing.T) {
			up()
			e.simulated.lost.Store(true)
			e.teardown()
			e.ExpectNothingLeft()
			e.simulated.lost.Store(false)
		}},
		{"pods are on the node", func(t *testing.T) {
			up()
			e.create(e.rome, &corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"},
				Spec:       corev1.PodSpec{NodeName: "spillway-paris", TerminationGracePeriodSeconds: new(int64), Containers: []corev1.Container{{Name: "c", Image: "i"}}},
			})
			// A mapping is kept while a pod of the namespace is on the node.
			e.capacity("Ready", peering.Capacity{Resources: half, Pods: 2})
			liqotest.Read(t, e.rome, "shop", consts.DefaultNamespaceOffloadingName, &offloadingv1beta1.NamespaceOffloading{})
			e.teardown()
			if pod, err := session.Find(ctx, e.rome, "shop", "web", &corev1.Pod{}); pod != nil || err != nil {
				t.Errorf("the pod still exists: %v", err)
			}
			e.expectNothingLeft(e.rome, "rome")
		}},
		{"the provider is needed again", func(*testing.T) {
			up()
			e.until("KubeletTerminating", tearingDown)
			up()
			e.teardown()
			e.expectNothingLeft(e.paris, "paris")
		}},
		{"both agents restart", func(*testing.T) {
			up()
			e.until("IdentityTerminating", tearingDown)
			e.Restart()
			e.grant(2, half)
			e.teardown()
			e.ExpectNothingLeft()
		}},
		{"the provider also is a consumer", func(t *testing.T) {
			up()
			expect.NoError(t, liqo.SetSession(ctx, e.paris, liqotest.Read(t, e.paris, "", "liqo-tenant-rome", &corev1.Namespace{}), liqo.AnnotationSession, 5))
			e.teardown()
			e.expectNothingLeft(e.rome, "rome")
			namespace := liqotest.Read(t, e.paris, "", "liqo-tenant-rome", &corev1.Namespace{})
			if session.Number(namespace, liqo.AnnotationProviderSession) != 0 || !namespace.DeletionTimestamp.IsZero() {
				t.Errorf("the namespace of the other direction changed: %v", namespace.Annotations)
			}
			var secrets corev1.SecretList
			if err := e.paris.List(ctx, &secrets, client.InNamespace(namespace.Name)); err != nil || len(secrets.Items) > 0 {
				t.Errorf("%d Secrets are left, %v", len(secrets.Items), err)
			}
			expect.NoError(t, liqo.SetSession(ctx, e.paris, namespace, liqo.AnnotationSession, 0))
		}},
		{"the provider is unreachable", func(*testing.T) {
			up()
			e.Disconnect(true)
			e.teardown()
			e.expectNothingLeft(e.rome, "rome")
			e.until("Removed", func() (peering.Progress, error) { return e.ProviderSide().Teardown(ctx, "rome") })
			e.expectNothingLeft(e.paris, "paris")
			e.Disconnect(false)
		}},
		{"the clusters were peered manually", func(t *testing.T) {
			e.create(e.rome, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "liqo-tenant-paris", Labels: map[string]string{consts.RemoteClusterID: "paris", consts.TenantNamespaceLabel: "true"}}})
			e.until(liqo.ReasonConflict, e.peering)
			e.teardown()
			liqotest.Read(t, e.rome, "", "liqo-tenant-paris", &corev1.Namespace{})
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			defer func(outer *testing.T) { e.t = outer }(e.t)
			e.t = t
			tc.run(t)
		})
	}
}
