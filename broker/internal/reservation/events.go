package reservation

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// Reasons of the events on a Reservation.
const (
	eventQueued   = "ReservationQueued"
	eventReserved = "CapacityReserved"
	eventRefused  = "ProviderRefused"
	eventReleased = "ReservationReleased"
	eventFailed   = "ReservationFailed"
	eventPrice    = "PriceIncreased"
)

// Actions of these events.
const (
	actionPlace   = "Place"
	actionRelease = "Release"
	actionRenew   = "Renew"
)

// recordChanges records events for a change of the Reservation's status.
func (r *Reconciler) recordChanges(reservation *broker.Reservation, before *broker.ReservationStatus) {
	status := &reservation.Status
	normal := func(reason, action, message string) {
		r.recorder.Eventf(reservation, nil, corev1.EventTypeNormal, reason, action, "%s", message)
	}
	message := func(condition string) string { return meta.FindStatusCondition(status.Conditions, condition).Message }
	queued := func(s *broker.ReservationStatus) bool {
		return meta.IsStatusConditionTrue(s.Conditions, broker.ConditionQueued)
	}
	if queued(status) && !queued(before) {
		normal(eventQueued, actionPlace, message(broker.ConditionQueued))
	}
	if status.Phase == before.Phase {
		return
	}
	switch status.Phase {
	case broker.ReservationReserved:
		normal(eventReserved, actionPlace, fmt.Sprintf("Reserved capacity: %s.", status.Summary))
	case broker.ReservationReleased:
		normal(eventReleased, actionRelease, message(broker.ConditionReady))
	case broker.ReservationFailed:
		r.recorder.Eventf(reservation, nil, corev1.EventTypeWarning, eventFailed, actionPlace, "%s", message(broker.ConditionReady))
	}
}

// recordRefused records an event for a provider's refusal of capacity, with what it said.
func (r *Reconciler) recordRefused(reservation *broker.Reservation, cluster, said string, refused broker.HeldCapacity) {
	r.recorder.Eventf(reservation, nil, corev1.EventTypeWarning, eventRefused, actionPlace, "%s refused %s: %s. Choosing another provider.",
		cluster, capacity.Amount(refused), said)
}

// recordPrice records an event for a provider that has become more expensive.
func (r *Reconciler) recordPrice(reservation *broker.Reservation, cluster, locked, present string) {
	r.recorder.Eventf(reservation, nil, corev1.EventTypeWarning, eventPrice, actionRenew,
		"The lease was renewed at %s per hour in %s. At its present prices, the same capacity would cost %s.", locked, cluster, present)
}
