package main

import (
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/simulation/stepwise"
)

// directedEvery is the share of schedules with a directed part: one of so many.
const directedEvery = 2

// gang is the variant of a request that needs all its pods.
const gang = 97

// scenario is a sequence of actions that makes a situation likely which random actions
// seldom make.
type scenario struct {
	// lending is each cluster's capacity, only the second one's by default.
	lending []int64
	// alone leaves out the random actions that would follow.
	alone bool
	// actions, and the steps before each.
	actions []directed
}

// directed is an action after a number of steps. With cluster set, it applies to that
// one; c is the last argument of the event.
type directed struct {
	after   int
	action  action
	cluster int
	b, c    int
}

// scenarios are the directed parts of schedules. In most of them, one cluster provides for
// the others, so that what one loses another one gets.
var scenarios = []scenario{
	// A leader that is stopped while its write is on its way, and goes on when another one
	// has promised the same capacity.
	{actions: []directed{{20, actRequest, 0, 1, 1}, {30, actLate, 0, 100, 0}, {4, actRequest, 2, 1, 1}, {60, actRequest, 0, 1, 1}, {30, actRequest, 2, 1, 1}, {60, actRequest, 0, 1, 1}}},
	// The same while what it wrote is taken back.
	{actions: []directed{{20, actRequest, 0, 1, 1}, {60, actLate, 0, 60, 0}, {2, actResize, 0, 0, 1}, {40, actResize, 0, 0, 2}, {30, actRequest, 2, 1, 1}, {40, actResize, 0, 0, 1}, {30, actResize, 0, 0, 2}}},
	// A lease, and the leader's clock is set.
	{actions: []directed{{20, actRequest, 0, 0, 0}, {80, actClock, 0, 1, 4}, {2, actClock, 1, 1, 4}, {60, actLocalPod, 0, 0, 0}, {40, actClock, 0, 1, 3}, {2, actClock, 1, 1, 3}}},
	// A new leader that does not know a Reservation yet of which there is a hold.
	{actions: []directed{{20, actStaleKind, 1, 100, 0}, {4, actRequest, 0, 1, 1}, {60, actKillBroker, 0, 0, 0}, {60, actRequest, 2, 1, 1}}},
	// A Reservation with the name of an earlier one, whose answers arrive again.
	{actions: []directed{{20, actRequest, 0, 1, 1}, {60, actDeleteInHub, 0, 0, 0}, {40, actReplayAcks, 0, 0, 0}, {15, actReplayAcks, 0, 0, 0}, {15, actReplayAcks, 0, 0, 0}, {15, actReplayAcks, 0, 0, 0}}},
	// Capacity is released while guests still use it, and requested again.
	{actions: []directed{{20, actRequest, 0, 3, 1}, {120, actSlowGuests, 0, 100, 0}, {2, actDelete, 0, 0, 0}, {10, actRequest, 2, 3, 1}, {40, actRequest, 2, 3, 1}}},
	// An acceptance is lost, and the request grows meanwhile beyond what there is.
	{lending: []int64{0, 4, 0}, actions: []directed{{20, actLoseAck, 1, 0, 0}, {2, actRequest, 0, 1, 1}, {40, actLocalPod, 1, 0, 0}, {2, actResize, 0, 0, 4}, {30, actRequest, 2, 2, 1}, {40, actRequest, 2, 2, 1}}},
	// A provider that advertises room and refuses whatever it is asked for.
	{alone: true, actions: []directed{{40, actRefuse, 1, 0, 0}, {4, actRequest, 0, 1, 1}, {60, actLocalGone, 0, 0, 0}}},
	// A leader that is stopped while it shrinks a hold. When its write arrives, the
	// Reservation has grown back, so that the next leader had nothing to change, and its
	// provider was cut off, so that nothing else was written.
	{alone: true, lending: []int64{0, 2, 0}, actions: []directed{{20, actNoGuests, 0, 0, 0}, {2, actRequest, 0, 1, 1}, {140, actCut, 1, 0, 0}, {2, actSlow, 1, 50, 0}, {2, actLate, 0, 100, 0}, {2, actResize, 0, 0, 1}, {40, actResize, 0, 0, 2}, {100, actSlow, 1, 150, 0}, {4, actHeal, 1, 0, 0}, {90, actHeal, 1, 0, 0}}},
	// A new leader whose caches are behind: they have a hold that was released, and what
	// it held is promised to another Reservation.
	{alone: true, lending: []int64{0, 2, 0}, actions: []directed{{20, actRequest, 0, 1, 1}, {140, actLagging, 1, 140, 0}, {2, actDelete, 0, 0, 0}, {20, actRequest, 2, 1, 1}, {60, actKillAgent, 1, 0, 0}, {1, actKillBroker, 0, 0, 0}}},
	// Two brokers that hear different clusters, until one of them ends, again and again.
	{alone: true, lending: []int64{0, 2, 2}, actions: []directed{
		{20, actRequest, 0, 1, 1}, {60, actSecond, 0, 0, 0}, {200, actResize, 0, 0, 1}, {200, actResize, 0, 0, 2}, {200, actKillBroker, 0, 0, 0},
		{200, actSecond, 0, 1, 0}, {200, actResize, 0, 0, 1}, {200, actKillBroker, 1, 0, 0}, {1000, actCutStreams, 0, 0, 0},
	}},
}

