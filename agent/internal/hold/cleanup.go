package hold

import (
	"context"
	"fmt"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
)

// resyncInterval is how often all consumers are enqueued.
const resyncInterval = time.Minute

// resync enqueues every consumer for which anything exists here, so that it is
// cleaned up even if the deletion of its instruction was missed, and JudgeAll.
func (r *Reconciler) resync(ctx context.Context) error {
	ticker := time.NewTicker(resyncInterval)
	defer ticker.Stop()
	for {
		consumers, err := r.provider.Consumers(ctx)
		if err != nil && ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "Failed to list consumers")
		}
		for _, consumer := range consumers {
			r.Enqueue(consumer)
		}
		r.send(event.GenericEvent{Object: &metav1.PartialObjectMetadata{}})
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// cleanUp reduces the grant of a consumer without instructions to zero, so that it
// cannot start guests, and removes its peering once it has been idle for long.
func (r *Reconciler) cleanUp(ctx context.Context, consumer string, guests inventory.Guests) (reconcile.Result, error) {
	consumers, err := r.provider.Consumers(ctx)
	if err != nil {
		return reconcile.Result{}, fmt.Errorf("listing consumers: %w", err)
	}
	// Also without a peering, since one may begin before the next decision.
	if _, err := r.provider.EnsureGrant(ctx, consumer, nil, 0); err != nil {
		return reconcile.Result{}, fmt.Errorf("reducing the grant of %s to zero: %w", consumer, err)
	}
	of := r.of(consumer)
	if !slices.Contains(consumers, consumer) {
		of.unusedSince, of.gone = time.Time{}, len(guests.Active) == 0
		return reconcile.Result{}, nil
	}
	if r.GuestNamespaces != nil {
		if err := r.GuestNamespaces.RemoveTrialNamespace(ctx, consumer); err != nil {
			return reconcile.Result{}, fmt.Errorf("removing the namespace in which guests of %s were tried: %w", consumer, err)
		}
	}
	now := r.Clock.Now()
	if of.unusedSince.IsZero() || len(guests.Active) > 0 {
		of.unusedSince = now
	}
	// A consumer removes an idle peering itself; this is for one that no longer can.
	if left := of.unusedSince.Add(2*r.PeeringIdleTime + 5*time.Minute).Sub(now); left > 0 {
		return reconcile.Result{RequeueAfter: min(left, resyncInterval)}, nil
	}
	log.FromContext(ctx).Info("Removing the peering of an idle consumer", "consumer", consumer, "unusedFor", now.Sub(of.unusedSince).String())
	progress, err := r.provider.Teardown(ctx, consumer)
	if err != nil {
		return reconcile.Result{}, fmt.Errorf("removing the peering of %s: %w", consumer, err)
	}
	if !progress.Done {
		return reconcile.Result{RequeueAfter: requeueAfter}, nil
	}
	of.unusedSince, of.gone = time.Time{}, true
	return reconcile.Result{}, nil
}
