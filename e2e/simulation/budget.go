package main

import (
	"math"
	"time"

	"k8s.io/apimachinery/pkg/types"

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

// halfLife is how long it takes until half of what is not written is not allowed any more:
// what was allowed for an event, or while nothing happened, is no reserve for later.
const halfLife = 2 * time.Minute

// budget is the number of writes of the hub that the last events, and the time, account
// for.
type budget struct {
	left float64
	// counted are the writes that were taken from it.
	counted int
}

// allow adds what one event may cause. The Reservations that it concerns are those that
// are in the hub by now, and one that it may create.
func (w *world) allow() {
	w.budget.left += writesPerEvent + writesPerReservation*float64(1+w.inHub())
	w.checks.returns = map[types.UID]int{}
}

// allowFor adds what may be written in a time without events.
func (w *world) allowFor(duration time.Duration) {
	perMinute := writesPerMinute * float64(len(w.clusters)+w.inHub())
	if len(w.leaders()) > 1 {
		// What one writes, the other one answers.
		perMinute *= 2
	}
	w.budget.left *= math.Exp2(-duration.Seconds() / halfLife.Seconds())
	w.budget.left += perMinute * duration.Minutes()
}

func (w *world) inHub() int { return w.hub.Count(&broker.Reservation{}) }

// checkWrites checks that the hub's writes are within the budget, at any time.
func (i *invariants) checkWrites(w *world) {
	writes := total(w.hub.Writes())
	w.budget.left -= float64(writes - w.budget.counted)
	w.budget.counted = writes
	if w.budget.left < 0 {
		i.fail(invariantWrites, "%d writes more than the last events account for: %v", int(math.Ceil(-w.budget.left)), w.hub.Writes())
	}
}
