package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/simulation/stepwise"
)

// action is one thing that users or the environment do in a schedule.
type action string

const (
	actRequest     action = "request"
	actResize      action = "resize"
	actDelete      action = "delete"
	actReplace     action = "delete and create again"
	actDeleteInHub action = "delete in the hub"
	actLocalPod    action = "local pod"
	actLocalGone   action = "local pod ends"
	actKillBroker  action = "kill broker"
	actSecond      action = "second leader"
	actKillAgent   action = "kill agent"
	actDeafAgent   action = "deaf agent"
	actCut         action = "cut from the hub"
	actHeal        action = "reconnect"
	actCutStreams  action = "streams end"
	actReplay      action = "message arrives again"
	actClock       action = "clock is set"
	actStale       action = "stale cache"
	actCallFault   action = "next call"
	actBackup      action = "backup of the hub"
	actRestore     action = "hub restored from the backup"
	actForget      action = "cluster is forgotten"
	// These are made only by directed schedules.
	actLate       action = "leader is stopped while it writes a ledger"
	actStaleKind  action = "a broker hears of no Reservations"
	actLagging    action = "a broker's watches lag behind"
	actSlow       action = "a broker reconciles no Reservations"
	actSlowGuests action = "guests stop slowly"
	actNoGuests   action = "guests do not start"
	actReplayAcks action = "answers arrive again"
	actLoseAck    action = "next answer is lost"
	actRefuse     action = "provider refuses from now on"
	actGone       action = "cluster is gone for good"
	actCordon     action = "a node is cordoned"
	actUnaware    action = "a broker hears of no registrations"
	actUncordon   action = "all nodes are uncordoned"
)

// callFault is what happens to a call.
type callFault string

const (
	faultRefuse    callFault = "is lost"
	faultLoseReply callFault = "loses its reply"
	faultKillFirst callFault = "is preceded by a crash"
	faultKillAfter callFault = "is followed by a crash"
)

// event is an action at one step of a schedule.
type event struct {
	step   int
	action action
	// a, b and c select among what the action applies to.
	a, b, c int
}

func (e event) String() string {
	return fmt.Sprintf("at step %d: %s (%d, %d, %d)", e.step, e.action, e.a, e.b, e.c)
}

// schedule is what is random in a run besides the order of its steps.
type schedule struct {
	seed   uint64
	events []event
	// lending is each cluster's capacity in CPUs.
	lending []int64
	// deaf is the cluster whose agent never decides on a hold, or -1.
	deaf int
}

// weights of the actions in a schedule.
var weights = []struct {
	action action
	weight int
}{
	{actRequest, 16}, {actResize, 8}, {actDelete, 6}, {actReplace, 4}, {actDeleteInHub, 3}, {actLocalPod, 2}, {actLocalGone, 2},
	{actKillBroker, 4}, {actSecond, 4}, {actKillAgent, 4}, {actDeafAgent, 1}, {actCut, 3}, {actHeal, 3}, {actCutStreams, 2},
	{actReplay, 10}, {actClock, 3}, {actStale, 5}, {actCallFault, 16},
}

// newSchedule returns the schedule of a seed.
func newSchedule(seed uint64) schedule {
	rng := rand.New(rand.NewPCG(seed, 2))
	s := schedule{seed: seed, deaf: -1}
	for range 3 {
		s.lending = append(s.lending, []int64{0, 2, 2, 4}[rng.IntN(4)])
	}
	if s.lending[1] == 0 {
		s.lending[1] = 4
	}
	if rng.IntN(10) == 0 {
		s.deaf = rng.IntN(3)
	}
	total := 0
	for _, w := range weights {
		total += w.weight
	}
	add := func(step int, a action) {
		s.events = append(s.events, event{step: step, action: a, a: rng.IntN(1 << 16), b: rng.IntN(1 << 16), c: rng.IntN(1 << 16)})
	}
	step := 40
	for range 8 + rng.IntN(16) {
		pick := rng.IntN(total)
		for _, w := range weights {
			if pick -= w.weight; pick < 0 {
				add(step, w.action)
				break
			}
		}
		step += rng.IntN(36)
	}
	if rng.IntN(12) == 0 {
		add(step/2, actBackup)
		add(step, actRestore)
	}
	if rng.IntN(12) == 0 {
		s.insert(event{step: step * 2 / 3, action: actForget, a: rng.IntN(len(s.lending))})
	}
	switch {
	case seed%directedEvery == 0:
		s.direct(rng, scenarios[int(seed/directedEvery)%len(scenarios)])
	case seed%longEvery == longEvery-1:
		s.direct(rng, longScenarios[int(seed/longEvery)%len(longScenarios)])
	}
	return s
}

