package reservation

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Reasons of the events about Reservations, and their common action.
const (
	eventGranted  = "CapacityGranted"
	eventQueued   = "ReservationQueued"
	eventFailed   = "ReservationFailed"
	eventRejected = "ReservationRejected"
	eventReady    = "ReservationReady"

	eventAction = "Reserve"
)

type statusEvent struct{ kind, reason, message string }

// statusEvents returns the events for a change of a Reservation's status.
func statusEvents(before, after *broker.ReservationStatus) []statusEvent {
	var all []statusEvent
	for i := range after.Allocations {
		if allocation := &after.Allocations[i]; newlyGranted(before, allocation) {
			all = append(all, statusEvent{corev1.EventTypeNormal, eventGranted, grantedMessage(allocation)})
		}
	}
	queued := meta.IsStatusConditionTrue(after.Conditions, broker.ConditionQueued)
	if queued && (!meta.IsStatusConditionTrue(before.Conditions, broker.ConditionQueued) || rejectionReasons(before) != rejectionReasons(after)) {
		all = append(all, statusEvent{corev1.EventTypeWarning, eventQueued, insufficiency(after)})
	}
	if after.Phase == broker.ReservationFailed && before.Phase != broker.ReservationFailed && !meta.IsStatusConditionFalse(after.Conditions, broker.ConditionReported) {
		all = append(all, statusEvent{corev1.EventTypeWarning, eventFailed, insufficiency(after)})
	}
	// An unreachable broker is retried and shown in the condition only.
	now, former := meta.FindStatusCondition(after.Conditions, broker.ConditionReported), meta.FindStatusCondition(before.Conditions, broker.ConditionReported)
	if now != nil && now.Status == metav1.ConditionFalse && now.Reason != reasonBrokerUnreachable &&
		(former == nil || former.Reason != now.Reason || former.Message != now.Message) {
		all = append(all, statusEvent{corev1.EventTypeWarning, eventRejected, now.Message})
	}
	if meta.IsStatusConditionTrue(after.Conditions, broker.ConditionReady) && !meta.IsStatusConditionTrue(before.Conditions, broker.ConditionReady) {
		all = append(all, statusEvent{corev1.EventTypeNormal, eventReady, meta.FindStatusCondition(after.Conditions, broker.ConditionReady).Message})
	}
	return all
}

// newlyGranted reports whether an accepted allocation is new or larger than before.
func newlyGranted(before *broker.ReservationStatus, allocation *broker.Allocation) bool {
	if !allocation.Accepted {
		return false
	}
	i := slices.IndexFunc(before.Allocations, func(a broker.Allocation) bool { return a.Cluster == allocation.Cluster && a.Accepted })
	return i < 0 ||
		podsOf(allocation) >= podsOf(&before.Allocations[i]) && !equality.Semantic.DeepEqual(allocation.Resources, before.Allocations[i].Resources)
}

func grantedMessage(allocation *broker.Allocation) string {
	amount := allocation.Resources.String()
	if n := podsOf(allocation); n > 0 {
		amount = fmt.Sprintf("capacity for %d pods (%s)", n, amount)
	}
	if allocation.PricePerHour != "" {
		amount += " at " + allocation.PricePerHour + " per hour"
	}
	return fmt.Sprintf("Provider %s granted %s.", allocation.Cluster, amount)
}

// rejectionReasons identifies a decision's rejections without their figures.
func rejectionReasons(status *broker.ReservationStatus) string {
	if status.Decision == nil {
		return ""
	}
	var reasons []string
	for _, r := range status.Decision.Rejections {
		reasons = append(reasons, r.Cluster+"="+r.Reason)
	}
	slices.Sort(reasons)
	return strings.Join(reasons, ",")
}
