package pods

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
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
			requeueAfter, err = r.evictNotStarted(ctx, pod, provider, progress.lastStart)
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
		p = &startProgress{started: -1}
		r.progress[provider] = p
	}
	if gone {
		delete(r.progress, provider)
	}
	return p
}

// startProgress is what is remembered of the pods on one virtual node. Only the
// worker that reconciles the provider uses it.
type startProgress struct {
	// started is the number of started pods at the last look, -1 before the first;
	// lastStart is when it rose last, by this cluster's clock.
	started   int
	lastStart time.Time
}

// observe records how many of the pods have started.
func (p *startProgress) observe(pods []*corev1.Pod, now time.Time) {
	var started int
	for _, pod := range pods {
		if pod.Status.StartTime != nil {
			started++
		}
	}
	if p.started >= 0 && started > p.started {
		p.lastStart = now
	}
	p.started = started
}
