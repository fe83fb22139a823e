package pods

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
)

const (
	// maxStartTimeouts is how many times Options.StartTimeout a pod may wait on a
	// virtual node while the provider starts others.
	maxStartTimeouts = 5
	// budgetRetry is the delay after a PodDisruptionBudget has blocked an eviction.
	budgetRetry = 10 * time.Second
)

// startProgress is what is remembered of the pods on one virtual node. Only the
// worker that reconciles the provider uses it.
type startProgress struct {
	// started is the number of started pods at the last look, -1 before the first;
	// lastStart is when it rose last, by this cluster's clock.
	started   int
	lastStart time.Time
	// reported are the pods with an event that they cannot be evicted.
	reported map[types.UID]bool
}

// observe records how many of the pods have started, and forgets those that are
// gone.
func (p *startProgress) observe(pods []*corev1.Pod, now time.Time) {
	var started int
	reported := map[types.UID]bool{}
	for _, pod := range pods {
		if pod.Status.StartTime != nil {
			started++
		}
		if p.reported[pod.UID] {
			reported[pod.UID] = true
		}
	}
	p.reported = reported
	if p.started >= 0 && started > p.started {
		p.lastStart = now
	}
	p.started = started
}

// startDeadline is when a pod that has not been started is to be evicted, and the
// cause for the event; ok is false for a pod that is not to be. refusal is the
// reason why the virtual node rejects the pod, if it does. Otherwise the timeout
// begins again with each start of another pod, up to maxStartTimeouts in all.
func startDeadline(pod *corev1.Pod, refusal string, lastStart time.Time, timeout time.Duration) (deadline time.Time, cause string, ok bool) {
	if pod.Status.Phase != corev1.PodPending {
		return time.Time{}, "", false
	}
	since := pod.CreationTimestamp.Time
	untouched := pod.Status.StartTime == nil
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled {
			since = c.LastTransitionTime.Time
		} else {
			untouched = false
		}
	}
	switch {
	case refusal != "":
		return since.Add(timeout), "the virtual node rejects it (" + refusal + ")", true
	case !untouched:
		return time.Time{}, "", false
	}
	deadline = since.Add(timeout)
	if lastStart.After(since) {
		deadline = lastStart.Add(timeout)
	}
	if last := since.Add(maxStartTimeouts * timeout); deadline.After(last) {
		deadline = last
	}
	return deadline, "the provider has not started it", true
}

// evictNotStarted evicts a pod that the provider has not started in time, and
// returns when to look at it again.
func (r *Reconciler) evictNotStarted(ctx context.Context, pod *corev1.Pod, provider string, progress *startProgress) (requeueAfter time.Duration, err error) {
	deadline, cause, ok := startDeadline(pod, r.driver.RefusedReason(pod), progress.lastStart, r.StartTimeout)
	if !ok {
		return 0, nil
	}
	if left := deadline.Sub(r.Clock.Now()); left > 0 {
		return left, nil
	}
	if metav1.GetControllerOfNoCopy(pod) == nil {
		r.reportNotStarted(progress, pod, provider, cause, "No controller would replace it: delete the pod and create it again.")
		return resyncPeriod, nil
	}
	eviction := &policyv1.Eviction{
		ObjectMeta:    metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name},
		DeleteOptions: &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &pod.UID}},
	}
	err = r.client.SubResource("eviction").Create(ctx, pod, eviction)
	switch {
	case apierrors.IsTooManyRequests(err):
		r.reportNotStarted(progress, pod, provider, cause, "A PodDisruptionBudget blocks its eviction, which is retried.")
		return budgetRetry, nil
	case apierrors.IsNotFound(err) || apierrors.IsConflict(err):
		return 0, nil
	case err != nil:
		return 0, fmt.Errorf("evicting pod %s/%s from the virtual node of %s: %w", pod.Namespace, pod.Name, provider, err)
	}
	r.reportEvicted(pod, provider, cause)
	log.FromContext(ctx).Info("Evicted a pod that the provider did not start", "pod", client.ObjectKeyFromObject(pod), "provider", provider, "cause", cause)
	return 0, nil
}
