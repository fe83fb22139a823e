package reservation

import (
	"context"
	"time"

	"github.com/go-logr/logr"
	"sigs.k8s.io/controller-runtime/pkg/log"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/decide"
)

// Reasons of releases in the audit log, besides those of the conditions.
const (
	auditNotAnswered = "NotAnswered"
	auditTooMuch     = "NotNeeded"
	auditTooFew      = "BelowMinAvailable"
)

// auditLog is the log of what was committed for a Reservation: who asked, which cluster,
// why, at what price and until when. The logger's name is audit.
func (in snapshot) auditLog(ctx context.Context, p plan) logr.Logger {
	return log.FromContext(ctx).WithName("audit").WithValues(
		"requester", in.reservation.Spec.RequesterID,
		"reservation", in.reservation.Name,
		"reservationUID", in.reservation.UID,
		"attempt", p.attempt.Number)
}

func (in snapshot) auditPromise(ctx context.Context, p plan, c change) {
	in.auditLog(ctx, p).Info("Promised capacity", "cluster", c.cluster, "capacity", amount(c.capacity),
		"score", p.scoreOf(c.cluster), "pricePerHour", in.priceOf(c), "until", in.auditUntil())
}

func (in snapshot) auditRelease(ctx context.Context, p plan, c change) {
	left := "nothing"
	if !c.capacity.Empty() {
		left = amount(c.capacity)
	}
	in.auditLog(ctx, p).Info("Released capacity", "cluster", c.cluster, "left", left, "reason", in.auditReason(p, c.cluster))
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
	end, _, exists := in.leaseEnd()
	if !exists {
		end = in.now.Add(length)
	}
	return end.UTC().Format(time.RFC3339)
}

func (in snapshot) auditReason(p plan, cluster string) string {
	for _, h := range in.holds() {
		if h.cluster == cluster && in.overdue(h) && !in.ended() {
			return auditNotAnswered
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