// longEvery is the share of schedules with a scenario of those below: those of odd seeds
// that end with 9.
const longEvery = 10

// longScenarios are directed parts of fewer schedules.
var longScenarios = []scenario{
	// A hub that is restored from a backup of the time before a Reservation, which is in use.
	{alone: true, lending: []int64{0, 2, 0}, actions: []directed{{20, actBackup, 0, 0, 0}, {2, actRequest, 0, 1, 1}, {140, actRestore, 0, 0, 0}, {4, actRequest, 2, 1, 1}, {60, actRequest, 2, 0, 1}}},
	// From one of the time before it grew.
	{alone: true, lending: []int64{0, 2, 0}, actions: []directed{{20, actRequest, 0, 0, 1}, {100, actBackup, 0, 0, 0}, {2, actResize, 0, 0, 2}, {100, actRestore, 0, 0, 0}, {4, actRequest, 2, 0, 1}, {60, actRequest, 2, 0, 1}}},
	// From one of the time before it was deleted, and another one got what it held.
	{alone: true, lending: []int64{0, 2, 0}, actions: []directed{{20, actRequest, 0, 1, 1}, {100, actBackup, 0, 0, 0}, {2, actDelete, 0, 0, 0}, {40, actRequest, 2, 1, 1}, {100, actRestore, 0, 0, 0}, {4, actRequest, 2, 0, 1}}},
	// A consumer that is gone, without guests: its capacity is free again when the lease
	// ends.
	{alone: true, lending: []int64{0, 2, 0}, actions: []directed{{20, actNoGuests, 0, 0, 0}, {2, actRequest, 0, 1, 1}, {100, actGone, 0, 0, 0}, {20, actRequest, 2, 0, 1}}},
	// A second leader that sees a hold, and does not hear of its Reservation.
	{alone: true, lending: []int64{0, 0, 2}, actions: []directed{{60, actSecond, 0, 0, 0}, {40, actNoGuests, 0, 0, 0}, {0, actStaleKind, 1, 99, 0}, {0, actLagging, 1, 45, 0}, {2, actRequest, 0, 1, 1}, {64, actSlow, 0, 150, 0}, {100, actRequest, 1, 0, 1}}},
	// A provider whose own pods leave nothing, until they end.
	{alone: true, lending: []int64{0, 2, 0}, actions: []directed{{0, actLocalPod, 1, 0, 0}, {0, actLocalPod, 1, 0, 0}, {60, actRequest, 0, 1, 1}, {100, actLocalGone, 1, 0, 0}, {0, actLocalGone, 1, 0, 0}}},
	// A Reservation in use is deleted in the hub, and another consumer waits for its capacity.
	{alone: true, lending: []int64{0, 2, 0}, actions: []directed{{20, actRequest, 0, 1, 1}, {140, actDeleteInHub, 0, 0, 0}, {10, actRequest, 2, 1, 1}, {60, actSlowGuests, 2, 100, 0}, {40, actDeleteInHub, 0, 0, 0}}},
	// The same while its guests stop slowly, and its leader is stopped while it releases it.
	{alone: true, lending: []int64{0, 2, 0}, actions: []directed{{20, actRequest, 0, 1, 1}, {140, actSlowGuests, 0, 100, 0}, {0, actLate, 0, 100, 0}, {2, actDeleteInHub, 0, 0, 0}, {40, actRequest, 2, 1, 1}, {60, actKillBroker, 1, 0, 0}}},
	// A provider that withdraws a part, where no other has room; all programs start again
	// before the time to leave is over.
	{alone: true, lending: []int64{0, 4, 0}, actions: []directed{{20, actRequest, 0, 3, 1}, {160, actCordon, 1, 0, 0}, {60, actKillAgent, 0, 0, 0}, {0, actKillBroker, 0, 0, 0}, {60, actKillAgent, 1, 0, 0}}},
	// The same where another one has room for that part. The node is back after that time.
	{alone: true, lending: []int64{0, 4, 2}, actions: []directed{{20, actRequest, 0, 3, 1}, {160, actCordon, 1, 0, 0}, {40, actCutStreams, 0, 0, 0}, {900, actUncordon, 1, 0, 0}}},
	// A consumer that is forgotten: another one gets what it held.
	{alone: true, lending: []int64{0, 2, 0}, actions: []directed{{20, actRequest, 0, 1, 1}, {140, actForget, 0, 0, 0}, {20, actRequest, 2, 1, 1}}},
	// A provider that is forgotten: another one takes its place.
	{alone: true, lending: []int64{0, 2, 2}, actions: []directed{{20, actRequest, 0, 1, 1}, {140, actForget, 1, 0, 0}, {20, actRequest, 0, 1, 1}}},
	// A second leader that does not know yet that a cluster is forgotten, and serves it.
	{alone: true, lending: []int64{2, 2, 0}, actions: []directed{{20, actRequest, 0, 0, 1}, {100, actSecond, 0, 0, 0}, {0, actUnaware, 0, 199, 0}, {0, actForget, 0, 0, 0}, {60, actRequest, 0, 0, 1}, {60, actKillAgent, 0, 0, 0}}},
	// A large gang waits, and smaller requests come and go.
	{alone: true, lending: []int64{0, 4, 0}, actions: []directed{
		{20, actRequest, 0, 1, 1}, {20, actRequest, 2, 1, 1}, {60, actRequest, 0, 3, gang}, {60, actRequest, 2, 1, 1}, {40, actDelete, 2, 0, 0},
		{60, actRequest, 2, 1, 1}, {40, actDelete, 2, 0, 0}, {60, actRequest, 2, 1, 1}, {40, actDelete, 2, 0, 0}, {60, actRequest, 2, 1, 1}, {40, actDelete, 2, 0, 0},
		{60, actRequest, 2, 1, 1}, {40, actDelete, 2, 0, 0}, {60, actRequest, 2, 1, 1}, {40, actDelete, 2, 0, 0},
	}},
	// Two gangs need the same capacity, one of them that of two providers.
	{alone: true, lending: []int64{0, 2, 2}, actions: []directed{{20, actRequest, 0, 3, gang}, {2, actRequest, 1, 1, gang}, {140, actDelete, 0, 0, 0}}},
	// A provider that is gone: another one takes its place.
	{alone: true, lending: []int64{0, 2, 2}, actions: []directed{{20, actRequest, 0, 1, 1}, {100, actGone, 1, 0, 0}, {20, actRequest, 2, 0, 1}}},
	// A gang waits, and an earlier Reservation shrinks and grows again and again.
	{alone: true, lending: []int64{0, 4, 0}, actions: slices.Concat(
		[]directed{{20, actRequest, 0, 1, 1}, {20, actRequest, 2, 1, 1}, {60, actRequest, 2, 2, gang}},
		slices.Repeat([]directed{{150, actResize, 0, 0, 1}, {60, actResize, 0, 0, 2}}, 9),
		[]directed{{60, actDelete, 2, 0, 0}},
	)},
}

