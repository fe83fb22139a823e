package reservation

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/log"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// ReconcileRegistration forgets a cluster whose ClusterRegistration is deleted: what it
// has asked for ends, and what it has promised to others is theirs no more. The
// registration's finalizer keeps it until that is done. Every step is repeatable. What is
// there of a cluster without a registration ends, whenever it was created.
func (r *Reconciler) ReconcileRegistration(ctx context.Context, name string) (ctrl.Result, error) {
	var registration broker.ClusterRegistration
	if err := r.client.Get(ctx, r.key(name), &registration); apierrors.IsNotFound(err) {
		r.conflicts.Forget("registration/" + name)
		return ctrl.Result{}, r.endUnregistered(ctx, name)
	} else if err != nil {
		return ctrl.Result{}, err
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

// endUnregistered deletes what a cluster without a registration has created through the REST
// interface: its calls were accepted before it was forgotten, and their writes came later.
// What was created in the hub by hand stays, since its cluster may be about to join.
func (r *Reconciler) endUnregistered(ctx context.Context, cluster string) error {
	var list broker.ReservationList
	created := client.MatchingLabels{broker.LabelManagedBy: broker.ManagedBySpillway, broker.LabelRequester: cluster}
	if err := r.client.List(ctx, &list, client.InNamespace(r.namespace), created); err != nil {
		return fmt.Errorf("listing the reservations of %s: %w", cluster, err)
	}
	var objects []client.Object
	for i := range list.Items {
		if reservation := &list.Items[i]; reservation.Spec.RequesterID == cluster && reservation.DeletionTimestamp.IsZero() {
			objects = append(objects, reservation)
		}
	}
	var ad broker.ClusterAdvertisement
	if err := r.client.Get(ctx, r.key(cluster), &ad); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("reading the advertisement of %s: %w", cluster, err)
	} else if err == nil && isOfCluster(&ad) {
		objects = append(objects, &ad)
	}
	if len(objects) == 0 {
		return nil
	}
	// After the objects: those of a cluster that joins later are not among them.
	if err := r.live.Get(ctx, r.key(cluster), &broker.ClusterRegistration{}); err == nil {
		return nil
	} else if !apierrors.IsNotFound(err) {
		return fmt.Errorf("reading the registration of %s: %w", cluster, err)
	}
	for _, object := range objects {
		// Not if a cluster that has just joined has updated it: a conflict is tried again.
		err := r.client.Delete(ctx, object, client.Preconditions{UID: ptr.To(object.GetUID()), ResourceVersion: ptr.To(object.GetResourceVersion())})
		if client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("deleting what is left of %s: %w", cluster, err)
		}
	}
	log.FromContext(ctx).WithName("audit").Info("Deleted what a cluster without registration had created", "cluster", cluster, "objects", len(objects))
	return nil
}

// createdForCluster reports whether an object was created through the REST interface.
func createdForCluster(object client.Object) bool {
	return object.GetLabels()[broker.LabelManagedBy] == broker.ManagedBySpillway
}

// isOfCluster reports whether an advertisement was created through the REST interface. An
// agent in the hub keeps a copy of its own beside it, under another name.
func isOfCluster(ad *broker.ClusterAdvertisement) bool {
	return createdForCluster(ad) && ad.Name == ad.Spec.ClusterID
}
