package cluster_test

import (
	"context"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/e2e/lab/binaries"
	"github.com/spillway-dev/spillway/e2e/playground/cluster"
)

// programs builds, or finds in the cache, what a control plane is made of.
func programs(t *testing.T) (p cluster.Programs, scheduler string) {
	t.Helper()
	minors, err := binaries.WantedMinors()
	expect.NoError(t, err)
	for name, path := range map[string]*string{"etcd": &p.Etcd, "kube-apiserver": &p.APIServer, "kube-controller-manager": &p.ControllerManager} {
		if *path, err = binaries.Program(t.Context(), binaries.At(name, minors.Consumers), t.Logf); err != nil {
			t.Fatal(err)
		}
	}
	dir := t.TempDir()
	if err := binaries.Own(t.Context(), t.Logf, dir, "./scheduler-plugin"); err != nil {
		t.Fatal(err)
	}
	return p, filepath.Join(dir, "scheduler-plugin")
}

// TestCompleteControlPlane runs a Deployment and a Job on a cluster that nothing
// was installed on.
func TestCompleteControlPlane(t *testing.T) {
	ctx := t.Context()
	p, scheduler := programs(t)
	start := time.Now()
	c, err := cluster.Start(ctx, cluster.Options{Name: "rome", Dir: filepath.Join(t.TempDir(), "rome"), Programs: p})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, p := range c.Processes() {
			if t.Failed() {
				t.Logf("the end of the log of %s:\n%s", p.Name(), p.Tail(15))
			}
		}
		c.Stop(2 * time.Second)
		for _, p := range c.Processes() {
			if err := p.Err(); err != nil {
				t.Error(err)
			}
		}
	})
	expect.NoError(t, c.StartControllers())
	expect.NoError(t, c.StartScheduler(scheduler))
	t.Logf("timing: the API server was ready after %s", time.Since(start))
	capacity := corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("4"), corev1.ResourceMemory: resource.MustParse("8Gi")}
	if err := c.AddNodes(ctx, "node", 2, capacity, nil); err != nil {
		t.Fatal(err)
	}

	pod := func(args ...string) corev1.PodTemplateSpec {
		return corev1.PodTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": "it"}},
			Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "it", Args: args, Resources: corev1.ResourceRequirements{
				Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1")},
			}}}},
		}
	}
	web := &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
		Spec:       appsv1.DeploymentSpec{Replicas: ptr.To(int32(5)), Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "it"}}, Template: pod("serve")},
	}
	work := pod("work", "1s")
	work.Spec.RestartPolicy = corev1.RestartPolicyNever
	batch := &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "batch"},
		Spec:       batchv1.JobSpec{Completions: ptr.To(int32(3)), Parallelism: ptr.To(int32(3)), Template: work},
	}
	if err := c.Client.Create(ctx, web); err != nil {
		t.Fatal(err)
	}
	if err := c.Client.Create(ctx, batch); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the Deployment is available", func(ctx context.Context) error {
		if err := c.Client.Get(ctx, client.ObjectKeyFromObject(web), web); err != nil || web.Status.AvailableReplicas == 5 {
			return err
		}
		return fmt.Errorf("%d of 5 are", web.Status.AvailableReplicas)
	})
	t.Logf("timing: the Deployment was available after %s", time.Since(start))
	eventually(t, "the Job is complete", func(ctx context.Context) error {
		if err := c.Client.Get(ctx, client.ObjectKeyFromObject(batch), batch); err != nil || batch.Status.Succeeded == 3 {
			return err
		}
		return fmt.Errorf("%d of 3 pods are", batch.Status.Succeeded)
	})
	if err := c.Client.Delete(ctx, web, client.PropagationPolicy(metav1.DeletePropagationForeground)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the Deployment and its pods are gone", func(ctx context.Context) error {
		err := c.Client.Get(ctx, client.ObjectKeyFromObject(web), web)
		if err == nil {
			return fmt.Errorf("the Deployment still exists: %+v", web.Status)
		}
		return client.IgnoreNotFound(err)
	})
	if err := c.Err(); err != nil {
		t.Error(err)
	}
}

func eventually(t *testing.T, what string, ok func(context.Context) error) {
	t.Helper()
	expect.Eventually(t, what, func() (bool, string) {
		err := ok(t.Context())
		return err == nil, fmt.Sprint(err)
	})
}