// direct replaces the first part of a schedule by a scenario.
func (s *schedule) direct(rng *rand.Rand, chosen scenario) {
	s.lending, s.deaf = []int64{0, []int64{2, 4}[rng.IntN(2)], 0}, -1
	if chosen.lending != nil {
		s.lending = slices.Clone(chosen.lending)
	}
	step := 20
	var events []event
	for _, d := range chosen.actions {
		step += d.after + rng.IntN(1+d.after/2)
		events = append(events, event{step: step, action: d.action, a: d.cluster, b: d.b, c: d.c})
	}
	for _, e := range s.events {
		if e.step > step && !chosen.alone {
			events = append(events, e)
		}
	}
	s.events = events
}

// refusing turns an acceptance of the provider that refuses into a refusal.
func (w *world) refusing(m message) message {
	if w.refuses != m.caller || !isAck(m) {
		return m
	}
	return onAck(func(hold *broker.Hold, ack *protocol.ProviderAck) {
		if !hold.Promised.Empty() {
			ack.Accepted, ack.Message = false, "The provider refuses everything."
		}
	})(w, m)
}

// lateWrite is a write of a ledger that is delayed on its way while its broker is stopped
// and another one leads.
type lateWrite struct {
	broker *brokerProcess
	// steps is for how long.
	steps int
	// call is the write, nil before there is one. It goes on at the step until; the broker
	// ends at the step end.
	call       *stepwise.Call
	until, end int
}

