package scenarios_test

import (
	"fmt"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestDevicesAndJobsOverflow runs a pod that requests a device that rome does not have, and a
// Job whose pods end: its Reservation ends, and its pods stay.
func TestDevicesAndJobsOverflow(t *testing.T) {
	s := begin(t, nodes{
		"rome":   full,
		"paris":  {group("paris", 1, "cpu", "4", "memory", "4Gi")},
		"berlin": {group("berlin", 1, "cpu", "4", "memory", "4Gi", gpu, "2")},
	})
	ns := s.optedIn("jobs")
	s.createIn(ns, "gpu", "200m", requestGPU)
	if _, away := s.allReady(ns, "gpu", 1); len(away) != 1 || away[0].Spec.NodeName != broker.VirtualNodeName("berlin") {
		t.Fatalf("the pod does not run where there is a GPU: %v", describe(away))
	}

	spec := specOf("300m", func(spec *corev1.PodSpec) {
		spec.Containers[0].Args, spec.RestartPolicy = []string{"work", "3s"}, corev1.RestartPolicyNever
	})
	job := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "batch"}, Spec: batchv1.JobSpec{
		Parallelism: ptr.To(int32(3)), Completions: ptr.To(int32(3)), BackoffLimit: ptr.To(int32(0)),
		Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": "batch"}}, Spec: spec},
	}}
	expect.NoError(t, s.rome.Create(t.Context(), job))
	s.eventually("the Job completes", func() error {
		if err := s.rome.Get(t.Context(), client.ObjectKeyFromObject(job), job); err != nil || job.Status.Succeeded == 3 {
			return err
		}
		return fmt.Errorf("%+v", job.Status)
	})
	s.eventually("its Reservation is gone", func() error {
		var list broker.ReservationList
		if err := s.rome.List(t.Context(), &list, client.InNamespace(ns)); err != nil {
			return err
		}
		for _, r := range list.Items {
			// The GPU pod has one of its own.
			if r.Spec.PodSets[0].Requests.GPU == nil {
				return fmt.Errorf("%s %s", r.Name, r.Status.Phase)
			}
		}
		return nil
	})
	pods, err := s.podsOf(ns, "batch")
	if err != nil || len(pods) != 3 {
		t.Fatalf("%d finished pods are left (%v), want 3", len(pods), err)
	}
	for _, p := range pods {
		if !overflowed(p) || p.Status.Phase != corev1.PodSucceeded {
			t.Errorf("%s is %s on %s, want Succeeded on a virtual node", p.Name, p.Status.Phase, p.Spec.NodeName)
		}
	}
	// Only now: until here, they had to stay.
	expect.NoError(t, s.rome.Patch(t.Context(), job, client.RawPatch(types.MergePatchType, []byte(`{"spec":{"ttlSecondsAfterFinished":1}}`))))
	s.eventually("the finished pods go with their Job's TTL", func() error {
		pods, err := s.podsOf(ns, "batch")
		if err == nil && len(pods) > 0 {
			err = describe(pods)
		}
		return err
	})
}

// TestRequestsOfNothing runs a pod that requests zero of resources that no grant has.
func TestRequestsOfNothing(t *testing.T) {
	s := begin(t, nodes{
		"rome": full,
		// A node of a provider has GPUs, none has the other device.
		"paris":  {group("paris", 1, "cpu", "2", "memory", "4Gi", gpu, "2")},
		"berlin": {group("berlin", 1, "cpu", "2", "memory", "4Gi")},
	})
	ns := s.optedIn("zero")
	pod := s.createIn(ns, "zero", "100m", func(spec *corev1.PodSpec) {
		spec.Containers[0].Resources = corev1.ResourceRequirements{
			Requests: expect.Resources("cpu", "100m", "memory", "16Mi", "ephemeral-storage", "0", gpu, "0", "example.com/none", "0"),
			Limits:   expect.Resources("ephemeral-storage", "64Mi", gpu, "0", "example.com/none", "0"),
		}
	})
	if _, away := s.allReady(ns, "zero", 1); len(away) != 1 || away[0].UID != pod.UID {
		t.Fatalf("the pod did not overflow: %+v", away)
	}
}
