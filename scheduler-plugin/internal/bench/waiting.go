package main

import (
	"context"
	"time"

	"github.com/spillway-dev/spillway/e2e/bench/figures"
)

// waitingGrantAfter is longer than the plugin holds a pod that was not tried: each is tried,
// finds no place, and says so. It is shorter than pods wait before they have an event of the
// request.
const waitingGrantAfter = 5 * time.Second

// waiting counts what pods cost that wait for their first grant, as for a peering that does not
// exist yet.
func waiting(ctx context.Context, h *home, o options) error {
	o = o.withDefaults(1000, 0)
	if err := h.fill(ctx, o.nodes); err != nil {
		return err
	}
	r, err := h.count(ctx, overflowing(o.pods), o.profile, h.play(waitingGrantAfter))
	if err != nil {
		return err
	}
	reportWaiting(lines, r)
	return nil
}

// reportWaiting prints what was counted. Beside its own five, a pod has its share of the writes
// of its request: the Reservation, and an event of one of a hundred pods.
func reportWaiting(lines *figures.Printer, r result) {
	lines.CountEach("writes_per_waiting_pod", r.writes, "writes", 5.1)
	lines.CountEach("attempts_per_waiting_pod", r.attempts, "attempts", 2.2)
}
