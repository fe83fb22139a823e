package main

import (
	"time"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// The hub's writes that a schedule may cause.
const (
	// writesPerReservation are for each Reservation in the hub, at each event: it may be
	// placed, granted, used and released because of it. writesPerEvent are for what is
	// there besides.
	writesPerReservation, writesPerEvent = 3, 3
	// writesPerMinute are for each cluster and Reservation: an advertisement takes two.
	writesPerMinute = 4
)

// budget is the number of writes of the hub that the events so far, and the time,
// account for.
type budget struct {
	writes float64
}

// allow adds what one event may cause. The Reservations that it concerns are those that
// are in the hub by now, and one that it may create.
func (w *world) allow() {
	w.budget.writes += writesPerEvent + writesPerReservation*float64(1+w.inHub())
}

// allowFor adds what may be written in a time without events.
func (w *world) allowFor(duration time.Duration) {
	perMinute := writesPerMinute * float64(len(w.clusters)+w.inHub())
	if len(w.leaders()) > 1 {
		// What one writes, the other one answers.
		perMinute *= 2
	}
	w.budget.writes += perMinute * duration.Minutes()
}

func (w *world) inHub() int { return w.hub.Count(&broker.Reservation{}) }

// checkWrites checks that the hub's writes are within the budget, at any time.
func (i *invariants) checkWrites(w *world) {
	writes := total(w.hub.Writes())
	if float64(writes) > w.budget.writes {
		i.fail(invariantWrites, "%d writes, and the events so far account for %.0f: %v", writes, w.budget.writes, w.hub.Writes())
	}
}
