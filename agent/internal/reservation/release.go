package reservation

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// release ends a Reservation that is being deleted: the virtual nodes first, then
// the broker's copy and, when that is released, the object itself.
func (r *Reconciler) release(ctx context.Context, s *state) (reconcile.Result, error) {
	if !controllerutil.ContainsFinalizer(s.local, broker.FinalizerRequest) {
		return reconcile.Result{}, nil
	}
	r.observe(s)
	s.reported = reported
	if former := meta.FindStatusCondition(s.local.Status.Conditions, broker.ConditionReported); former != nil {
		s.reported = *former
	}
	if s.view == nil && s.local.Status.ID == "" {
		// It was never sent; if it was, the mirror will show an orphan.
		return reconcile.Result{}, r.removeFinalizer(ctx, s)
	}
	if unreleased(s.instructions) != nil {
		return r.updateStatus(ctx, s)
	}
	result, err := r.deleteAtBroker(ctx, s.id, s.now)
	if err != nil {
		s.reported = notReported(reasonBrokerUnreachable, "Deleting the reservation at the broker failed, retrying: "+err.Error())
		_, statusErr := r.updateStatus(ctx, s)
		return reconcile.Result{}, errors.Join(err, statusErr)
	}
	if view, ok := r.Mirror.Get(s.id); r.Mirror.Synced() && (!ok || view.Status.Phase == broker.ReservationReleased) {
		// The broker alone waits for the providers to confirm.
		return reconcile.Result{}, r.removeFinalizer(ctx, s)
	}
	_, err = r.updateStatus(ctx, s)
	return result, err
}

func (r *Reconciler) removeFinalizer(ctx context.Context, s *state) error {
	before := s.local.DeepCopy()
	controllerutil.RemoveFinalizer(s.local, broker.FinalizerRequest)
	if err := r.client.Patch(ctx, s.local, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("removing the finalizer of Reservation %s/%s: %w", s.local.Namespace, s.local.Name, err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.reports, s.id)
	delete(r.renewed, s.id)
	return nil
}

// deleteAtBroker deletes a reservation at the broker, and again if its end does
// not show in time. What was sent is remembered after the finalizer is removed,
// too: the cache may show the Reservation for a moment longer.
func (r *Reconciler) deleteAtBroker(ctx context.Context, id string, now time.Time) (reconcile.Result, error) {
	if wait := r.deletions.Wait(id, struct{}{}, now); wait > 0 {
		return reconcile.Result{RequeueAfter: wait}, nil
	}
	if err := r.Broker.DeleteReservation(ctx, id); err != nil {
		return reconcile.Result{}, fmt.Errorf("deleting reservation %s at the broker: %w", id, err)
	}
	return reconcile.Result{RequeueAfter: r.deletions.Sent(id, struct{}{}, now)}, nil
}

// deleteOrphans deletes the broker's copies of a Reservation that does not exist
// here, or not with this UID.
func (r *Reconciler) deleteOrphans(ctx context.Context, key types.NamespacedName, local *broker.Reservation) (reconcile.Result, error) {
	orphans := r.Mirror.Select(func(v protocol.ConsumerView) bool {
		return v.SourceNamespace == key.Namespace && v.SourceName == key.Name && (local == nil || v.SourceUID != local.UID) &&
			v.Status.Phase != broker.ReservationReleased
	})
	var result reconcile.Result
	for _, view := range orphans {
		// The cache may be stale: read from the API server.
		current := &broker.Reservation{}
		err := r.live.Get(ctx, key, current)
		if client.IgnoreNotFound(err) != nil {
			return result, fmt.Errorf("reading Reservation %s: %w", key, err)
		}
		if err == nil && current.UID == view.SourceUID {
			continue
		}
		instructions, err := r.instructions(ctx, view.ID)
		if err != nil {
			return result, err
		}
		if unreleased(instructions) != nil {
			continue
		}
		deleted, err := r.deleteAtBroker(ctx, view.ID, r.Clock.Now())
		if err != nil {
			return result, err
		}
		result = earlier(result, deleted)
	}
	return result, nil
}

// unreleased returns an instruction whose capacity this cluster still uses, nil if
// there is none.
func unreleased(instructions []broker.ReservationInstruction) *broker.ReservationInstruction {
	for i := range instructions {
		if !meta.IsStatusConditionTrue(instructions[i].Status.Conditions, broker.ConditionRequesterReleased) {
			return &instructions[i]
		}
	}
	return nil
}
