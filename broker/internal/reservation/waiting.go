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
		// What its status has no room for waits for no capacity: it holds back no other.
		entry.Placeable = queued.Reason != reasonTooManyProviders && in.config.queueing != broker.QueueingNone && decide.CouldPlace(entry.Request, in.lacks(), in.clusters)
		if entry.Placeable {
			keeps, changed := r.queue.KeepsFree(entry, in.config.keepFreeFor, in.now, func() capacity.Vector {
				available := r.claims.Available(in.clusters, &entry.Request)
				// What it was given already is not lost.
				available.Add(capacity.Floor(in.allocated().Totals.List()), 1)
				return available
			})
			if entry.Placeable = keeps; changed {
				defer r.retryQueued()
			}
		}
		r.queue.Set(entry)
	} else if placed := entry.Request.Want.Empty() && !in.ended(); placed && r.queue.Placed(reservation.Name, in.now) || !placed && r.queue.Remove(reservation.Name) {
		r.retryQueued()
	}
}

// recallQueue adds to a snapshot who is ahead of the Reservation.
func (r *Reconciler) recallQueue(in *snapshot) {
	if in.config.queueing == broker.QueueingNone {
		return
	}
	entry := in.entry()
	in.position = int32(r.queue.Position(entry))
	in.ahead = r.queue.Ahead(entry)
	in.claims = &r.claims
	var remembered map[string]bool
	now, config, ahead := in.now, in.config, in.ahead
	in.mayAsk = func(i int, cluster string) bool {
		if remembered == nil {
			remembered = r.answers.Clusters()
		}
		if !remembered[cluster] {
			return true
		}
		rejection, _ := r.answers.Rejection(cluster, ahead[i].Request.Requester, ahead[i].UID, ahead[i].Request.Want, config.proofDeadline, now)
		return rejection == nil
	}
}

// keepFree keeps free what those ahead in the queue wait for.
func (in snapshot) keepFree(known decide.Snapshot, want broker.HeldCapacity) decide.Snapshot {
	if len(in.ahead) == 0 {
		return known
	}
	ahead := make([]*decide.Request, len(in.ahead))
	for i, entry := range in.ahead {
		ahead[i] = &entry.Request
	}
	return in.claims.KeepFree(known, ahead, want, in.mayAsk)
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
