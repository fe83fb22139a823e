package reservation

import (
	"context"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/answers"
	"github.com/spillway-dev/spillway/broker/internal/lease"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
)

const (
	// queuedRetryAfter is how often a queued Reservation is tried without any event.
	queuedRetryAfter = time.Minute
	// figuresAfter is the minimum time between two writes of a status that differ in
	// figures only.
	figuresAfter = 10 * time.Second
	// figuresEvery is the time between such writes of all Reservations together, after
	// figuresBurst of them.
	figuresEvery = time.Second
	figuresBurst = 5
	// releaseShownAfter is how long after the deletion of a Reservation its status says that
	// the release waits for providers.
	releaseShownAfter = 5 * time.Second
)

// seen is the Reservation's state, as the book records it.
func (in snapshot) seen() lease.Seen {
	reservation := in.reservation
	seen := lease.Seen{Asked: map[string]int64{}, Deleted: in.deleted()}
	for _, h := range in.holds() {
		seen.Held = seen.Held || !h.Promised.Empty()
		if !ledger.Pending(h.Hold).Empty() {
			seen.Asked[h.cluster] = h.Attempt
		}
	}
	if meta.IsStatusConditionTrue(reservation.Status.Conditions, broker.ConditionQueued) {
		seen.Waiting = reservation.Generation
	}
	length := in.config.duration(reservation.Spec.Duration)
	seen.Unannounced = seen.Held && length > 0 && !in.announced(length)
	return seen
}

// recall adds to a snapshot what this process knows and no object says: since when it has
// seen the Reservation's state, what the providers have answered, and the queue.
func (r *Reconciler) recall(in *snapshot) {
	reservation := in.reservation
	in.times = r.book.Times(reservation.Name, reservation.UID, in.seen(), in.now)
	in.progress, in.unusable = map[string]answers.Progress{}, map[string]int64{}
	for _, cluster := range in.holders {
		in.progress[cluster] = r.answers.Progress(cluster)
		in.unusable[cluster] = r.answers.UnusableUpTo(cluster, reservation.UID)
	}
	in.heard = r.lastAdvertised(reservation.Spec.RequesterID)
	in.rejections = func(want broker.HeldCapacity) (map[string]capacity.Rejection, time.Time) {
		return r.answers.Rejections(reservation.Spec.RequesterID, reservation.UID, want, in.config.proofDeadline, in.now)
	}
	in.queueTime = r.queueTime(in)
	r.recallQueue(in)
}

// note remembers what a reconcile has seen: since when, which answers are overdue, and who
// waits.
func (r *Reconciler) note(in snapshot) {
	reservation := in.reservation
	r.book.Observe(reservation.Name, reservation.UID, in.seen(), in.now)
	for _, h := range in.holds() {
		if in.overdue(h) {
			asked, _ := in.askedAt(h)
			// What is not confirmed yet may wait for guests.
			r.answers.Missed(h.cluster, reservation.UID, asked, h.Unconfirmed != nil, in.config.retryAfter, in.now)
		}
	}
	r.noteQueue(in)
	if r.store.removedLately(reservation) {
		// It was deleted after it was read: no further event would forget it.
		r.forget(reservation.Name)
	}
}

// deleted reports whether the Reservation is being deleted. It grants nothing then, and that
// cannot be taken back.
func (in snapshot) deleted() bool { return !in.reservation.DeletionTimestamp.IsZero() }

// statusDue reports whether the status is to be written if it is not up to date. That of a
// deleted Reservation does not count any more: it is written for those who watch the
// deletion, if the release takes long or the object stays after it.
func (in snapshot) statusDue() bool {
	switch {
	case !in.deleted() || len(in.reservation.Finalizers) > 1:
		return true
	case !in.needsFinalizer():
		return false
	}
	return !in.now.Before(in.times.Deleted.Add(releaseShownAfter))
}

// forget drops what is remembered of a Reservation that does not exist any more.
func (r *Reconciler) forget(name string) {
	r.book.Forget(name)
	r.rememberImpossible(name, false)
	r.conflicts.Forget("reservation/" + name)
	r.mu.Lock()
	delete(r.priceChanges, name)
	r.mu.Unlock()
	if r.queue.Remove(name) {
		r.retryQueued()
	}
}

