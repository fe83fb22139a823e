package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"testing/synctest"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

const (
	// answerWithin is how long after the last fault every request must have its answer, and
	// how long after its deletion everything must be gone. leaseOfSilent is how much longer
	// what a cluster that is gone has reserved may be held.
	answerWithin  = 12 * time.Minute
	leaseOfSilent = time.Hour
	// restSteps is how many steps may pass in that time.
	restSteps = 6000
	// quietFor is how long the writes and the steps of programs are counted once all is answered,
	// maxQuiet and maxQuietSteps how many there may be, and writesPerUseless and stepsPerUseless
	// how many more for each grant that no pod can use: it is given back, and another Reservation
	// gets it.
	quietFor         = time.Minute
	maxQuiet         = 18
	maxQuietSteps    = 200
	writesPerUseless = 12
	stepsPerUseless  = 120
)

// result of one schedule.
type result struct {
	violation *violation
	steps     int
	// digest is the same for the same sequence of steps.
	digest uint64
}

// run runs a schedule in a bubble of testing/synctest.
func run(s schedule, p plant, verbose func(string)) (r result) {
	w := newWorld(s.seed, p, s.lending)
	w.verbose = verbose
	defer func() {
		r = result{violation: w.checks.found, steps: w.steps, digest: w.digest}
		w.stop()
		// What sleeps between two tries of a call ends too.
		time.Sleep(time.Minute)
		synctest.Wait()
	}()
	if s.deaf >= 0 {
		w.clusters[s.deaf].deaf = true
	}
	for _, b := range w.brokers {
		w.startBroker(b)
	}
	w.brokers[0].program.Lead()
	for _, c := range w.clusters {
		w.startAgent(c)
	}
	events := slices.Clone(s.events)
	for len(events) > 0 && w.checks.found == nil {
		w.step()
		for len(events) > 0 && events[0].step <= w.steps {
			w.apply(events[0])
			// What the event has begun must not depend on how quick the next one is.
			w.settle()
			events = events[1:]
		}
	}
	for range 40 {
		w.step()
	}
	w.rest(s)
	return r
}

// settle waits until all programs wait.
func (w *world) settle() { synctest.Wait() }

// rest ends all faults and checks what must then come true.
func (w *world) rest(s schedule) {
	w.record("faults end")
	w.armed, w.frozen, w.losesAck = nil, map[string]int{}, ""
	w.endLate()
	w.fail(w.brokers[1])
	for n, c := range w.clusters {
		c.cordon(len(c.nodes()), false)
		c.cut = c.gone
		if c.program == nil || c.deaf && n != s.deaf {
			c.deaf = n == s.deaf
			w.stopAgent(c)
			w.startAgent(c)
		}
	}
	// At once, the agents have what the broker has not said yet.
	w.until(15*time.Second, nil)
	w.until(answerWithin, func() bool { return w.unanswered() == "" })
	w.until(quietFor, nil)
	// By now, the broker has learned what providers gave up.
	w.resting = true
	before, steps, useless := total(w.hub.Writes()), w.acts, w.useless
	w.until(quietFor, nil)
	if w.checks.found != nil {
		return
	}
	writes, steps, useless := total(w.hub.Writes())-before, w.acts-steps, w.useless-useless
	if writes > maxQuiet+useless*writesPerUseless {
		w.checks.fail(invariantWrites, "%d writes in %s with %d useless grants and no other event: %v", writes, quietFor, useless, w.hub.Writes())
	}
	if steps > maxQuietSteps+useless*stepsPerUseless {
		w.checks.fail(invariantSettle, "%d steps in %s with %d useless grants and no other event", steps, quietFor, useless)
	}
	w.record(fmt.Sprintf("quiet: %d writes, %d steps, %d useless grants", writes, steps, useless))
	// A provider that does not answer may just be asked again.
	w.until(answerWithin/4, func() bool { return w.unanswered() == "" })
	if why := w.unanswered(); why != "" {
		w.checks.fail(invariantAnswer, "%s", why)
	}
	if what := w.deleting(); what != "" {
		w.checks.fail(invariantEnd, "%s", what)
	}
	within := time.Duration(answerWithin)
	if slices.ContainsFunc(w.clusters, func(c *cluster) bool { return c.gone }) {
		// What the others wait for is free when the lease of one that is gone ends.
		within += leaseOfSilent
	}
	w.until(within, func() bool { return w.idle() == "" })
	if what := w.idle(); what != "" {
		w.checks.fail(invariantProgress, "%s", what)
	}
	w.until(within, func() bool { return w.partOfGang() == "" })
	if what := w.partOfGang(); what != "" {
		w.checks.fail(invariantGang, "%s", what)
	}
	w.until(within, func() bool { return w.ofForgotten() == "" })
	if what := w.ofForgotten(); what != "" {
		w.checks.fail(invariantForgotten, "%s", what)
	}
	w.deleteAll()
	w.until(within, func() bool { return w.left() == "" })
	if what := w.left(); what != "" {
		w.checks.fail(invariantEnd, "%s", what)
	}
}

func total(writes map[string]int) (n int) {
	for _, key := range slices.Sorted(maps.Keys(writes)) {
		n += writes[key]
	}
	return n
}

// until runs until something is true, a time has passed, or an invariant is violated.
func (w *world) until(duration time.Duration, is func() bool) {
	end := time.Now().Add(duration)
	limit := w.steps + restSteps
	for now := time.Now(); now.Before(end) && w.checks.found == nil; {
		if w.steps > limit {
			w.checks.fail(invariantSettle, "%d steps in %s", restSteps, duration-time.Until(end))
		}
		w.step()
		if later := time.Now(); later.After(now) {
			if now = later; is != nil && is() {
				return
			}
		}
	}
}

func (w *world) deleteAll() {
	w.record("all Reservations are deleted")
	for _, c := range w.clusters {
		var list broker.ReservationList
		must(c.client.List(context.Background(), &list, client.InNamespace(workloads)))
		for i := range list.Items {
			must(client.IgnoreNotFound(c.client.Delete(context.Background(), &list.Items[i])))
		}
	}
}

// shrink leaves out the events without which a schedule still violates the same
// invariant.
func shrink(s schedule, violates func(schedule) bool) schedule {
	for size := max(len(s.events)/2, 1); size > 0; size /= 2 {
		for at := 0; at+size <= len(s.events); {
			smaller := s
			smaller.events = slices.Concat(s.events[:at], s.events[at+size:])
			if violates(smaller) {
				s = smaller
			} else {
				at += size
			}
		}
	}
	return s
}

func (s schedule) String() string {
	text := fmt.Sprintf("seed %d, lending %v, deaf %d", s.seed, s.lending, s.deaf)
	for _, e := range s.events {
		text += "\n  " + e.String()
	}
	return text
}
