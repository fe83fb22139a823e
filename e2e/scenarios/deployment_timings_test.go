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

// TestOverflowTimings logs how long a pod takes from creation to Running: one that
// fits at home, one over a cold peering and two over a warm one. It fails only if a pod does not run
// where it should.
func TestOverflowTimings(t *testing.T) {
	liqoOnly(t, "benches measure driver direct: overflow_cold_seconds, overflow_warm_seconds")
	feature := features.New("timings").Assess("cold, warm and at home", func(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
		expectIdle(ctx, t) // so it is after the scenario before, which ends with a census
		ns := namespace(ctx, t, "scenario-timings", true)
		run := func(what string, away bool) {
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "timed"}, Spec: podSpec(requests("cpu", "300m", "memory", "32Mi"), "serve")}
			start := time.Now()
			if err := rome.Create(ctx, pod); err != nil {
				t.Fatal(err)
			}
			eventually(ctx, t, what+" runs", 2*time.Minute, func(ctx context.Context) (bool, string) {
				err := rome.Get(ctx, client.ObjectKeyFromObject(pod), pod)
				return err == nil && pod.Status.Phase == corev1.PodRunning, fmt.Sprint(pod.Status.Phase, pod.Spec.NodeName, err)
			})
			timing(t, what+", created to Running", time.Since(start))
			if overflowed(*pod) != away {
				t.Errorf("%s runs on %s", what, pod.Spec.NodeName)
			}
			if err := rome.Delete(ctx, pod); err != nil {
				t.Fatal(err)
			}
			eventually(ctx, t, what+" is gone", time.Minute, func(ctx context.Context) (bool, string) {
				err := rome.Get(ctx, client.ObjectKeyFromObject(pod), &corev1.Pod{})
				return err != nil && client.IgnoreNotFound(err) == nil, "the pod still exists"
			})
		}
		run("a pod at home", false)
		fill(ctx, t, rome, rome.ControlPlane(), "10m")
		run("a pod over a cold peering", true)
		for i := range 2 {
			run(fmt.Sprintf("a pod over a warm peering (%d)", i+1), true)
		}
		return ctx
	})
	testenv.Test(t, feature.Feature())
}
