//go:build e2e

package scenarios

import (
	"context"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
	"sigs.k8s.io/e2e-framework/pkg/features"
)

// TestNoCapacityAnywhere creates a pod that no cluster has capacity for: its events
// give the reason of each provider, and it overflows when capacity appears.
func TestNoCapacityAnywhere(t *testing.T) {
	liqoOnly(t, "the reasons are those of the broker")
	feature := features.New("no capacity anywhere").Assess("the events give the reasons, and the pod overflows when capacity appears", func(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
		expectUnused(ctx, t)
		ns := namespace(ctx, t, "scenario-no-capacity", true)
		fill(ctx, t, rome, rome.ControlPlane(), "10m")
		// What single nodes have left is not for consumers to know; what a cluster lends is.
		fill(ctx, t, paris, "paris-worker", "430m")
		fill(ctx, t, paris, "paris-worker2", "520m")
		emptyBerlin := fill(ctx, t, berlin, berlin.ControlPlane(), "370m")
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "large", Labels: map[string]string{"app": "large"}},
			Spec:       podSpec(requests("cpu", "700m", "memory", "16Mi"), "serve"),
		}
		if err := rome.Create(ctx, pod); err != nil {
			t.Fatal(err)
		}
		eventually(ctx, t, "the pod's events name both providers with their reasons", 90*time.Second, func(ctx context.Context) (bool, string) {
			messages := events(ctx, *pod)
			for _, words := range []string{"paris: 0 of 1 pods", "Insufficient cpu on one node: requested 700m", "berlin: 0 of 1 pods", "requested 700m, available 370m"} {
				if !strings.Contains(messages, words) {
					return false, messages
				}
			}
			return !strings.Contains(messages, "520m"), messages
		})
		t.Logf("the pod's events:\n%s", events(ctx, *pod))
		if err := rome.Get(ctx, client.ObjectKeyFromObject(pod), pod); err != nil || pod.Status.Phase != corev1.PodPending {
			t.Fatalf("the pod is %s (%v), want Pending", pod.Status.Phase, err)
		}
		start := time.Now()
		emptyBerlin()
		_, away := allReady(ctx, t, ns, "large", 1, 2*time.Minute)
		timing(t, "capacity appears in berlin, the waiting pod is ready", time.Since(start))
		if len(away) != 1 || away[0].Spec.NodeName != "spillway-berlin" {
			t.Errorf("the pod does not run in berlin: %v", away)
		}
		return ctx
	})
	testenv.Test(t, feature.Feature())
}
