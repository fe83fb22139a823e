//go:build e2e

package scenarios

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
	"sigs.k8s.io/e2e-framework/pkg/features"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// TestDevicesAndJobsOverflow runs a pod that requests a device that rome does not have, one that
// requests none of it, and a Job whose pods end.
func TestDevicesAndJobsOverflow(t *testing.T) {
	liqoOnly(t, "e2e/playground/scenarios has it with driver direct, and TestOverflowedPodsAreOrdinary has logs")
	var ns string
	feature := features.New("devices and Jobs").Setup(func(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
		ns = namespace(ctx, t, "scenario-jobs", true)
		fill(ctx, t, rome, rome.ControlPlane(), "10m")
		return ctx
	})
	feature.Assess("a pod that requests a GPU runs where there is one", func(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
		start := time.Now()
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "gpu", Labels: map[string]string{"app": "gpu"}},
			Spec:       podSpec(requests("cpu", "100m", "memory", "16Mi", "nvidia.com/gpu", "1"), "serve"),
		}
		if err := rome.Create(ctx, pod); err != nil {
			t.Fatal(err)
		}
		_, away := allReady(ctx, t, ns, "gpu", 1, 2*time.Minute)
		timing(t, "a GPU pod, created to ready", time.Since(start))
		if len(away) != 1 {
			t.Fatal("the GPU pod runs in rome, which has no GPU")
		}
		return ctx
	})
	feature.Assess("a pod that requests zero GPUs runs in another cluster, where one node has GPUs", func(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
		pod := createPod(ctx, t, ns, "zero", func(spec *corev1.PodSpec) {
			// None has the other device.
			*spec = podSpec(requests("cpu", "100m", "memory", "16Mi", "ephemeral-storage", "0", "nvidia.com/gpu", "0", "example.com/none", "0"), "serve")
			spec.Containers[0].Resources.Limits[corev1.ResourceEphemeralStorage] = requests("storage", "64Mi")["storage"]
		})
		if _, away := allReady(ctx, t, ns, "zero", 1, 2*time.Minute); len(away) != 1 || away[0].UID != pod.UID {
			t.Fatalf("the pod did not overflow: %+v", away)
		}
		if err := rome.Delete(ctx, pod); err != nil { // and with it its Reservation
			t.Fatal(err)
		}
		return ctx
	})
	feature.Assess("a Job completes, its reservation ends, its pods and logs stay", func(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
		start := time.Now()
		j := job(ns, "batch", 3, requests("cpu", "300m", "memory", "16Mi"), "3s")
		if err := rome.Create(ctx, j); err != nil {
			t.Fatal(err)
		}
		eventually(ctx, t, "the Job completes", 2*time.Minute, func(ctx context.Context) (bool, string) {
			var now batchv1.Job
			err := rome.Get(ctx, client.ObjectKeyFromObject(j), &now)
			return err == nil && now.Status.Succeeded == 3, fmt.Sprintf("%+v %v", now.Status, err)
		})
		timing(t, "a Job of 3 pods, created to complete", time.Since(start))
		eventually(ctx, t, "its reservation is gone", 40*time.Second, func(ctx context.Context) (bool, string) {
			var list broker.ReservationList
			if err := rome.List(ctx, &list, client.InNamespace(ns)); err != nil {
				return false, err.Error()
			}
			for _, r := range list.Items {
				// The GPU pod has one of its own.
				if gpu := r.Spec.PodSets[0].Requests.GPU; gpu == nil {
					return false, r.Name + " " + string(r.Status.Phase)
				}
			}
			return true, ""
		})
		pods, err := podsOf(ctx, ns, "batch")
		if err != nil || len(pods) != 3 {
			t.Fatalf("%d finished pods are left (%v), want 3", len(pods), err)
		}
		for _, p := range pods {
			if !overflowed(p) || p.Status.Phase != corev1.PodSucceeded {
				t.Errorf("%s is %s on %s, want Succeeded on a virtual node", p.Name, p.Status.Phase, p.Spec.NodeName)
			}
			if text, err := logs(ctx, p); err != nil || !strings.Contains(text, "done as "+p.Name) {
				t.Errorf("the logs of finished %s are %q (%v)", p.Name, text, err)
			}
		}
		// Only now: until here, they had to stay.
		if err := rome.Patch(ctx, j, client.RawPatch("application/merge-patch+json", []byte(`{"spec":{"ttlSecondsAfterFinished":1}}`))); err != nil {
			t.Fatal(err)
		}
		eventually(ctx, t, "the finished pods go with their Job's TTL", 2*time.Minute, func(ctx context.Context) (bool, string) {
			pods, err := podsOf(ctx, ns, "batch")
			return err == nil && len(pods) == 0, fmt.Sprint(len(pods), err)
		})
		return ctx
	})
	testenv.Test(t, feature.Feature())
}
