package reservation

import (
	"slices"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/event"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/decide"
	"github.com/spillway-dev/spillway/broker/internal/queue"
)

// maxRetried is the maximum number of queued Reservations that one event retries: the
// first ones, and others in turn. All are retried after queuedRetryAfter.
const maxRetried = 64

// entry is the Reservation's entry in the queue, for all that its status does not show as
// allocated, or shows where the consumer cannot count on it.
func (in snapshot) entry() queue.Entry {
	r := in.reservation
	return queue.Entry{
		Name:     r.Name,
		UID:      r.UID,
		Priority: min(r.Spec.Priority, in.config.maxPriority),
		Since:    queueTimeOf(r, in.queueTime),
		Request: decide.Request{
			Requester: r.Spec.RequesterID,
			Pin:       r.Spec.TargetClusterID,
			Placement: r.Spec.Placement,
			Budget:    r.Spec.Budget,
			Providers: in.providers(),
			Want:      capacity.Sub(in.requested(), in.allocated()),
		},
	}
}

// allocated is all that the Reservation's status shows as allocated and the consumer can
// count on.
func (in snapshot) allocated() (allocated broker.HeldCapacity) {
	holds := in.holds()
	for _, a := range in.reservation.Status.Allocations {
		if slices.ContainsFunc(holds, func(h clusterHold) bool { return h.cluster == a.Cluster && !in.counts(h) }) {
			continue
		}
		allocated = capacity.Add(allocated, broker.HeldCapacity{Totals: a.Resources, PodSets: a.PodSets})
	}
	return allocated
}

// noteQueue keeps the Reservation's entry in the queue up to date.
func (r *Reconciler) noteQueue(in snapshot) {
	reservation, entry := in.reservation, in.entry()
	queued := meta.FindStatusCondition(reservation.Status.Conditions, broker.ConditionQueued)
	if queued != nil && queued.Status == metav1.ConditionTrue && !entry.Request.Want.Empty() {
		entry.Placeable = in.keepsFree() && decide.CouldPlace(entry.Request, in.lacks(), in.clusters)
		r.queue.Set(entry)
	} else if r.queue.Remove(reservation.Name) {
		r.retryQueued()
	}
}

// keepsFree reports whether capacity may be kept free for the Reservation.
func (in snapshot) keepsFree() bool {
	ended := in.config.keepFreeFor > 0 && !in.times.Waiting.IsZero() && !in.now.Before(in.times.Waiting.Add(in.config.keepFreeFor))
	return in.config.queueing != broker.QueueingNone && !ended
}

// recallQueue adds to a snapshot for whom capacity is kept free before the Reservation.
func (r *Reconciler) recallQueue(in *snapshot) {
	if in.config.queueing == broker.QueueingNone {
		return
	}
	entry := in.entry()
	in.position = int32(r.queue.Position(entry))
	if first := r.queue.First(entry); first != nil {
		in.first = &first.Request
		in.refuseFirst, _ = r.answers.Rejections(first.Request.Requester, first.UID, first.Request.Want, in.config.proofDeadline, in.now)
	}
}

// retryQueued enqueues the first queued Reservations: one of them may have its turn, or a
// provider may be asked again.
func (r *Reconciler) retryQueued() {
	select {
	case r.becameFresh <- event.GenericEvent{Object: &broker.ClusterAdvertisement{ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace}}}:
	default: // a pending event enqueues the same Reservations
	}
}

// retriable lists queued Reservations that could use what a cluster has available; any if
// the advertisement is nil.
func (r *Reconciler) retriable(ad *broker.ClusterAdvertisement) []string {
	match := func(*queue.Entry) bool { return true }
	if ad != nil {
		available := capacity.Floor(ad.Status.Available.List())
		match = func(e *queue.Entry) bool {
			return e.Profits(available) && decide.Eligible(&e.Request, &ad.Spec, true, true)
		}
	}
	entries := r.queue.Next(maxRetried, match)
	names := make([]string, len(entries))
	for i, entry := range entries {
		names[i] = entry.Name
	}
	return names
}
