//go:build e2e

package scenarios

import (
	"context"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
	"sigs.k8s.io/e2e-framework/pkg/features"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// TestReservationByHand creates a Reservation: it becomes a hold and a virtual node of
// exactly that size, grows in place, and is removed.
func TestReservationByHand(t *testing.T) {
	liqoOnly(t, "TestReserveInAdvance runs with both drivers")
	feature := features.New("a Reservation by hand").Assess("it becomes a hold and a node of its size", func(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
		expectIdle(ctx, t)
		ns := namespace(ctx, t, "scenario-by-hand", true)
		r := &broker.Reservation{
			ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "by-hand"},
			Spec: broker.ReservationSpec{TargetClusterID: "paris", PodSets: []broker.PodSet{{
				Name: "pods", Count: 2,
				Requests: broker.ResourceQuantities{CPU: ptr.To(resource.MustParse("333m")), Memory: ptr.To(resource.MustParse("100000001"))},
			}}},
		}
		start := time.Now()
		if err := rome.Create(ctx, r); err != nil {
			t.Fatal(err)
		}
		carries := func(what, cpu, memory string, pods int64) {
			t.Helper()
			eventually(ctx, t, what, 2*time.Minute, func(ctx context.Context) (bool, string) {
				var n corev1.Node
				if err := rome.Get(ctx, client.ObjectKey{Name: "spillway-paris"}, &n); err != nil {
					return false, err.Error()
				}
				have := n.Status.Allocatable
				return have.Cpu().Cmp(resource.MustParse(cpu)) == 0 && have.Memory().Cmp(resource.MustParse(memory)) == 0 && have.Pods().Value() == pods && !n.Spec.Unschedulable,
					fmt.Sprint(have)
			})
			var held broker.ClusterAdvertisement
			if err := hub.Get(ctx, client.ObjectKey{Namespace: broker.SystemNamespace, Name: "paris"}, &held); err != nil {
				t.Fatal(err)
			}
			if have := held.Status.Reserved.List()[corev1.ResourceCPU]; have.Cmp(resource.MustParse(cpu)) != 0 {
				t.Errorf("the ledger of paris has %s CPU reserved, want %s", have.String(), cpu)
			}
		}
		carries("the node has the size of the Reservation", "666m", "200000002", 2)
		timing(t, "a Reservation by hand, written to node", time.Since(start))
		// The agent writes the status meanwhile: a patch cannot conflict with it.
		raise := client.RawPatch(types.JSONPatchType, []byte(`[{"op":"replace","path":"/spec/podSets/0/count","value":3}]`))
		if err := rome.Patch(ctx, r, raise); err != nil {
			t.Fatal(err)
		}
		carries("the node has grown in place", "999m", "300000003", 3)
		if err := rome.Delete(ctx, r); err != nil {
			t.Fatal(err)
		}
		expectIdle(ctx, t)
		return ctx
	})
	testenv.Test(t, feature.Feature())
}
