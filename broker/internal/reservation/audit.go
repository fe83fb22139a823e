package reservation

import (
	"context"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/log"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/decide"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
)

// Reasons of releases in the audit log, besides those of the conditions.
const (
	auditRefused     = "ProviderRefused"
	auditGivenUp     = "ProviderGaveUp"
	auditGone        = "ReservationGone"
	auditNotAnswered = "NotAnswered"
	auditUnusable    = "ConsumerCannotUse"
	auditTooMuch     = "NotNeeded"
	auditTooFew      = "BelowMinAvailable"
)

// auditLog is the log of what was committed for a Reservation: who asked, which cluster,
// why, at what price and until when. The logger's name is audit.
func (in snapshot) auditLog(ctx context.Context, p plan) logr.Logger {
	return auditLog(ctx, in.reservation.Spec.RequesterID, in.reservation.Name, in.reservation.UID, p.attempt.Number)
}

func auditLog(ctx context.Context, requester, name string, uid types.UID, attempt int64) logr.Logger {
	return log.FromContext(ctx).WithName("audit").WithValues("requester", requester, "reservation", name, "reservationUID", uid, "attempt", attempt)
}

// auditPromise returns what logs a growth.
func (in snapshot) auditPromise(ctx context.Context, p plan, c change) func() {
	audit := in.auditLog(ctx, p).WithValues("cluster", c.cluster, "capacity", amount(c.capacity),
		"score", p.scoreOf(c.cluster), "pricePerHour", in.priceOf(c), "until", in.auditUntil())
	return func() { audit.Info("Promised capacity") }
}

// auditRelease returns what logs that a hold shrinks.
func (in snapshot) auditRelease(ctx context.Context, p plan, c change) func() {
	return logRelease(in.auditLog(ctx, p), c.cluster, c.capacity, in.auditReason(p, c.cluster))
}

func logRelease(audit logr.Logger, cluster string, left broker.HeldCapacity, reason string) func() {
	text := "nothing"
	if !left.Empty() {
		text = amount(left)
	}
	return func() { audit.Info("Released capacity", "cluster", cluster, "left", text, "reason", reason) }
}

// expectSweep expects that orphans of a ledger are released.
func (r *Reconciler) expectSweep(ctx context.Context, lines *auditLines, ad *broker.ClusterAdvertisement, orphans []types.UID) {
	for _, uid := range orphans {
		if hold := ledger.Find(&ad.Status, uid); hold != nil && !hold.Promised.Empty() {
			attempt := hold.Attempt + 1
			audit := auditLog(ctx, hold.Requester, hold.ReservationName, uid, attempt)
			r.uncertain.expect(lines, ad.Name, uid, attempt, logRelease(audit, ad.Name, broker.HeldCapacity{}, auditGone))
		}
	}
}

// expectRefusal expects that a ledger is written after a provider's refusal; hold is the
// one before.
func (r *Reconciler) expectRefusal(ctx context.Context, lines *auditLines, ad *broker.ClusterAdvertisement, hold broker.Hold) {
	var left broker.HeldCapacity
	var attempt int64
	if now := ledger.Find(&ad.Status, hold.ReservationUID); now != nil {
		left, attempt = *now.Promised.DeepCopy(), now.Attempt
	}
	reason := auditRefused
	if ledger.Pending(hold).Empty() {
		reason = auditGivenUp
	}
	audit := auditLog(ctx, hold.Requester, hold.ReservationName, hold.ReservationUID, hold.Attempt)
	r.uncertain.expect(lines, ad.Name, hold.ReservationUID, attempt, logRelease(audit, ad.Name, left, reason))
}

// scoreOf is the score that a cluster was chosen with.
func (p plan) scoreOf(cluster string) string {
	for _, s := range p.decision.Scores {
		if s.Cluster == cluster {
			return s.Score
		}
	}
	return ""
}

// priceOf is the price per hour of a growth; "" if the provider states none.
func (in snapshot) priceOf(c change) string {
	if ad := in.advertisement(c.cluster); ad != nil {
		if price, currency, known := decide.Price(ad.Spec.Cost, c.capacity.Totals); known {
			return decide.PriceString(price, currency)
		}
	}
	return ""
}

// auditUntil is when the lease ends unless it is renewed; "" if it has no fixed length.
func (in snapshot) auditUntil() string {
	length := in.config.duration(in.reservation.Spec.Duration)
	if length <= 0 {
		return ""
	}
	end, exists := in.expiry()
	if !exists {
		end = in.now.Add(length)
	}
	return end.UTC().Format(time.RFC3339)
}

func (in snapshot) auditReason(p plan, cluster string) string {
	for _, h := range in.holds() {
		switch {
		case h.cluster != cluster || in.ended():
		case in.overdue(h):
			return auditNotAnswered
		case in.cannotUse(h):
			return auditUnusable
		}
	}
	switch {
	case in.requested().Empty():
		reason, _ := in.endedReason()
		return reason
	case !p.missing.Empty():
		return auditTooFew
	default:
		return auditTooMuch
	}
}

// recordPriceChange records an event if a provider's present price for what a renewed
// Reservation holds is higher than the locked one: the price stays, but another
// Reservation would cost more. Each price is reported once.
func (r *Reconciler) recordPriceChange(ctx context.Context, reservation *broker.Reservation) {
	for _, allocation := range reservation.Status.Allocations {
		var ad broker.ClusterAdvertisement
		if err := r.client.Get(ctx, r.key(allocation.Cluster), &ad); err != nil {
			continue // the provider is gone, and its price with it
		}
		for _, hold := range ad.Status.Holds {
			if hold.ReservationUID != reservation.UID {
				continue
			}
			locked, currency, known := decide.Price(hold.Cost, hold.Promised.Totals)
			present, presentCurrency, knownNow := decide.Price(ad.Spec.Cost, hold.Promised.Totals)
			if !known || !knownNow || currency != presentCurrency || present.Cmp(locked) <= 0 {
				continue
			}
			price := decide.PriceString(present, currency)
			if r.reportsPrice(reservation.Name, allocation.Cluster, price) {
				r.recordPrice(reservation, allocation.Cluster, decide.PriceString(locked, currency), price)
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
