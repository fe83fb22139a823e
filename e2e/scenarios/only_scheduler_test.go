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

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/lab/cluster"
	"github.com/spillway-dev/spillway/e2e/lab/install"
)

// TestOnlyScheduler replaces rome's kube-scheduler, a static pod, by Spillway's scheduler, which
// then schedules every pod. What overflows meanwhile is shown on the playground.
func TestOnlyScheduler(t *testing.T) {
	liqoOnly(t, "the scheduler is the same with each driver")
	feature := features.New("scheduler.mode=only").Assess("Spillway's scheduler schedules all pods of rome", func(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
		expectUnused(ctx, t)
		replaceScheduler(ctx, t)
		for name, optedIn := range map[string]bool{"scenario-only-ordinary": false, "scenario-only": true} {
			pod := &corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Namespace: namespace(ctx, t, name, optedIn), Name: "plain"},
				Spec:       podSpec(requests("cpu", "10m", "memory", "4Mi"), "serve"),
			}
			if err := rome.Create(ctx, pod); err != nil {
				t.Fatal(err)
			}
			if pod.Spec.SchedulerName != corev1.DefaultSchedulerName {
				t.Errorf("the pod of namespace %s names scheduler %s", pod.Namespace, pod.Spec.SchedulerName)
			}
			eventually(ctx, t, "the pod of namespace "+pod.Namespace+" is bound at home", 90*time.Second, func(ctx context.Context) (bool, string) {
				err := rome.Get(ctx, client.ObjectKeyFromObject(pod), pod)
				return err == nil && pod.Spec.NodeName == rome.ControlPlane(), fmt.Sprintf("bound to %q (%v)", pod.Spec.NodeName, err)
			})
		}
		return ctx
	})
	testenv.Test(t, feature.Feature())
}

// replaceScheduler lets Spillway's scheduler take the place of kube-scheduler in rome until
// the test ends, whatever its result.
func replaceScheduler(ctx context.Context, t *testing.T) {
	t.Helper()
	lab, err := cluster.Open(ctx, t.Logf)
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	restore, err := install.OnlyScheduler(ctx, lab, rome.Cluster)
	steeredTo = corev1.DefaultSchedulerName
	t.Cleanup(func() {
		steeredTo = broker.SchedulerName
		began := time.Now()
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 8*time.Minute)
		defer cancel()
		if err := restore(ctx); err != nil {
			t.Errorf("restoring kube-scheduler: %v", err)
		}
		timing(t, "kube-scheduler is back", time.Since(began))
	})
	if err != nil {
		t.Fatalf("replacing kube-scheduler: %v", err)
	}
	timing(t, "kube-scheduler is replaced", time.Since(began))
}
