package plan

import (
	"time"

	"k8s.io/apimachinery/pkg/api/meta"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
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
	// releaseShownAfter is how long after the deletion of a Reservation its status says that
	// the release waits for providers.
	releaseShownAfter = 5 * time.Second
)

// Seen is the Reservation's state, as the book records it.
func (in Input) Seen() lease.Seen {
	reservation := in.Reservation
	seen := lease.Seen{Asked: map[string]int64{}, Deleted: in.Deleted()}
	for _, h := range in.Holds() {
		seen.Held = seen.Held || !h.Promised.Empty()
		if !ledger.Pending(h.Hold).Empty() {
			seen.Asked[h.Cluster] = h.Attempt
		}
	}
	if in.Queued() {
		seen.Waiting = reservation.Generation
	}
	length := in.Settings.Duration(reservation.Spec.Duration)
	seen.Unannounced = seen.Held && length > 0 && !in.announced(length)
	return seen
}

// Deleted reports whether the Reservation is being deleted. It grants nothing then, and that
// cannot be taken back.
func (in Input) Deleted() bool { return !in.Reservation.DeletionTimestamp.IsZero() }

// StatusDue reports whether the status is to be written if it is not up to date. That of a
// deleted Reservation does not count any more: it is written for those who watch the
// deletion, if the release takes long or the object stays after it.
func (in Input) StatusDue() bool {
	switch {
	case !in.Deleted() || len(in.Reservation.Finalizers) > 1:
		return true
	case !in.NeedsFinalizer():
		return false
	}
	return !in.Now.Before(in.Times.Deleted.Add(releaseShownAfter))
}

// AskedAt is when the pending attempt of a hold was first seen.
func (in Input) AskedAt(h Hold) (at time.Time, pending bool) {
	if ledger.Pending(h.Hold).Empty() {
		return at, false
	}
	at, known := in.Times.Asked[h.Cluster]
	if !known {
		// It was placed after the input was read.
		at = in.Now
	}
	return at, true
}

// due is when the provider's answer to a hold is overdue.
func (in Input) due(h Hold) (at time.Time, pending bool) {
	asked, pending := in.AskedAt(h)
	return in.Progress[h.Cluster].Due(asked, answers.Deadline(in.Settings.ProofDeadline, ledger.Pending(h.Hold))), pending
}

// Overdue reports whether the provider has not answered to a hold before the deadline.
func (in Input) Overdue(h Hold) bool {
	due, pending := in.due(h)
	return pending && !in.Now.Before(due)
}

// expiry is when the lease of a fixed length ends unless it is renewed. There is none if the
// lease has no such length, or nothing is held yet.
func (in Input) expiry() (end time.Time, exists bool) {
	length, start := in.Settings.Duration(in.Reservation.Spec.Duration), in.Times.Start()
	return start.Add(length), length > 0 && !start.IsZero()
}

// leaseEnd is when the Reservation ends unless its lease is renewed, and why: after the
// length of the lease or, if that is earlier, after the silence of its consumer.
func (in Input) leaseEnd() (end time.Time, reason string, exists bool) {
	end, exists = in.expiry()
	if in.Settings.DefaultLease <= 0 {
		return end, ReasonExpired, exists
	}
	heard := lease.Later(lease.Later(in.Times.FirstSeen, in.Times.Renewed), in.Heard)
	if silent := heard.Add(in.Settings.DefaultLease); !exists || silent.Before(end) {
		return silent, ReasonConsumerSilent, true
	}
	return end, ReasonExpired, true
}

// announced reports whether the status says that the lease is as short as that.
func (in Input) announced(length time.Duration) bool {
	announced := in.Reservation.Status.LeaseDuration
	return announced != nil && announced.Duration <= length
}

// leaseEnded reports whether the lease has ended.
func (in Input) leaseEnded() bool {
	end, _, exists := in.leaseEnd()
	return exists && !in.Now.Before(end)
}

// deadlineExceeded reports whether the Reservation has been queued for longer than its
// deadline. Once the status says so, that holds until the spec changes.
func (in Input) deadlineExceeded() bool {
	deadline := in.Reservation.Spec.Deadline
	if deadline == nil {
		return false
	}
	queued := meta.FindStatusCondition(in.Reservation.Status.Conditions, broker.ConditionQueued)
	if queued != nil && queued.Reason == ReasonDeadlineExceeded && queued.ObservedGeneration == in.Reservation.Generation {
		return true
	}
	waiting := in.Times.Waiting
	return !waiting.IsZero() && !in.Now.Before(waiting.Add(deadline.Duration))
}
