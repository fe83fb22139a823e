package commit

import (
	"cmp"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/api/meta"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
	"github.com/spillway-dev/spillway/broker/internal/pricing"
	"github.com/spillway-dev/spillway/broker/internal/store"
	"github.com/spillway-dev/spillway/broker/text"
)

// Reasons of releases in the audit log, besides those of the conditions.
const (
	auditRefused = "ProviderRefused"
	auditGivenUp = "ProviderGaveUp"
	auditGone    = "ReservationGone"
	auditChanged = "PlacementChanged"
)

// Audit logs what a change of a cluster's ledger has promised and released: to whom, at
// what price, and why. The watch shows it, whatever became of the answer to the write. What
// changed while no broker was the leader is not logged.
func Audit(log logr.Logger, s *store.Store, before, after *broker.ClusterAdvertisement) {
	if before == nil || after == nil {
		return
	}
	for _, c := range ledger.Changes(before.Status.Holds, after.Status.Holds) {
		var was, now broker.HeldCapacity
		if c.Was != nil {
			was = c.Was.Promised
		}
		if c.Now != nil {
			now = c.Now.Promised
		}
		hold := cmp.Or(c.Now, c.Was)
		log := log.WithValues("requester", hold.Requester, "reservation", hold.ReservationName, "reservationUID", hold.ReservationUID, "attempt", hold.Attempt, "cluster", after.Name)
		if added := capacity.Sub(now, was); !added.Empty() {
			figure := ""
			if price, currency, known := pricing.Of(ledger.CostOf(&after.Spec, added), added.Totals); known {
				figure = text.Price(price, currency)
			}
			log.Info("Promised capacity", "capacity", capacity.Amount(added), "pricePerHour", figure)
		}
		if !capacity.Sub(was, now).Empty() {
			left := "nothing"
			if !now.Empty() {
				left = capacity.Amount(now)
			}
			log.Info("Released capacity", "left", left, "reason", releaseReason(s, c))
		}
	}
}

// releaseReason is why a hold was lowered. The broker records an attempt before a hold has it,
// except of a Reservation that is deleted; a refusal raises that of the hold alone.
func releaseReason(s *store.Store, c ledger.Change) string {
	reservation := s.Reservation(c.Was.ReservationName)
	switch {
	case reservation == nil || reservation.UID != c.Was.ReservationUID:
		return auditGone
	case !reservation.DeletionTimestamp.IsZero():
		return broker.ReasonReleased
	case c.Now != nil && c.Now.WithdrawnAttempt > c.Was.WithdrawnAttempt:
		return auditGivenUp
	case c.Now != nil && reservation.Status.Attempt.Number >= c.Now.Attempt:
		if ready := meta.FindStatusCondition(reservation.Status.Conditions, broker.ConditionReady); ready != nil && reservation.Status.Phase == broker.ReservationReleased {
			return ready.Reason
		}
		return auditChanged
	case ledger.Pending(*c.Was).Empty():
		return auditGivenUp
	}
	return auditRefused
}
