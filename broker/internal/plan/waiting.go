package plan

import (
	"slices"

	"k8s.io/apimachinery/pkg/api/meta"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/decide"
	"github.com/spillway-dev/spillway/broker/internal/queue"
)

// Entry is the Reservation's entry in the queue, for all that its status does not show as
// allocated, or shows where the consumer cannot count on it.
func (in Input) Entry() queue.Entry {
	r := in.Reservation
	entry := queue.Entry{
		Name:     r.Name,
		UID:      r.UID,
		Priority: min(r.Spec.Priority, in.Settings.MaxPriority),
		Since:    queue.Since(r, in.QueueTime).Add(in.handicap()),
		Request:  in.request(capacity.Sub(in.Requested(), in.allocated())),
	}
	for _, h := range in.Holds() {
		if in.counts(h) {
			in.commit(&entry.Request, h)
		}
	}
	return entry
}

// allocated is all that the Reservation's status shows as allocated and the consumer can
// count on.
func (in Input) allocated() (allocated broker.HeldCapacity) {
	holds := in.Holds()
	for _, a := range in.Reservation.Status.Allocations {
		if slices.ContainsFunc(holds, func(h Hold) bool { return h.Cluster == a.Cluster && !in.counts(h) }) {
			continue
		}
		allocated = capacity.Add(allocated, broker.HeldCapacity{Totals: a.Resources, PodSets: a.PodSets})
	}
	return allocated
}

// KeepFree reports whether capacity is kept free for the Reservation when it is the first in the
// queue, for the request of its entry there: what could be placed nowhere, or exceeds the consumer's
// quota, holds back no other.
func (in Input) KeepFree(request decide.Request) bool {
	return in.mayKeepFree() && capacity.Equal(in.withinQuota(request.Want), request.Want) && in.Choice.Clusters.CouldTake(request, in.lacks())
}

// mayKeepFree is what KeepFree depends on besides the clusters.
func (in Input) mayKeepFree() bool {
	ended := in.Settings.KeepFreeFor > 0 && !in.Times.Waiting.IsZero() && !in.Now.Before(in.Times.Waiting.Add(in.Settings.KeepFreeFor))
	return in.Queued() && in.Settings.Queueing != broker.QueueingNone && !ended
}

// Chooses reports whether anything depends on the input's choice: a placement, unless nothing
// is to be placed, or KeepFree.
func (in Input) Chooses(place bool) bool {
	return in.mayKeepFree() || place && !in.Missing().Empty()
}

// totalOf is what a spec requests in total.
func totalOf(spec *broker.ReservationSpec) *broker.ResourceQuantities {
	total := capacity.Requested(spec).Totals
	return total.DeepCopy()
}

// QueuesAgain reports whether the Reservation has been placed and requests more: then it is
// ordered in the queue behind all that there are. An old one that grows again and again is no
// way around the queue.
func (in Input) QueuesAgain() bool {
	status := &in.Reservation.Status
	return status.Requested != nil && len(status.Allocations) > 0 && capacity.Grew(*status.Requested, *totalOf(&in.Reservation.Spec))
}

// Queued reports whether the status says that the Reservation waits for capacity.
func (in Input) Queued() bool {
	return meta.IsStatusConditionTrue(in.Reservation.Status.Conditions, broker.ConditionQueued)
}

// Unplaced reports whether a Reservation waits for capacity, or is new.
func (in Input) Unplaced() bool { return in.Reservation.Status.Phase == "" || in.Queued() }
