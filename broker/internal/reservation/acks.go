package reservation

import (
	"context"
	"fmt"
	"slices"
	"time"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/events"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// ApplyProviderAck applies a provider's answer to its hold for the Reservation of the
// given name. An ack for another UID or attempt than the hold's changes nothing. It
// returns NotFound (apierrors.IsNotFound) if the provider has no hold of that name. It
// is idempotent.
func (r *Reconciler) ApplyProviderAck(ctx context.Context, cluster, name string, ack protocol.ProviderAck) error {
	config, err := r.config(ctx)
	if err != nil {
		return err
	}
	var asked broker.HeldCapacity
	var news, changed, released bool
	// The provider's words, as such.
	said := "no reason given"
	if ack.Message != "" {
		said = events.Quote(ack.Message)
	}
	askedAt := r.book.AskedAt(name, ack.ReservationUID, cluster)
	_, err = r.committer.commit(ctx, cluster, func(ad *broker.ClusterAdvertisement) (edited, error) {
		changed = false
		hold, err := answered(ad, name, ack)
		if hold == nil || err != nil {
			return edited{}, err
		}
		asked = ledger.Pending(*hold.DeepCopy())
		released = asked.Empty()
		if !ack.Accepted && asked.Empty() {
			// The provider gives up what it had accepted, except for what it still holds.
			asked = *hold.Promised.DeepCopy()
			if ack.Held != nil {
				asked = capacity.Sub(asked, *ack.Held)
			}
		}
		requester := hold.Requester
		if ack.Accepted || ack.LeaveWithin == nil {
			changed = ledger.Confirm(&ad.Status, hold.ReservationUID, ack.Attempt, ack.Accepted, ack.Held)
		} else {
			within := min(max(ack.LeaveWithin.Duration, 0), protocol.MaxLeaveWithin)
			changed = ledger.Withdraw(&ad.Status, hold.ReservationUID, ack.Attempt, ack.Held, within)
		}
		if changed && !ack.Accepted {
			// It is remembered before the refused capacity is released: the provider is
			// not chosen again for the same.
			news = r.answers.Refused(cluster, requester, asked, said, config.retryAfter, r.clock.Now()) || news
		}
		return edited{status: changed}, nil
	})
	if err != nil {
		return err
	}
	// An ack of anything but the attempt asked answers nothing.
	if changed && r.rememberAnswer(cluster, ack.ReservationUID, askedAt, released) {
		r.retryQueued()
	}
	switch {
	case news:
		if reservation := r.store.reservation(name); reservation != nil && reservation.UID == ack.ReservationUID {
			r.recordRefused(reservation, cluster, said, asked)
		}
	case ack.Accepted && r.answers.Accepted(cluster, asked):
		r.retryQueued()
	}
	return nil
}

// rememberAnswer remembers that a provider has answered what it was asked for a Reservation
// at that time, or has only confirmed a release. It reports whether it may be asked again
// because of that.
func (r *Reconciler) rememberAnswer(cluster string, uid types.UID, askedAt time.Time, released bool) (again bool) {
	if released {
		return r.answers.Released(cluster, uid)
	}
	return r.answers.Answered(cluster, uid, askedAt, r.clock.Now())
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

// ApplyRequesterAck applies a consumer's report on its Reservation of the given name.
// An ack for another UID or attempt than the current one changes nothing. It returns
// NotFound (apierrors.IsNotFound) if there is none of that name, or if it belongs to
// another cluster. It is idempotent.
func (r *Reconciler) ApplyRequesterAck(ctx context.Context, requester, name string, ack protocol.RequesterAck) error {
	config, err := r.config(ctx)
	if err != nil {
		return err
	}
	var unusable bool
	err = r.editStatus(ctx, name, func(reservation *broker.Reservation) (changed bool, err error) {
		if reservation.Spec.RequesterID != requester {
			return false, fmt.Errorf("%s has no such reservation: %w", requester, notFound(name))
		}
		if reservation.UID != ack.ReservationUID || reservation.Status.Attempt.Number != ack.Attempt {
			return false, nil
		}
		// One that is being deleted grants nothing.
		for i := range reservation.EffectiveStatus().Allocations {
			allocation := &reservation.Status.Allocations[i]
			ready := allocation.Accepted && slices.Contains(ack.Ready, allocation.Cluster)
			changed = changed || allocation.VirtualNodeReady != ready
			allocation.VirtualNodeReady = ready
			unusable = r.noteUsable(reservation, allocation, ack, config) || unusable
		}
		if ack.Used != nil && !apiequality.Semantic.DeepEqual(reservation.Status.Used, ack.Used) {
			reservation.Status.Used, changed = ack.Used, true
		}
		if !changed {
			return false, nil
		}
		// What follows from it is written at once. If there is more to do, or more is waited
		// for, only what the providers have withdrawn is.
		in := r.snapshotOf(reservation, config)
		// The status may be the first to announce the length of the lease.
		r.book.Observe(name, reservation.UID, in.seen(), in.now)
		if !unplaced(reservation) {
			if p := newPlan(in); !p.writes() {
				reservation.Status = nextStatus(in, p, false)
				return true, nil
			}
		}
		return true, r.followWithdrawals(ctx, &in)
	})
	if err != nil {
		return fmt.Errorf("recording the report of %s: %w", requester, err)
	}
	if unusable {
		r.reports.concern(name)
		r.retryQueued()
	}
	return nil
}

// noteUsable remembers whether a consumer can use an allocation. It reports whether it is news
// that it cannot.
func (r *Reconciler) noteUsable(reservation *broker.Reservation, allocation *broker.Allocation, ack protocol.RequesterAck, config config) (news bool) {
	why, unusable := ack.Unusable[allocation.Cluster]
	switch {
	case allocation.VirtualNodeReady:
		r.answers.Usable(allocation.Cluster, reservation.UID)
	case allocation.Accepted && unusable:
		return r.answers.Unusable(allocation.Cluster, reservation.UID, ack.Attempt, events.Quote(why), config.retryAfter, r.clock.Now())
	}
	return false
}

func (r *Reconciler) key(name string) client.ObjectKey {
	return client.ObjectKey{Namespace: r.namespace, Name: name}
}

func notFound(name string) error {
	return apierrors.NewNotFound(schema.GroupResource{Group: broker.Group, Resource: "reservations"}, name)
}
