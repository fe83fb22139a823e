//go:build e2e

package scenarios

import (
	"context"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
	"sigs.k8s.io/e2e-framework/pkg/features"
)

// heldPods overflow in the scenario, of heldCPU each; competitors are pods of paris that
// want the same places.
const (
	heldPods    = 5
	heldCPU     = "200m"
	competitors = "scenario-competitors"
)

// TestHeldPlacesAreKept has pods of paris want the places that paris has promised to pods
// of rome, 20 a second: none gets one.
func TestHeldPlacesAreKept(t *testing.T) {
	liqoOnly(t, "e2e/playground/scenarios has it with driver direct")
	feature := features.New("held places").Assess("pods of the provider take no place that it has promised", heldPlacesAreKept)
	testenv.Test(t, feature.Feature())
}

func heldPlacesAreKept(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	expectIdle(ctx, t) // over a warm peering, guests take the places before many others want them
	ns := namespace(ctx, t, "scenario-held", true)
	fill(ctx, t, rome, rome.ControlPlane(), "10m")
	fill(ctx, t, berlin, berlin.ControlPlane(), "10m")
	// No pod runs on the first node, the control plane.
	for i, node := range paris.Nodes()[1:] {
		leave := "10m"
		if i == 0 {
			leave = "1050m"
		}
		fill(ctx, t, paris, node, leave)
	}
	other := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: competitors}}
	deleteNamespace(ctx, t, paris, other.DeepCopy()) // left by a run that was cut off
	if err := paris.Create(ctx, other); err != nil {
		t.Fatal(err)
	}
	// None of its pods is left when the nodes are emptied.
	t.Cleanup(func() { deleteNamespace(context.WithoutCancel(ctx), t, paris, other) })

	start := time.Now()
	if err := rome.Create(ctx, deployment(ns, "held", heldPods, requests("cpu", heldCPU, "memory", "16Mi"))); err != nil {
		t.Fatal(err)
	}
	eventually(ctx, t, "the scheduler of paris has placed the placeholders", time.Minute, func(ctx context.Context) (bool, string) {
		var list corev1.PodList
		if err := paris.List(ctx, &list, client.InNamespace("spillway-holds")); err != nil {
			return false, err.Error()
		}
		bound := 0
		for _, p := range list.Items {
			if p.Spec.NodeName != "" {
				bound++
			}
		}
		return bound == heldPods, fmt.Sprintf("%d of %d", bound, heldPods)
	})
	stop := compete(ctx, t)
	_, away := allReady(ctx, t, ns, "held", heldPods, time.Minute)
	wanted := stop()
	timing(t, fmt.Sprintf("%d pods run in paris, while %d others wanted their places", len(away), wanted), time.Since(start))
	if len(away) != heldPods || wanted == 0 {
		t.Errorf("%d of %d pods run away from home, beside %d competitors", len(away), heldPods, wanted)
	}
	return ctx
}

// compete creates pods in paris, of the held and of half the held size, until it is stopped.
func compete(ctx context.Context, t *testing.T) (stop func() int) {
	ctx, cancel := context.WithCancel(ctx)
	t.Cleanup(cancel)
	done := make(chan int, 1)
	go func() {
		n := 0
		for ticker := time.NewTicker(50 * time.Millisecond); ; {
			select {
			case <-ctx.Done():
				ticker.Stop()
				done <- n
				return
			case <-ticker.C:
			}
			want := requests("cpu", heldCPU, "memory", "16Mi")
			if n%2 == 1 {
				want = requests("cpu", "100m", "memory", "16Mi")
			}
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: competitors, Name: fmt.Sprintf("c%d", n)}, Spec: podSpec(want, "serve")}
			if paris.Create(ctx, pod) == nil {
				n++
			}
		}
	}()
	return func() int {
		cancel()
		return <-done
	}
}
