package pods

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/spillway-dev/spillway/agent/internal/virtualnode"
)

const (
	// maxStartTimeouts is how many times Options.StartTimeout a pod may wait on a
	// virtual node while the provider starts others.
	maxStartTimeouts = 5
	// budgetRetry is the delay after a PodDisruptionBudget has blocked an eviction.
	budgetRetry = 10 * time.Second
)

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
func (r *Reconciler) evictNotStarted(ctx context.Context, pod *corev1.Pod, provider string, lastStart time.Time) (requeueAfter time.Duration, err error) {
	deadline, cause, ok := startDeadline(pod, r.driver.RefusedReason(pod), lastStart, r.StartTimeout)
	if !ok {
		return 0, nil
	}
	if left := deadline.Sub(r.Clock.Now()); left > 0 {
		return left, nil
	}
	if metav1.GetControllerOfNoCopy(pod) == nil {
		r.reportNotStarted(pod, provider, cause, "No controller would replace it: delete the pod and create it again.")
		return resyncPeriod, nil
	}
	eviction := &policyv1.Eviction{
		ObjectMeta:    metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name},
		DeleteOptions: &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &pod.UID}},
	}
	err = r.client.SubResource("eviction").Create(ctx, pod, eviction)
	switch {
	case apierrors.IsTooManyRequests(err):
		r.reportNotStarted(pod, provider, cause, "A PodDisruptionBudget blocks its eviction, which is retried.")
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

// forceDeleteAt is when a deleted pod is to be removed without confirmation, since
// its provider has been unreachable for lostAfter; ok is false if it is not to be.
//
// Pods of StatefulSets stay: the provider may only be cut off and still run them,
// and their successors have the same names. So do pods without a controller.
func forceDeleteAt(node *corev1.Node, pod *corev1.Pod, lostAfter time.Duration) (at time.Time, ok bool) {
	if owner := metav1.GetControllerOfNoCopy(pod); node == nil || owner == nil || owner.Kind == "StatefulSet" {
		return time.Time{}, false
	}
	ready := virtualnode.ReadyCondition(node)
	if ready == nil || ready.Status == corev1.ConditionTrue {
		return time.Time{}, false
	}
	// The deletion timestamp is the end of the grace period.
	grace := time.Duration(ptr.Deref(pod.DeletionGracePeriodSeconds, 0)) * time.Second
	since := pod.DeletionTimestamp.Add(-grace)
	if unreachable := ready.LastTransitionTime.Time; unreachable.After(since) {
		since = unreachable
	}
	return since.Add(lostAfter), true
}

// forceDeleteLost removes a deleted pod whose provider is lost, and returns when to
// look at it again.
func (r *Reconciler) forceDeleteLost(ctx context.Context, node *corev1.Node, pod *corev1.Pod, provider string) (requeueAfter time.Duration, err error) {
	at, ok := forceDeleteAt(node, pod, r.ProviderLostAfter)
	if !ok {
		return 0, nil
	}
	if left := at.Sub(r.Clock.Now()); left > 0 {
		return left, nil
	}
	err = r.client.Delete(ctx, pod, client.Preconditions{UID: &pod.UID}, client.GracePeriodSeconds(0))
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("force-deleting pod %s/%s of unreachable provider %s: %w", pod.Namespace, pod.Name, provider, err)
	}
	r.reportForceDeleted(pod, provider)
	log.FromContext(ctx).Info("Force-deleted a pod of an unreachable provider", "pod", client.ObjectKeyFromObject(pod), "provider", provider)
	return 0, nil
}
