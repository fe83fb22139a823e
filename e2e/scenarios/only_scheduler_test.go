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

// TestOnlyScheduler replaces rome's kube-scheduler by Spillway's scheduler: it schedules every
// pod, those of opted-in namespaces overflow, and a pod that tolerates every taint without
// being a DaemonSet's does not disturb the guests on a virtual node.
func TestOnlyScheduler(t *testing.T) {
	liqoOnly(t, "the scheduler is the same with each driver")
	feature := features.New("scheduler.mode=only").Assess("Spillway's scheduler schedules all pods of rome", func(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
		expectUnused(ctx, t)
		replaceScheduler(ctx, t)
		ordinary, mine := namespace(ctx, t, "scenario-only-ordinary", false), namespace(ctx, t, "scenario-only", true)
		start := func(name string, tolerations ...corev1.Toleration) client.ObjectKey {
			t.Helper()
			spec := podSpec(requests("cpu", "10m", "memory", "4Mi"), "serve")
			spec.Tolerations = tolerations
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: ordinary, Name: name}, Spec: spec}
			if err := rome.Create(ctx, pod); err != nil {
				t.Fatal(err)
			}
			if pod.Spec.SchedulerName != corev1.DefaultSchedulerName {
				t.Errorf("pod %s names scheduler %s", name, pod.Spec.SchedulerName)
			}
			return client.ObjectKeyFromObject(pod)
		}
		node := func(key client.ObjectKey) string {
			t.Helper()
			var pod corev1.Pod
			if err := rome.Get(ctx, key, &pod); err != nil {
				t.Fatal(err)
			}
			return pod.Spec.NodeName
		}
		plain := start("plain")
		eventually(ctx, t, "a pod of a namespace that is not opted in is bound at home", 90*time.Second, func(context.Context) (bool, string) {
			return node(plain) == rome.ControlPlane(), "bound to " + node(plain)
		})
		fill(ctx, t, rome, rome.ControlPlane(), "1m")
		if err := rome.Create(ctx, deployment(mine, "web", 2, requests("cpu", "300m", "memory", "32Mi"))); err != nil {
			t.Fatal(err)
		}
		_, away := allReady(ctx, t, mine, "web", 2, 2*time.Minute)
		if len(away) != 2 {
			t.Fatalf("%d of 2 pods overflowed", len(away))
		}
		// It fits no node at home, and prefers the one with the most room.
		greedy := start("tolerates-everything", corev1.Toleration{Operator: corev1.TolerationOpExists})
		eventually(ctx, t, "the pod that tolerates every taint is unschedulable", time.Minute, func(context.Context) (bool, string) {
			var pod corev1.Pod
			if err := rome.Get(ctx, greedy, &pod); err != nil {
				return false, err.Error()
			}
			for _, c := range pod.Status.Conditions {
				if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && c.Reason == corev1.PodReasonUnschedulable {
					return true, ""
				}
			}
			return false, fmt.Sprintf("bound to %q: %v", pod.Spec.NodeName, pod.Status.Conditions)
		})
		if on := node(greedy); on != "" {
			t.Errorf("the pod that tolerates every taint is bound to %s", on)
		}
		if _, still := allReady(ctx, t, mine, "web", 2, time.Minute); len(still) != 2 || still[0].UID != away[0].UID && still[0].UID != away[1].UID {
			t.Errorf("the guests have changed")
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
