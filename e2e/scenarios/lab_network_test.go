//go:build e2e

package scenarios

import (
	"context"
	"fmt"
	"net"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
	"sigs.k8s.io/e2e-framework/pkg/features"

	"github.com/spillway-dev/spillway/e2e/lab/install"
)

// TestPodsReachEachOther checks the lab itself: a pod in rome reaches one in
// paris by its address, with nothing of Spillway in between.
func TestPodsReachEachOther(t *testing.T) {
	liqoOnly(t, "nothing of Spillway is in between")
	const name = "scenario-network"
	feature := features.New("the lab's network").Assess("a pod in rome reaches one in paris", func(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
		ns := namespace(ctx, t, name, false)
		there := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Spec: podSpec(requests("cpu", "10m"), "serve")}
		paris.Delete(ctx, there.DeepCopy()) // left by a run that was cut off
		eventually(ctx, t, "an earlier pod in paris is gone", time.Minute, func(ctx context.Context) (bool, string) {
			err := paris.Get(ctx, client.ObjectKeyFromObject(there), &corev1.Pod{})
			return client.IgnoreNotFound(err) == nil && err != nil, "it is still there"
		})
		if err := paris.Create(ctx, there); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { paris.Delete(context.WithoutCancel(ctx), there) })
		eventually(ctx, t, "the pod in paris runs", time.Minute, func(ctx context.Context) (bool, string) {
			err := paris.Get(ctx, client.ObjectKeyFromObject(there), there)
			return err == nil && ready(*there), fmt.Sprint(there.Status.Phase, err)
		})
		here := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "caller"}, Spec: podSpec(requests("cpu", "10m"), "serve")}
		if err := rome.Create(ctx, here); err != nil {
			t.Fatal(err)
		}
		eventually(ctx, t, "the pod in rome runs", time.Minute, func(ctx context.Context) (bool, string) {
			err := rome.Get(ctx, client.ObjectKeyFromObject(here), here)
			return err == nil && ready(*here), fmt.Sprint(here.Status.Phase, err)
		})
		answer, err := execIn(ctx, *here, "/"+install.Workload, "get", "http://"+net.JoinHostPort(there.Status.PodIP, "8080"))
		if err != nil || answer != name {
			t.Fatalf("from rome, the pod in paris answers %q (%v), want %q", answer, err, name)
		}
		return ctx
	})
	testenv.Test(t, feature.Feature())
}
