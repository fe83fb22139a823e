package reservation

import (
	"context"
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/api/meta"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/decide"
	"github.com/spillway-dev/spillway/broker/internal/plan"
	"github.com/spillway-dev/spillway/broker/internal/queue"
)

// maxRetried is the maximum number of queued Reservations that one event retries: the
// first ones, and others in turn. All are retried after a while.
const maxRetried = 64

// note remembers what a reconcile has seen: since when, which answers are overdue, and who
// waits.
func (r *Reconciler) note(in plan.Input) {
	reservation := in.Reservation
	r.book.Observe(reservation.Name, reservation.UID, in.Seen(), in.Now)
	for _, h := range in.Holds() {
		if in.Overdue(h) {
			asked, _ := in.AskedAt(h)
			// What is not confirmed yet may wait for guests.
			r.answers.Missed(h.Cluster, reservation.UID, asked, h.Unconfirmed != nil, in.Settings.RetryAfter, in.Now)
		}
	}
	r.noteQueue(in)
	if !r.store.Exists(reservation.Name, reservation.UID) {
		// It was deleted after it was read: no further event would forget it.
		r.forget(reservation.Name)
	}
}

// noteQueue keeps the Reservation's entry in the queue up to date.
func (r *Reconciler) noteQueue(in plan.Input) {
	entry := in.Entry()
	if in.Queued() && !entry.Request.Want.Empty() {
		entry.KeepFree = in.KeepFree(entry.Request)
		r.queue.Set(entry)
	} else if r.queue.Remove(entry.Name) {
		r.clusters.Retry.Send()
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

// rememberImpossible records whether a Reservation is to be tried again when the
// clusters change.
func (r *Reconciler) rememberImpossible(name string, impossible bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if impossible {
		r.impossible[name] = true
	} else {
		delete(r.impossible, name)
	}
}

// impossibleNames lists up to maxRetried of the Reservations that rememberImpossible has
// recorded, by chance. All are tried again after a while.
func (r *Reconciler) impossibleNames() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	names := slices.Collect(maps.Keys(r.impossible)) // a map has no order
	names = names[:min(len(names), maxRetried)]
	slices.Sort(names)
	return names
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
		r.clusters.Retry.Send()
	}
}

// takeOver queues what waits, once, when all advertisements and Reservations are known. Before
// that, no request is placed: it would be placed before earlier ones of which no event has been
// handled yet. It reports false if the context ends before.
func (r *Reconciler) takeOver(ctx context.Context) bool {
	if !r.store.WaitSynced(ctx) {
		return false
	}
	r.takeover.Do(func() {
		for _, ad := range r.store.Advertisements() {
			r.clusters.Follow(ad.Name)
		}
		for _, reservation := range r.store.Reservations() {
			if meta.IsStatusConditionTrue(reservation.Status.Conditions, broker.ConditionQueued) {
				r.note(r.gather(reservation.DeepCopy(), r.store.Settings(), false))
			}
		}
	})
	return true
}
