package pods

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/virtualnode"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// reconcileProvider removes pods from a virtual node that the provider does not
// start, or whose end it cannot confirm.
func (r *Reconciler) reconcileProvider(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, reconcileTimeout)
	defer cancel()
	provider := request.Name
	node, err := virtualnode.ReadNode(ctx, r.client, provider)
	if err != nil {
		return reconcile.Result{}, err
	}
	pods, err := r.podsOn(ctx, provider)
	if err != nil {
		return reconcile.Result{}, err
	}
	progress := r.progressOf(provider, node == nil && len(pods) == 0)
	progress.observe(pods, r.Clock.Now())
	var result reconcile.Result
	for _, pod := range pods {
		var requeueAfter time.Duration
		if pod.DeletionTimestamp != nil {
			requeueAfter, err = r.forceDeleteLost(ctx, node, pod, provider)
		} else {
			requeueAfter, err = r.evictNotStarted(ctx, pod, provider, progress)
		}
		if err != nil {
			return reconcile.Result{}, err
		}
		if requeueAfter > 0 && (result.RequeueAfter == 0 || requeueAfter < result.RequeueAfter) {
			result.RequeueAfter = requeueAfter
		}
	}
	return result, nil
}

// podsOn lists the pods on a provider's virtual node that have not finished,
// without those of DaemonSets.
func (r *Reconciler) podsOn(ctx context.Context, provider string) ([]*corev1.Pod, error) {
	var bound corev1.PodList
	if err := r.client.List(ctx, &bound, client.MatchingFields{virtualnode.IndexNode: broker.VirtualNodeName(provider)}); err != nil {
		return nil, fmt.Errorf("listing pods on the virtual node of %s: %w", provider, err)
	}
	var pods []*corev1.Pod
	for i := range bound.Items {
		if pod := &bound.Items[i]; !virtualnode.RunsOnEveryNode(pod) && !inventory.Finished(pod) {
			pods = append(pods, pod)
		}
	}
	return pods, nil
}

// progressOf returns what is remembered of the pods of a provider, and removes it
// once the provider has neither node nor pods.
func (r *Reconciler) progressOf(provider string, gone bool) *startProgress {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.progress[provider]
	if p == nil {
		p = &startProgress{started: -1, reported: map[types.UID]bool{}}
		r.progress[provider] = p
	}
	if gone {
		delete(r.progress, provider)
	}
	return p
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
