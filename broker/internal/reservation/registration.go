package reservation

import (
	"context"
	"fmt"

	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/log"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// ReconcileRegistration forgets a cluster whose ClusterRegistration is deleted: what it
// has asked for ends, and what it has promised to others is theirs no more. The
// registration's finalizer keeps it until that is done. Every step is repeatable.
func (r *Reconciler) ReconcileRegistration(ctx context.Context, name string) (ctrl.Result, error) {
	var registration broker.ClusterRegistration
	if err := r.client.Get(ctx, r.key(name), &registration); err != nil {
		r.conflicts.Forget("registration/" + name)
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if registration.DeletionTimestamp.IsZero() {
		if !controllerutil.AddFinalizer(&registration, broker.FinalizerCluster) {
			r.conflicts.Forget("registration/" + name)
			return ctrl.Result{}, nil
		}
		if err := r.client.Update(ctx, &registration); err != nil {
			return r.requeueOnConflict(ctx, "registration/"+name, fmt.Errorf("adding the finalizer: %w", err))
		}
		return ctrl.Result{}, nil
	}
	if !controllerutil.ContainsFinalizer(&registration, broker.FinalizerCluster) {
		return ctrl.Result{}, nil
	}
	if err := r.endCluster(ctx, registration.Spec.ClusterID); err != nil {
		return ctrl.Result{}, err
	}
	controllerutil.RemoveFinalizer(&registration, broker.FinalizerCluster)
	if err := r.client.Update(ctx, &registration); err != nil {
		return r.requeueOnConflict(ctx, "registration/"+name, fmt.Errorf("removing the finalizer: %w", err))
	}
	return ctrl.Result{}, nil
}

// endCluster deletes the Reservations of a cluster, and its advertisement with the ledger
// of what it holds for others.
func (r *Reconciler) endCluster(ctx context.Context, cluster string) error {
	var list broker.ReservationList
	if err := r.live.List(ctx, &list, client.InNamespace(r.namespace)); err != nil {
		return fmt.Errorf("listing the reservations of %s: %w", cluster, err)
	}
	ended := 0
	for i := range list.Items {
		if list.Items[i].Spec.RequesterID != cluster {
			continue
		}
		if err := r.client.Delete(ctx, &list.Items[i]); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("ending a reservation of %s: %w", cluster, err)
		}
		ended++
	}
	ad := &broker.ClusterAdvertisement{}
	ad.Namespace, ad.Name = r.namespace, cluster
	if err := r.client.Delete(ctx, ad); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("deleting the advertisement of %s: %w", cluster, err)
	}
	log.FromContext(ctx).WithName("audit").Info("Forgot a cluster", "cluster", cluster, "endedReservations", ended)
	return nil
}
