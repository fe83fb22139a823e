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
	if r.answers.Answered(cluster) {
		r.retryQueued()
	}
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
		if !ledger.Confirm(&ad.Status, hold.ReservationUID, ack.Attempt, ack.Accepted, ack.Held) {
			return nil
		}
		if err := r.rememberAnswer(ctx, cluster, hold, ack); err != nil {
			return err
		}
		ledger.Settle(&ad.Spec, &ad.Status)
		if err := r.client.Status().Update(ctx, &ad); err != nil {
			return fmt.Errorf("writing the ledger of %s: %w", cluster, err)
		}
		return nil
	})
}

// rememberAnswer remembers a provider's answer to a hold. A refusal is remembered before
// the refused capacity is released: the provider is not chosen again for the same.
func (r *Reconciler) rememberAnswer(ctx context.Context, cluster string, hold broker.Hold, ack protocol.ProviderAck) error {
	asked := ledger.Pending(hold)
	if ack.Accepted {
		if r.answers.Accepted(cluster, asked) {
			r.retryQueued()
		}
		return nil
	}
	config, err := r.config(ctx)
	if err != nil {
		return err
	}
	message := ack.Message
	if message == "" {
		message = "no reason given"
	}
	if !r.answers.Refused(cluster, asked, message, config.retryAfter, r.clock.Now()) {
		return nil
	}
	var reservation broker.Reservation
	if err := r.client.Get(ctx, r.key(hold.ReservationName), &reservation); err == nil && reservation.UID == hold.ReservationUID {
		r.recordRefused(&reservation, cluster, message, asked)
	}
	return client.IgnoreNotFound(err)
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