// insert adds an event before those of later steps.
func (s *schedule) insert(e event) {
	at := slices.IndexFunc(s.events, func(other event) bool { return other.step > e.step })
	if at < 0 {
		at = len(s.events)
	}
	s.events = slices.Insert(s.events, at, e)
}

// apply does what an event says.
func (w *world) apply(e event) {
	w.record(e.String())
	w.allow()
	c, b := w.clusters[e.a%len(w.clusters)], w.brokers[e.a%len(w.brokers)]
	switch e.action {
	case actRequest, actResize, actDelete, actReplace, actDeleteInHub:
		w.applyWorkload(e, c)
	case actLocalPod:
		if node := c.freeNode(); node != "" {
			c.addPod(node, nil)
		}
	case actLocalGone:
		if pods := c.localPods(); len(pods) > 0 {
			must(c.client.Delete(context.Background(), pods[0]))
		}
	case actKillBroker:
		w.fail(b)
	case actSecond:
		if leaders := w.leaders(); len(leaders) == 1 && w.former == nil {
			w.former, w.secondAt = leaders[0], time.Now()
		}
		for _, other := range w.brokers {
			if other.program == nil {
				w.startBroker(other)
			}
			other.program.Lead()
		}
		w.flip = e.b
	case actKillAgent:
		w.stopAgent(c)
		w.startAgent(c)
	case actDeafAgent:
		c.deaf = true
		w.stopAgent(c)
		w.startAgent(c)
	case actCut:
		c.cut = true
	case actHeal:
		c.cut = c.gone
	case actCutStreams:
		w.cutStreams(c)
	case actReplay:
		w.replay(e.b)
	case actClock:
		ahead := time.Duration(e.c%5-2) * time.Hour
		if e.b%3 == 0 {
			c.clock.Set(ahead)
			w.clocksSet = true
		} else {
			b.clock.Set(ahead)
		}
	case actStale:
		programs := w.programs()
		w.frozen[programs[e.a%len(programs)].Name+" watch "] = w.steps + 20 + e.b%80
	case actCallFault:
		programs := w.programs()
		faults := []callFault{faultRefuse, faultLoseReply, faultLoseReply, faultKillFirst, faultKillAfter, faultKillAfter}
		w.armed = append(w.armed, armed{program: programs[e.a%len(programs)].Name, writes: e.b%4 > 0, action: faults[e.c%len(faults)]})
	case actLate:
		if leaders := w.leaders(); len(leaders) == 1 && w.late == nil {
			w.late = &lateWrite{broker: leaders[0], steps: 60 + e.b%200}
		}
	case actStaleKind:
		w.frozen[b.name+" watch Reservation"] = w.steps + 60 + e.b%100
	case actLagging:
		w.frozen[b.name+" watch "] = w.steps + 60 + e.b%200
	case actSlow:
		w.frozen[b.name+" reservations takes "] = w.steps + 60 + e.b%200
	case actSlowGuests:
		w.frozen[c.id+" stops guest"] = w.steps + 100 + e.b%200
	case actNoGuests:
		w.frozen[c.id+" starts a guest"] = w.steps + 1000
	case actReplayAcks:
		w.replayAcks()
	case actRefuse:
		w.refuses = c.id
	case actLoseAck:
		w.losesAck = c.id
	case actGone:
		c.gone, c.cut = true, true
		w.stopAgent(c)
	case actForget:
		w.forget(c)
	case actUnaware:
		w.frozen[b.name+" watch ClusterRegistration"] = w.steps + 60 + e.b%200
	case actCordon:
		w.cordoned = true
		c.cordon(1, true)
	case actUncordon:
		c.cordon(len(c.nodes()), false)
	case actBackup:
		w.backup = w.hub.Backup()
	case actRestore:
		w.restore()
	}
}

// forget deletes a cluster's registration, as the hub's administrator does.
func (w *world) forget(c *cluster) {
	registration := &broker.ClusterRegistration{}
	registration.Namespace, registration.Name = namespace, c.id
	must(client.IgnoreNotFound(w.client.Delete(context.Background(), registration)))
	c.forgotten = true
	c.model = modelCache{}
}

// fail kills a broker; the other one takes over, and it comes back as a standby.
func (w *world) fail(b *brokerProcess) {
	w.stopBroker(b)
	w.startBroker(b)
	if len(w.leaders()) == 0 {
		for _, other := range w.brokers {
			if other != b {
				other.program.Lead()
			}
		}
	}
}

func (w *world) cutStreams(c *cluster) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range w.streams {
		if s.cluster == c {
			s.cancel()
		}
	}
}

// replay makes an earlier message arrive once more.
func (w *world) replay(which int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.sent) == 0 {
		return
	}
	m := w.sent[which%len(w.sent)]
	w.record("again: " + m.String())
	go func() { _, _ = w.deliver(m) }()
}

