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
	if !ack.Accepted {
		// The refusal is recorded before the refused capacity is released: the provider
		// is not chosen again for the same.
		if err := r.refuse(ctx, cluster, name, ack); err != nil {
			return err
		}
	}
	_, err := r.committer.commit(ctx, cluster, func(ad *broker.ClusterAdvertisement) (edited, error) {
		hold, err := answered(ad, name, ack)
		if hold == nil || err != nil {
			return edited{}, err
		}
		return edited{status: ledger.Confirm(&ad.Status, hold.ReservationUID, ack.Attempt, ack.Accepted)}, nil
	})
	return err
}

// answered is the hold that an ack answers; nil if it answers an earlier attempt.
func answered(ad *broker.ClusterAdvertisement, name string, ack protocol.ProviderAck) (*broker.Hold, error) {
	named := false
	for i := range ad.Status.Holds {
		hold := &ad.Status.Holds[i]
		if hold.ReservationName != name {
			continue
		}
		named = true
		if hold.ReservationUID == ack.ReservationUID && hold.Attempt == ack.Attempt {
			return hold, nil
		}
	}
	if !named {
		return nil, fmt.Errorf("%s has no hold for it: %w", ad.Name, notFound(name))
	}
	return nil, nil
}

// refuse records a provider's refusal in the Reservation's status, if it answers the
// hold.
func (r *Reconciler) refuse(ctx context.Context, cluster, name string, ack protocol.ProviderAck) error {
	ad := r.store.advertisement(cluster)
	var hold *broker.Hold
	if ad != nil {
		hold, _ = answered(ad, name, ack)
	}
	if hold == nil {
		ad = &broker.ClusterAdvertisement{}
		if err := r.live.Get(ctx, r.key(cluster), ad); err != nil {
			return fmt.Errorf("reading the ledger of %s: %w", cluster, err)
		}
		var err error
		if hold, err = answered(ad, name, ack); hold == nil || err != nil {
			return err
		}
	}
	after := broker.ClusterAdvertisementStatus{Holds: []broker.Hold{*hold.DeepCopy()}}
	if !ledger.Confirm(&after, hold.ReservationUID, ack.Attempt, false) {
		return nil
	}
	return r.recordRefusal(ctx, *hold, &ad.Spec, ack.Message)
}

// recordRefusal adds a provider's refusal of its hold to the Reservation's status.
func (r *Reconciler) recordRefusal(ctx context.Context, hold broker.Hold, spec *broker.ClusterAdvertisementSpec, message string) error {
	if message == "" {
		message = "no reason given"
	}
	refusal := broker.Refusal{Cluster: spec.ClusterID, Sequence: spec.Sequence, Message: message}
	var recorded *broker.Reservation
	err := r.editStatus(ctx, hold.ReservationName, func(reservation *broker.Reservation) (changed bool, err error) {
		recorded = nil
		refused := reservation.Status.Refused
		if reservation.UID != hold.ReservationUID || slices.Contains(refused, refusal) {
			return false, nil
		}
		refused = slices.DeleteFunc(refused, func(old broker.Refusal) bool { return old.Cluster == spec.ClusterID })
		reservation.Status.Refused = append(refused, refusal)
		recorded = reservation
		return true, nil
	})
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("recording the refusal of %s: %w", spec.ClusterID, err)
	}
	if recorded != nil && err == nil {
		r.recordRefused(recorded, refusal, ledger.Pending(hold))
	}
	return nil
}

// ApplyRequesterAck applies a consumer's report on its Reservation of the given name.
// An ack for another UID or attempt than the current one changes nothing. It returns
// NotFound (apierrors.IsNotFound) if there is none of that name, or if it belongs to
// another cluster. It is idempotent.
func (r *Reconciler) ApplyRequesterAck(ctx context.Context, requester, name string, ack protocol.RequesterAck) error {
	config, err := r.config(ctx)
	if err != nil {
		return err
	}
	err = r.editStatus(ctx, name, func(reservation *broker.Reservation) (changed bool, err error) {
		if reservation.Spec.RequesterID != requester {
			return false, fmt.Errorf("%s has no such reservation: %w", requester, notFound(name))
		}
		if reservation.UID != ack.ReservationUID || reservation.Status.Attempt.Number != ack.Attempt {
			return false, nil
		}
		for i := range reservation.Status.Allocations {
			allocation := &reservation.Status.Allocations[i]
			ready := allocation.Accepted && slices.Contains(ack.Ready, allocation.Cluster)
			changed = changed || allocation.VirtualNodeReady != ready
			allocation.VirtualNodeReady = ready
		}
		if changed && !unplaced(reservation) {
			// What follows from it is written at once, unless there is more to do.
			in := r.snapshotOf(reservation, config)
			if p := newPlan(in); p.empty() {
				reservation.Status = nextStatus(in, p, false)
			}
		}
		return changed, nil
	})
	if err != nil {
		return fmt.Errorf("recording the report of %s: %w", requester, err)
	}
	return nil
}

func (r *Reconciler) key(name string) client.ObjectKey {
	return client.ObjectKey{Namespace: r.namespace, Name: name}
}

func notFound(name string) error {
	return apierrors.NewNotFound(schema.GroupResource{Group: broker.Group, Resource: "reservations"}, name)
}