// takes reports whether a call is the write that waits to be delayed.
func (l *lateWrite) takes(call *stepwise.Call) bool {
	return l != nil && l.call == nil && call.Program == l.broker.name && strings.HasPrefix(call.What, "update status of ClusterAdvertisement ")
}

// stopped reports whether a program is stopped.
func (l *lateWrite) stopped(program *stepwise.Program) bool {
	return l != nil && l.call != nil && l.until > 0 && l.broker.program == program
}

// delay stops the broker that makes a call. The other one becomes the leader.
func (w *world) delay(call *stepwise.Call) {
	w.record("which is delayed, while " + call.Program + " is stopped")
	l := w.late
	l.call, l.until = call, w.steps+l.steps
	for _, b := range w.brokers {
		if b != l.broker {
			b.program.Lead()
		}
	}
	w.mu.Lock()
	streams := slices.Clone(w.streams)
	w.mu.Unlock()
	for _, s := range streams {
		s.cancel()
	}
	// The lease of the one that is stopped has ended.
	time.Sleep(5 * time.Second)
}

// advance lets a delayed write go on in time, and ends its broker some steps later.
func (w *world) advance() {
	l := w.late
	switch {
	case l == nil || l.call == nil:
	case l.until > 0 && w.steps >= l.until:
		w.record("the delayed write goes on")
		l.until, l.end = 0, w.steps+30
		w.gate.Decide(l.call, stepwise.Proceed)
		w.settle()
	case l.until == 0 && w.steps >= l.end:
		w.endLate()
	}
}

// endLate ends a broker that is no leader any more.
func (w *world) endLate() {
	if l := w.late; l != nil {
		w.late = nil
		if l.call != nil {
			w.record(l.broker.name + " notices that it does not lead")
			w.fail(l.broker)
		}
	}
}
