package reservation

import (
	"context"
	"fmt"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// ApplyProviderAck applies a provider's answer to its hold for the Reservation of the
// given name. An ack for another UID or attempt than the hold's changes nothing. It
// returns NotFound (apierrors.IsNotFound) if the provider has no hold of that name. It
// is idempotent.
func (r *Reconciler) ApplyProviderAck(ctx context.Context, cluster, name string, ack protocol.ProviderAck) error {
	return r.retryOnConflict(ctx, func() error {
		var ad broker.ClusterAdvertisement
		if err := r.live.Get(ctx, r.key(cluster), &ad); err != nil {
			return fmt.Errorf("reading the ledger of %s: %w", cluster, err)
		}
		named := func(h broker.Hold) bool { return h.ReservationName == name }
		if !slices.ContainsFunc(ad.Status.Holds, named) {
			return fmt.Errorf("%s has no hold for it: %w", cluster, notFound(name))
		}
		at := slices.IndexFunc(ad.Status.Holds, func(h broker.Hold) bool {
			return named(h) && h.ReservationUID == ack.ReservationUID && h.Attempt == ack.Attempt
		})
		if at < 0 {
			return nil
		}
		hold := *ad.Status.Holds[at].DeepCopy()
		if !ledger.Confirm(&ad.Status, hold.ReservationUID, ack.Attempt, ack.Accepted) {
			return nil
		}
		if !ack.Accepted {
			// The refusal is recorded before the refused capacity is released: the
			// provider is not chosen again for the same.
			if err := r.recordRefusal(ctx, hold, &ad.Spec, ack.Message); err != nil {
				return err
			}
		}
		ledger.Settle(&ad.Spec, &ad.Status)
		if err := r.client.Status().Update(ctx, &ad); err != nil {
			return fmt.Errorf("writing the ledger of %s: %w", cluster, err)
		}
		return nil
	})
}

// recordRefusal adds a provider's refusal of its hold to the Reservation's status.
func (r *Reconciler) recordRefusal(ctx context.Context, hold broker.Hold, spec *broker.ClusterAdvertisementSpec, message string) error {
	var reservation broker.Reservation
	err := r.live.Get(ctx, r.key(hold.ReservationName), &reservation)
	if apierrors.IsNotFound(err) || err == nil && reservation.UID != hold.ReservationUID {
		return nil
	} else if err != nil {
		return fmt.Errorf("reading the reservation that %s refuses: %w", spec.ClusterID, err)
	}
	if message == "" {
		message = "no reason given"
	}
	refusal := broker.Refusal{Cluster: spec.ClusterID, Sequence: spec.Sequence, Message: message}
	refused := reservation.Status.Refused
	if slices.Contains(refused, refusal) {
		return nil
	}
	refused = slices.DeleteFunc(refused, func(old broker.Refusal) bool { return old.Cluster == spec.ClusterID })
	reservation.Status.Refused = append(refused, refusal)
	if err := r.client.Status().Update(ctx, &reservation); err != nil {
		return fmt.Errorf("recording the refusal of %s: %w", spec.ClusterID, err)
	}
	r.recordRefused(&reservation, refusal, ledger.Pending(hold))
	return nil
}

// ApplyRequesterAck applies a consumer's report on its Reservation of the given name.
// An ack for another UID or attempt than the current one changes nothing. It returns
// NotFound (apierrors.IsNotFound) if there is none of that name, or if it belongs to
// another cluster. It is idempotent.
func (r *Reconciler) ApplyRequesterAck(ctx context.Context, requester, name string, ack protocol.RequesterAck) error {
	return r.retryOnConflict(ctx, func() error {
		var reservation broker.Reservation
		if err := r.live.Get(ctx, r.key(name), &reservation); err != nil {
			return fmt.Errorf("reading the reservation: %w", err)
		}
		if reservation.Spec.RequesterID != requester {
			return fmt.Errorf("%s has no such reservation: %w", requester, notFound(name))
		}
		if reservation.UID != ack.ReservationUID || reservation.Status.Attempt.Number != ack.Attempt {
			return nil
		}
		var changed bool
		for i := range reservation.Status.Allocations {
			allocation := &reservation.Status.Allocations[i]
			ready := allocation.Accepted && slices.Contains(ack.Ready, allocation.Cluster)
			changed = changed || allocation.VirtualNodeReady != ready
			allocation.VirtualNodeReady = ready
		}
		if !changed {
			return nil
		}
		// The reconciler updates phase and conditions.
		if err := r.client.Status().Update(ctx, &reservation); err != nil {
			return fmt.Errorf("recording the report of %s: %w", requester, err)
		}
		return nil
	})
}

func (r *Reconciler) key(name string) client.ObjectKey {
	return client.ObjectKey{Namespace: r.namespace, Name: name}
}

func notFound(name string) error {
	return apierrors.NewNotFound(schema.GroupResource{Group: broker.Group, Resource: "reservations"}, name)
}
