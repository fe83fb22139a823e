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

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/commit"
	"github.com/spillway-dev/spillway/broker/internal/decide"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
	"github.com/spillway-dev/spillway/broker/internal/plan"
	"github.com/spillway-dev/spillway/broker/internal/pricing"
	"github.com/spillway-dev/spillway/broker/internal/settings"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/broker/text"
)

// ApplyProviderAck applies a provider's answer to its hold for the Reservation of the
// given name. An ack for another UID or attempt than the hold's changes nothing. It
// returns NotFound (apierrors.IsNotFound) if the provider has no hold of that name. It
// is idempotent.
func (r *Reconciler) ApplyProviderAck(ctx context.Context, cluster, name string, ack protocol.ProviderAck) error {
	config := r.store.Settings()
	var asked broker.HeldCapacity
	var news, changed, released bool
	// The provider's words, as such.
	said := "no reason given"
	if ack.Message != "" {
		said = text.Quote(ack.Message)
	}
	askedAt := r.book.AskedAt(name, ack.ReservationUID, cluster)
	_, err := r.committer.Commit(ctx, cluster, func(ad *broker.ClusterAdvertisement) (commit.Edited, error) {
		changed = false
		hold, err := answered(ad, name, ack)
		if hold == nil || err != nil {
			return commit.Edited{}, err
		}
		asked = ledger.Pending(*hold.DeepCopy())
		released = asked.Empty()
		refuse := r.answers.Refused
		if !ack.Accepted && asked.Empty() {
			// The provider gives up what it had accepted, except for what it still holds.
			refuse = r.answers.Withdrawn
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
			news = refuse(cluster, requester, asked, said, config.RetryAfter, r.clock.Now()) || news
		}
		return commit.Edited{Status: changed}, nil
	})
	if err != nil {
		return err
	}
	// An ack of anything but the attempt asked answers nothing.
	if changed && r.rememberAnswer(cluster, ack.ReservationUID, askedAt, released) {
		r.clusters.Retry.Send()
	}
	switch {
	case news:
		if reservation := r.store.Reservation(name); reservation != nil && reservation.UID == ack.ReservationUID {
			r.recordRefused(reservation, cluster, said, asked)
		}
	case ack.Accepted && r.answers.Accepted(cluster, asked, r.clock.Now()):
		r.clusters.Retry.Send()
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
	config := r.store.Settings()
	var unusable bool
	err := r.editStatus(ctx, name, func(reservation *broker.Reservation) (changed bool, err error) {
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
		in := r.input(reservation, config)
		// The status may be the first to announce the length of the lease.
		r.book.Observe(name, reservation.UID, in.Seen(), in.Now)
		if !in.Unplaced() {
			if p := plan.New(in); !p.Writes() {
				reservation.Status = plan.Status(in, p, false)
				return true, nil
			}
		}
		if err := r.readOverstated(ctx, &in); err != nil {
			return false, err
		}
		reservation.Status = in.Lowered()
		return true, nil
	})
	if err != nil {
		return fmt.Errorf("recording the report of %s: %w", requester, err)
	}
	if unusable {
		r.clusters.Reports.Concern(name)
		r.clusters.Retry.Send()
	}
	return nil
}

// noteUsable remembers whether a consumer can use an allocation. It reports whether it is news
// that it cannot.
func (r *Reconciler) noteUsable(reservation *broker.Reservation, allocation *broker.Allocation, ack protocol.RequesterAck, config settings.Settings) (news bool) {
	why, unusable := ack.Unusable[allocation.Cluster]
	switch {
	case allocation.VirtualNodeReady:
		r.answers.Usable(allocation.Cluster, reservation.UID)
	case allocation.Accepted && unusable:
		return r.answers.Unusable(allocation.Cluster, reservation.UID, ack.Attempt, text.Quote(why), config.RetryAfter, r.clock.Now())
	}
	return false
}

func notFound(name string) error {
	return apierrors.NewNotFound(schema.GroupResource{Group: broker.Group, Resource: "reservations"}, name)
}

// Renew renews the lease of a consumer's Reservation: it starts again now. It writes
// nothing, and changes nothing if the Reservation has another UID. It returns NotFound
// (apierrors.IsNotFound) if there is none of that name, or if it belongs to another
// cluster.
func (r *Reconciler) Renew(requester, name string, uid types.UID) error {
	reservation := r.store.Reservation(name)
	if reservation == nil || reservation.Spec.RequesterID != requester {
		return notFound(name)
	}
	if reservation.UID == uid && reservation.DeletionTimestamp.IsZero() && r.book.Renew(name, uid, r.clock.Now()) {
		r.recordPriceChange(reservation)
	}
	return nil
}

// recordPriceChange records an event if a provider's present price for what a renewed
// Reservation holds is higher than the locked one: the price stays, but another
// Reservation would cost more. Each price is reported once.
func (r *Reconciler) recordPriceChange(reservation *broker.Reservation) {
	for _, allocation := range reservation.Status.Allocations {
		ad := r.store.Advertisement(allocation.Cluster)
		if ad == nil {
			continue // the provider is gone, and its price with it
		}
		for _, hold := range ad.Status.Holds {
			if hold.ReservationUID != reservation.UID {
				continue
			}
			locked, currency, known := pricing.Of(hold.Cost, hold.Promised.Totals)
			present, presentCurrency, knownNow := pricing.Of(ledger.CostOf(&ad.Spec, hold.Promised), hold.Promised.Totals)
			if !known || !knownNow || currency != presentCurrency || present.Cmp(locked) <= 0 {
				continue
			}
			price := text.Price(present, currency)
			if r.reportsPrice(reservation.Name, allocation.Cluster, price) {
				r.recordPrice(reservation, allocation.Cluster, text.Price(locked, currency), price)
			}
		}
	}
}

// reportsPrice notes that a price is reported. It reports false if it was before.
func (r *Reconciler) reportsPrice(reservation, cluster, price string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.priceChanges[reservation] == nil {
		r.priceChanges[reservation] = map[string]string{}
	}
	before := r.priceChanges[reservation][cluster]
	r.priceChanges[reservation][cluster] = price
	return before != price
}

// Explain reports, for each cluster, why it would not be chosen now: for what is missing
// of the Reservation or, if nothing is, for all that it requests. Who waits before it in
// the queue does not count. The requester may see it as decide.ForConsumer shows it. It
// returns NotFound (apierrors.IsNotFound) if the requester has no Reservation of that name.
func (r *Reconciler) Explain(requester, name string) ([]broker.ClusterRejection, error) {
	reservation := r.store.Reservation(name)
	if reservation == nil || reservation.Spec.RequesterID != requester {
		return nil, notFound(name)
	}
	in := r.input(reservation.DeepCopy(), r.store.Settings())
	p := plan.New(in)
	want := p.Missing
	if want.Empty() {
		want = in.Requested()
	}
	in.Choice = r.choice(in, want)
	return decide.Explain(p.Request(in, want)), nil
}
