package advertisement

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
	"github.com/spillway-dev/spillway/broker/internal/identity"
)

// reconcileRegistration forgets a cluster whose ClusterRegistration is deleted: what it
// has asked for ends, and what it has promised to others is theirs no more. The
// registration's finalizer keeps it until that is done. The same ends when an operator revokes the
// cluster, and the registration stays. Every step is repeatable. What is there of a cluster
// without a registration, or of a revoked one, ends, whenever it was created.
func (c *Clusters) reconcileRegistration(ctx context.Context, name string) (ctrl.Result, error) {
	var registration broker.ClusterRegistration
	if err := c.hub.Client.Get(ctx, c.hub.Key(name), &registration); apierrors.IsNotFound(err) {
		c.conflicts.Forget("registration/" + name)
		return ctrl.Result{}, c.endUnregistered(ctx, name)
	} else if err != nil {
		return ctrl.Result{}, err
	}
	if registration.DeletionTimestamp.IsZero() {
		if controllerutil.AddFinalizer(&registration, broker.FinalizerCluster) {
			if err := c.hub.Client.Update(ctx, &registration); err != nil {
				return c.conflicts.Requeue(ctx, "registration/"+name, fmt.Errorf("adding the finalizer: %w", err))
			}
			return ctrl.Result{}, nil
		}
		c.conflicts.Forget("registration/" + name)
		return c.decided(ctx, &registration)
	}
	if !controllerutil.ContainsFinalizer(&registration, broker.FinalizerCluster) {
		return ctrl.Result{}, nil
	}
	if err := c.endCluster(ctx, registration.Spec.ClusterID); err != nil {
		return ctrl.Result{}, err
	}
	controllerutil.RemoveFinalizer(&registration, broker.FinalizerCluster)
	if err := c.hub.Client.Update(ctx, &registration); err != nil {
		return c.conflicts.Requeue(ctx, "registration/"+name, fmt.Errorf("removing the finalizer: %w", err))
	}
	return ctrl.Result{}, nil
}

// decided carries out what an operator has decided about a cluster, and deletes an invitation that
// was not used.
func (c *Clusters) decided(ctx context.Context, registration *broker.ClusterRegistration) (ctrl.Result, error) {
	phase := identity.Phase(registration, c.store.Settings().Admission)
	revoked := phase == broker.RegistrationRevoked
	switch {
	case registration.Status.Phase == "" && !revoked:
		// The cluster has not joined yet.
		invitation := registration.Spec.Invitation
		if invitation == nil || registration.Spec.Approval != "" {
			return ctrl.Result{}, nil
		}
		if left := invitation.Expires.Sub(c.Clock.Now()); left > 0 {
			return ctrl.Result{RequeueAfter: left}, nil
		}
		return ctrl.Result{}, client.IgnoreNotFound(c.hub.Client.Delete(ctx, registration, client.Preconditions{ResourceVersion: ptr.To(registration.ResourceVersion)}))
	case registration.Status.Phase != phase:
		if revoked {
			if err := c.endCluster(ctx, registration.Spec.ClusterID); err != nil {
				return ctrl.Result{}, err
			}
		}
		registration.Status.Phase = phase
		if err := c.hub.Client.Status().Update(ctx, registration); err != nil {
			return c.conflicts.Requeue(ctx, "registration/"+registration.Name, fmt.Errorf("writing the phase: %w", err))
		}
		log.FromContext(ctx).WithName("audit").Info("Carried out the decision about a cluster", "cluster", registration.Spec.ClusterID, "phase", phase)
		return ctrl.Result{}, nil
	case revoked:
		return ctrl.Result{}, c.endUnregistered(ctx, registration.Name)
	}
	return ctrl.Result{}, nil
}

// endCluster deletes the Reservations of a cluster, and its advertisement with the ledger
// of what it holds for others.
func (c *Clusters) endCluster(ctx context.Context, cluster string) error {
	var list broker.ReservationList
	if err := c.hub.Live.List(ctx, &list, client.InNamespace(c.hub.Namespace)); err != nil {
		return fmt.Errorf("listing the reservations of %s: %w", cluster, err)
	}
	ended := 0
	for i := range list.Items {
		if list.Items[i].Spec.RequesterID != cluster {
			continue
		}
		if err := c.hub.Client.Delete(ctx, &list.Items[i]); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("ending a reservation of %s: %w", cluster, err)
		}
		ended++
	}
	ad := &broker.ClusterAdvertisement{}
	ad.Namespace, ad.Name = c.hub.Namespace, cluster
	if err := c.hub.Client.Delete(ctx, ad); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("deleting the advertisement of %s: %w", cluster, err)
	}
	log.FromContext(ctx).WithName("audit").Info("Forgot a cluster", "cluster", cluster, "endedReservations", ended)
	return nil
}

// endUnregistered deletes what a cluster without a registration, or a revoked one, has created
// through the REST interface: its calls were accepted before that, and their writes came later.
// What was created in the hub by hand stays, since its cluster may be about to join.
func (c *Clusters) endUnregistered(ctx context.Context, cluster string) error {
	var objects []client.Object
	for _, reservation := range c.store.ReservationsOf(cluster) {
		if createdForCluster(reservation) && reservation.Labels[broker.LabelRequester] == cluster && reservation.DeletionTimestamp.IsZero() {
			objects = append(objects, reservation.DeepCopy())
		}
	}
	if ad := c.store.Advertisement(cluster); ad != nil && isOfCluster(ad) {
		objects = append(objects, ad.DeepCopy())
	}
	if len(objects) == 0 {
		return nil
	}
	// After the objects: those of a cluster that joins later are not among them.
	registration := &broker.ClusterRegistration{}
	if err := c.hub.Live.Get(ctx, c.hub.Key(cluster), registration); err == nil && registration.Spec.Approval != broker.ApprovalRevoked {
		return nil
	} else if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("reading the registration of %s: %w", cluster, err)
	}
	for _, object := range objects {
		// Not if a cluster that has just joined has updated it: a conflict is tried again.
		err := c.hub.Client.Delete(ctx, object, client.Preconditions{UID: ptr.To(object.GetUID()), ResourceVersion: ptr.To(object.GetResourceVersion())})
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
