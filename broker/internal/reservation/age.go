package reservation

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// totalOf is what a spec requests in total.
func totalOf(spec *broker.ReservationSpec) *broker.ResourceQuantities {
	if spec.RequestedResources != nil {
		return spec.RequestedResources.DeepCopy()
	}
	total := capacity.OfPodSets(spec.PodSets).Totals
	return &total
}

// queueTime is the time by which a Reservation is ordered in the queue, nil for that of its
// creation. A Reservation that has been placed and requests more queues again, behind all
// that there are: an old one that grows again and again is no way around the queue. It
// compares no clocks: the times are those of the API server.
func (r *Reconciler) queueTime(in *snapshot) *metav1.MicroTime {
	status := &in.reservation.Status
	if status.Requested != nil && len(status.Allocations) > 0 && grew(*status.Requested, *totalOf(&in.reservation.Spec)) {
		return &metav1.MicroTime{Time: r.store.afterAll()}
	}
	return status.QueueTime
}

// queueTimeOf is the time by which a Reservation is ordered in the queue.
func queueTimeOf(reservation *broker.Reservation, queueTime *metav1.MicroTime) time.Time {
	if queueTime != nil {
		return queueTime.Time
	}
	return reservation.CreationTimestamp.Time
}
