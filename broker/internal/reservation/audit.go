package reservation

import (
	"cmp"
	"context"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/api/meta"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/decide"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
)

// Reasons of releases in the audit log, besides those of the conditions.
const (
	auditRefused = "ProviderRefused"
	auditGivenUp = "ProviderGaveUp"
	auditGone    = "ReservationGone"
	auditChanged = "PlacementChanged"
)

// auditHolds logs what a change of a cluster's ledger has promised and released: to whom, at
// what price, and why. The watch shows it, whatever became of the answer to the write. What
// changed while no broker was the leader is not logged.
func (r *Reconciler) auditHolds(log logr.Logger, before, after *broker.ClusterAdvertisement) {
	if before == nil || after == nil {
		return
	}
	for _, c := range holdChanges(before.Status.Holds, after.Status.Holds) {
		var was, now broker.HeldCapacity
		if c.was != nil {
			was = c.was.Promised
		}
		if c.now != nil {
			now = c.now.Promised
		}
		hold := cmp.Or(c.now, c.was)
		log := log.WithValues("requester", hold.Requester, "reservation", hold.ReservationName, "reservationUID", hold.ReservationUID, "attempt", hold.Attempt, "cluster", after.Name)
		if added := capacity.Sub(now, was); !added.Empty() {
			figure := ""
			if price, currency, known := decide.Price(after.Spec.Cost, added.Totals); known {
				figure = decide.PriceString(price, currency)
			}
			log.Info("Promised capacity", "capacity", amount(added), "pricePerHour", figure)
		}
		if !capacity.Sub(was, now).Empty() {
			left := "nothing"
			if !now.Empty() {
				left = amount(now)
			}
			log.Info("Released capacity", "left", left, "reason", r.releaseReason(c))
		}
	}
}

// releaseReason is why a hold was lowered. The broker records an attempt before a hold has it,
// except of a Reservation that is deleted; a refusal raises that of the hold alone.
func (r *Reconciler) releaseReason(c holdChange) string {
	reservation := r.store.reservation(c.was.ReservationName)
	switch {
	case reservation == nil || reservation.UID != c.was.ReservationUID:
		return auditGone
	case !reservation.DeletionTimestamp.IsZero():
		return broker.ReasonReleased
	case c.now != nil && c.now.WithdrawnAttempt > c.was.WithdrawnAttempt:
		return auditGivenUp
	case c.now != nil && reservation.Status.Attempt.Number >= c.now.Attempt:
		if ready := meta.FindStatusCondition(reservation.Status.Conditions, broker.ConditionReady); ready != nil && reservation.Status.Phase == broker.ReservationReleased {
			return ready.Reason
		}
		return auditChanged
	case ledger.Pending(*c.was).Empty():
		return auditGivenUp
	}
	return auditRefused
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