// replayAcks makes the providers' last answers arrive once more.
func (w *world) replayAcks() {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := 0
	for _, m := range slices.Backward(w.sent) {
		if isAck(m) && n < 4 {
			n++
			w.record("again: " + m.String())
			go func() { _, _ = w.deliver(m) }()
		}
	}
}

func isAck(m message) bool { return strings.HasSuffix(m.target, "/ack?role=provider") }

// restore returns the hub to its backup. Its programs start again, since their watches
// end.
func (w *world) restore() {
	if w.backup == nil {
		return
	}
	for _, b := range w.brokers {
		w.stopBroker(b)
	}
	w.hub.Restore(w.backup)
	w.restored = true
	for _, c := range w.clusters {
		c.restored = w.account(c).charged
		known, err := registered(context.Background(), w.client, c.id)
		must(err)
		c.forgotten, c.model = !known, modelCache{}
	}
	for _, b := range w.brokers {
		w.startBroker(b)
	}
	w.brokers[0].program.Lead()
}

// decide lets a call go on, unless a fault waits for it.
func (w *world) decide(call *stepwise.Call) {
	if w.late.takes(call) {
		w.delay(call)
		return
	}
	if w.losesAck != "" && call.Program == "agent-"+w.losesAck && strings.HasSuffix(call.What, "/ack?role=provider") {
		w.losesAck = ""
		w.record("which is lost")
		w.gate.Decide(call, stepwise.Refuse)
		return
	}
	at := -1
	for i, fault := range w.armed {
		if fault.program == call.Program && (call.Write || !fault.writes) {
			at = i
			break
		}
	}
	if at < 0 {
		w.gate.Decide(call, stepwise.Proceed)
		return
	}
	fault := w.armed[at]
	w.armed = append(w.armed[:at:at], w.armed[at+1:]...)
	w.record("which " + string(fault.action))
	switch fault.action {
	case faultRefuse:
		w.gate.Decide(call, stepwise.Refuse)
	case faultLoseReply:
		w.gate.Decide(call, stepwise.LoseReply)
	case faultKillFirst:
		w.crash(call.Program)
	case faultKillAfter:
		w.gate.Decide(call, stepwise.LoseReply)
		w.settle()
		w.crash(call.Program)
	}
}

// crash kills a program by its name, and starts it again.
func (w *world) crash(name string) {
	for _, b := range w.brokers {
		if b.name == name {
			w.fail(b)
		}
	}
	for _, c := range w.clusters {
		if c.program != nil && c.program.Name == name {
			w.stopAgent(c)
			w.startAgent(c)
		}
	}
}

// applyWorkload does what users do.
func (w *world) applyWorkload(e event, c *cluster) {
	ctx := context.Background()
	if e.action == actDeleteInHub {
		var list broker.ReservationList
		must(w.client.List(ctx, &list))
		if n := len(list.Items); n > 0 {
			must(w.client.Delete(ctx, &list.Items[e.b%n]))
		}
		return
	}
	var list broker.ReservationList
	must(c.client.List(ctx, &list, client.InNamespace(workloads)))
	if e.action == actRequest || len(list.Items) == 0 {
		w.names++
		w.request(c, fmt.Sprintf("r%d", w.names), int32(1+e.b%4), e.c)
		return
	}
	r := &list.Items[e.b%len(list.Items)]
	switch e.action {
	case actResize:
		if r.DeletionTimestamp == nil {
			r.Spec.PodSets[0].Count = int32(e.c % 5)
			must(c.client.Update(ctx, r))
		}
	case actDelete:
		must(client.IgnoreNotFound(c.client.Delete(ctx, r)))
	case actReplace:
		must(client.IgnoreNotFound(c.client.Delete(ctx, r)))
		w.request(c, r.Name, int32(1+e.c%4), e.c)
	}
}

// request creates a Reservation of pods of one CPU. One that is still being deleted
// keeps its name.
func (w *world) request(c *cluster, name string, count int32, variant int) {
	r := &broker.Reservation{
		ObjectMeta: metav1.ObjectMeta{Namespace: workloads, Name: name},
		Spec: broker.ReservationSpec{PodSets: []broker.PodSet{{
			Name: "pods", Count: count, Requests: broker.ResourceQuantities{CPU: resource.NewQuantity(1, resource.DecimalSI)},
		}}},
	}
	if variant/8%4 == 3 {
		r.Spec.Priority = 10
	}
	if variant/32%4 == 3 {
		r.Spec.MinAvailable = count
	}
	if variant/128%16 == 15 {
		r.Spec.Placement = &broker.Placement{Spread: &broker.Spread{Over: broker.SpreadOverCluster, MaxSkew: 1}}
	}
	if variant%6 == 0 {
		r.Spec.Duration = &metav1.Duration{Duration: 10 * time.Minute}
	}
	if err := c.client.Create(context.Background(), r); !apierrors.IsAlreadyExists(err) {
		must(err)
	}
}
