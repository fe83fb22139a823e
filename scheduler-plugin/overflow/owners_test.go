package overflow_test

import (
	"fmt"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/e2e/expect"
)

// job creates a Job, and returns a function that makes a pod its.
func (c *testCluster) job(namespace, name string, owner ...metav1.OwnerReference) func(*corev1.Pod) {
	c.t.Helper()
	template := corev1.PodTemplateSpec{Spec: schedulerPod(namespace, name, "1").Spec}
	template.Spec.RestartPolicy = corev1.RestartPolicyNever
	job := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, OwnerReferences: owner}, Spec: batchv1.JobSpec{Template: template}}
	c.create(job)
	return func(p *corev1.Pod) {
		p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "batch/v1", Kind: "Job", Name: job.Name, UID: job.UID, Controller: ptr.To(true)}}
	}
}

func sharedReservation(c *testCluster, ns string) {
	node := c.virtualPoolNode(ns, "10")
	inThis := []func(*corev1.Pod){inPool(ns), tolerating(ns)}
	c.create(schedulerPod(ns, "pod-0", "1", inThis...))
	c.create(schedulerPod(ns, "pod-1", "1", inThis...))
	c.create(schedulerPod(ns, "pod-2", "1", append(inThis, c.job(ns, "first"))...))
	c.create(schedulerPod(ns, "pod-3", "1", append(inThis, c.job(ns, "second"))...))
	r := c.expectReservation(ns, ns, 4)
	if ref := r.OwnerReferences[0]; ref.Kind != "Namespace" || ref.Name != ns {
		c.t.Errorf("owned by %+v, want the namespace", ref)
	}
	c.setStatus(r, grantedIn(r, ns, 4))
	c.expectPods(ns, "pod", map[string]int{node: 4})
}

// priorityReplaced: a bare pod is replaced by one of another priority, which its Reservation
// follows although it requests no more pods.
func priorityReplaced(c *testCluster, ns string) {
	create := func(name string, change ...func(*corev1.Pod)) {
		c.create(schedulerPod(ns, name, "1", append(change, inPool(ns), tolerating(ns))...))
	}
	expectPriority := func(want int32) {
		c.t.Helper()
		expect.Eventually(c.t, "the priority", func() (bool, string) {
			got := c.expectReservation(ns, ns, 1).Spec.Priority
			return got == want, fmt.Sprintf("%d, want %d", got, want)
		})
	}
	create("low")
	expectPriority(0)
	c.setStatus(c.expectReservation(ns, ns, 1), refused("oslo"))
	expect.NoError(c.t, c.Delete(c.t.Context(), schedulerPod(ns, "low", "1")))
	create("important", high)
	expectPriority(1000)
	expect.NoError(c.t, c.Delete(c.t.Context(), schedulerPod(ns, "important", "1")))
	create("low-again")
	expectPriority(0)
}

func cronJob(c *testCluster, ns string) {
	node := c.virtualPoolNode(ns, "10")
	cron := &batchv1.CronJob{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "nightly"}, Spec: batchv1.CronJobSpec{Schedule: "0 0 * * *", JobTemplate: batchv1.JobTemplateSpec{
		Spec: batchv1.JobSpec{Template: corev1.PodTemplateSpec{Spec: schedulerPod(ns, "nightly", "1", func(p *corev1.Pod) { p.Spec.RestartPolicy = corev1.RestartPolicyNever }).Spec}}}}}
	c.create(cron)
	run := func(name string) {
		ofRun := c.job(ns, name, metav1.OwnerReference{APIVersion: "batch/v1", Kind: "CronJob", Name: cron.Name, UID: cron.UID, Controller: ptr.To(true)})
		c.create(schedulerPod(ns, name+"-pod", "1", ofRun, inPool(ns), tolerating(ns)))
	}
	run("nightly-1")
	first := c.expectReservation(ns, "nightly", 1)
	if ref := first.OwnerReferences[0]; ref.Kind != "CronJob" || ref.UID != cron.UID {
		c.t.Errorf("owned by %+v, want the CronJob", ref)
	}
	c.setStatus(first, grantedIn(first, ns, 1))
	c.expectPods(ns, "nightly-1", map[string]int{node: 1})
	expect.NoError(c.t, c.Delete(c.t.Context(), schedulerPod(ns, "nightly-1-pod", "1")))
	run("nightly-2")
	// The second run uses the slot of the first.
	c.expectPods(ns, "nightly-2", map[string]int{node: 1})
	expect.NoError(c.t, c.Get(c.t.Context(), client.ObjectKeyFromObject(first), first))
	if n := first.Spec.PodSets[0].Count; n != 1 {
		c.t.Errorf("the Reservation requests %d pods, want 1", n)
	}
}

// customOwner creates an object of a kind that a CRD defines.
func (c *testCluster) customOwner(ns, kind, name string, owner ...metav1.OwnerReference) metav1.OwnerReference {
	c.t.Helper()
	o := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "batch.example.com/v1", "kind": kind}}
	o.SetNamespace(ns)
	o.SetName(name)
	o.SetOwnerReferences(owner)
	c.create(o)
	return metav1.OwnerReference{APIVersion: "batch.example.com/v1", Kind: kind, Name: name, UID: o.GetUID(), Controller: ptr.To(true)}
}

// customChain: pods of Jobs, of Runs that a CRD defines, of a Schedule.
func customChain(c *testCluster, ns string) {
	node := c.virtualPoolNode(ns, "10")
	schedule := metav1.OwnerReference{APIVersion: "batch.example.com/v1", Kind: "Schedule", Name: "nightly", UID: "uid-of-nightly", Controller: ptr.To(true)}
	for i := range 3 {
		run := c.customOwner(ns, "Run", fmt.Sprint("nightly-", i), schedule)
		of := c.job(ns, run.Name, run)
		if i == 2 { // a Run may create its pods itself
			of = func(p *corev1.Pod) { p.OwnerReferences = []metav1.OwnerReference{run} }
		}
		c.create(schedulerPod(ns, run.Name+"-pod", "1", of, inPool(ns), tolerating(ns)))
	}
	r := c.expectReservation(ns, "nightly", 3)
	if ref := r.OwnerReferences[0]; ref.Kind != "Schedule" || ref.UID != schedule.UID {
		c.t.Errorf("owned by %+v, want the Schedule", ref)
	}
	c.setStatus(r, grantedIn(r, ns, 3))
	c.expectPods(ns, "nightly", map[string]int{node: 3})
}

// unreadableOwner: the scheduler may not read an owner, so that is the root.
func unreadableOwner(c *testCluster, ns string) {
	above := metav1.OwnerReference{APIVersion: "batch.example.com/v1", Kind: "Schedule", Name: "above", UID: "uid-of-above", Controller: ptr.To(true)}
	hidden := c.customOwner(ns, "Hidden", "hidden", above)
	c.create(schedulerPod(ns, "hidden-pod", "1", func(p *corev1.Pod) { p.OwnerReferences = []metav1.OwnerReference{hidden} }, inPool(ns)))
	r := c.expectReservation(ns, "hidden", 1)
	if ref := r.OwnerReferences[0]; ref.Kind != "Hidden" || ref.UID != hidden.UID {
		c.t.Errorf("owned by %+v, want the object that the pod names", ref)
	}
}
