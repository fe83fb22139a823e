//go:build e2e

package scenarios

import (
	"context"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
	"sigs.k8s.io/e2e-framework/pkg/features"
)

// TestRequestsOfNothing runs a pod that requests zero of resources that no grant has.
func TestRequestsOfNothing(t *testing.T) {
	liqoOnly(t, "e2e/playground/scenarios has it with driver direct")
	feature := features.New("requests of nothing").Assess("a pod that requests zero GPUs runs in another cluster", func(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
		ns := namespace(ctx, t, "scenario-zero", true)
		fill(ctx, t, rome, rome.ControlPlane(), "10m")
		pod := createPod(ctx, t, ns, "zero", func(spec *corev1.PodSpec) {
			// A node of a provider has GPUs, none has the other device.
			*spec = podSpec(requests("cpu", "100m", "memory", "16Mi", "ephemeral-storage", "0", "nvidia.com/gpu", "0", "example.com/none", "0"), "serve")
			spec.Containers[0].Resources.Limits[corev1.ResourceEphemeralStorage] = requests("storage", "64Mi")["storage"]
		})
		if _, away := allReady(ctx, t, ns, "zero", 1, 2*time.Minute); len(away) != 1 || away[0].UID != pod.UID {
			t.Fatalf("the pod did not overflow: %+v", away)
		}
		return ctx
	})
	testenv.Test(t, feature.Feature())
}