// forgetCluster drops what is remembered of a cluster whose advertisement was deleted.
func (r *Reconciler) forgetCluster(cluster string) {
	r.answers.Forget(cluster)
	r.conflicts.Forget("advertisement/" + cluster)
	r.forgetSeries(cluster)
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.latest, cluster)
	delete(r.receivedAt, cluster)
}

// Renew renews the lease of a consumer's Reservation: it starts again now. It writes
// nothing, and changes nothing if the Reservation has another UID. It returns NotFound
// (apierrors.IsNotFound) if there is none of that name, or if it belongs to another
// cluster.
func (r *Reconciler) Renew(ctx context.Context, requester, name string, uid types.UID) error {
	var reservation broker.Reservation
	if err := r.client.Get(ctx, r.key(name), &reservation); client.IgnoreNotFound(err) != nil {
		return err
	} else if err != nil || reservation.Spec.RequesterID != requester {
		return notFound(name)
	}
	if reservation.UID == uid && reservation.DeletionTimestamp.IsZero() && r.book.Renew(name, uid, r.clock.Now()) {
		r.recordPriceChange(ctx, &reservation)
	}
	return nil
}

// askedAt is when the pending attempt of a hold was first seen.
func (in snapshot) askedAt(h clusterHold) (at time.Time, pending bool) {
	if ledger.Pending(h.Hold).Empty() {
		return at, false
	}
	at, known := in.times.Asked[h.cluster]
	if !known {
		// It was placed after the snapshot.
		at = in.now
	}
	return at, true
}

// due is when the provider's answer to a hold is overdue.
func (in snapshot) due(h clusterHold) (at time.Time, pending bool) {
	asked, pending := in.askedAt(h)
	return in.progress[h.cluster].Due(asked, answers.Deadline(in.config.proofDeadline, ledger.Pending(h.Hold))), pending
}

// overdue reports whether the provider has not answered to a hold before the deadline.
func (in snapshot) overdue(h clusterHold) bool {
	due, pending := in.due(h)
	return pending && !in.now.Before(due)
}

// expiry is when the lease of a fixed length ends unless it is renewed. There is none if the
// lease has no such length, or nothing is held yet.
func (in snapshot) expiry() (end time.Time, exists bool) {
	length, start := in.config.duration(in.reservation.Spec.Duration), in.times.Start()
	return start.Add(length), length > 0 && !start.IsZero()
}

// leaseEnd is when the Reservation ends unless its lease is renewed, and why: after the
// length of the lease or, if that is earlier, after the silence of its consumer.
func (in snapshot) leaseEnd() (end time.Time, reason string, exists bool) {
	end, exists = in.expiry()
	if in.config.defaultLease <= 0 {
		return end, reasonExpired, exists
	}
	heard := lease.Later(lease.Later(in.times.FirstSeen, in.times.Renewed), in.heard)
	if silent := heard.Add(in.config.defaultLease); !exists || silent.Before(end) {
		return silent, reasonConsumerSilent, true
	}
	return end, reasonExpired, true
}

// announced reports whether the status says that the lease is as short as that.
func (in snapshot) announced(length time.Duration) bool {
	announced := in.reservation.Status.LeaseDuration
	return announced != nil && announced.Duration <= length
}

// leaseEnded reports whether the lease has ended.
func (in snapshot) leaseEnded() bool {
	end, _, exists := in.leaseEnd()
	return exists && !in.now.Before(end)
}

// deadlineExceeded reports whether the Reservation has been queued for longer than its
// deadline. Once the status says so, that holds until the spec changes.
func (in snapshot) deadlineExceeded() bool {
	deadline := in.reservation.Spec.Deadline
	if deadline == nil {
		return false
	}
	queued := meta.FindStatusCondition(in.reservation.Status.Conditions, broker.ConditionQueued)
	if queued != nil && queued.Reason == reasonDeadlineExceeded && queued.ObservedGeneration == in.reservation.Generation {
		return true
	}
	waiting := in.times.Waiting
	return !waiting.IsZero() && !in.now.Before(waiting.Add(deadline.Duration))
}
