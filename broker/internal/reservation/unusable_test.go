package reservation_test

import (
	"fmt"
	"time"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/answers"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// cannotUse reports, as the consumer, that no pod can use what a cluster has granted.
func (p *process) cannotUse(name, cluster, why string) {
	p.Helper()
	r := p.get(name)
	ack := protocol.RequesterAck{ReservationUID: r.UID, Attempt: r.Status.Attempt.Number, Unusable: map[string]string{cluster: why, "elsewhere": "it has no hold"}}
	expect.NoError(p, p.ApplyRequesterAck(p.Context(), "rome", name, ack))
}

// expectAccepted waits until the status has one allocation, which the cluster has accepted.
func (e *env) expectAccepted(name, cluster string) {
	e.Helper()
	e.eventually(cluster+" to have accepted "+name, func() error {
		if all := e.get(name).Status.Allocations; len(all) != 1 || all[0].Cluster != cluster || !all[0].Accepted {
			return fmt.Errorf("allocations %+v", all)
		}
		return nil
	})
}

// unusable: what the consumer cannot use is released and placed elsewhere, for that
// Reservation only. Without another provider it waits, with the consumer's words, and the
// provider is asked again after a delay that grows.
func unusable(e *env) {
	p := e.start(nil)
	p.advertise(p.spec("paris", "10"))
	e.request("r", 2)
	e.expectPods("paris", "r", 2, 0, 0)
	e.expect("r", broker.ReservationReserved, "2 of 2 pods in paris")
	p.cannotUse("r", "paris", "it is not accepted yet")
	p.answer("paris", "r", true, "")
	e.expectAccepted("r", "paris")
	e.expectPods("paris", "r", 2, 0, 2)
	p.cannotUse("r", "paris", "namespace shop-rome exists there")
	e.expectPods("paris", "r", 0, 2, 0)
	e.expectRejection("r", "paris", answers.ReasonUnusable, `namespace shop-rome exists there`)
	if r := e.get("r"); len(r.Status.Allocations) > 0 || r.Status.Phase != broker.ReservationPending {
		e.Errorf("its status still grants what was released: %+v", r.Status)
	}
	p.answer("paris", "r", true, "") // the release
	e.expectPods("paris", "r", 0, 0, 0)

	// Others of the same shape are placed there.
	e.request("s", 2)
	e.expectPods("paris", "s", 2, 0, 0)

	var tries []time.Duration
	for _, delay := range []time.Duration{30 * time.Second, time.Minute} {
		began := e.clock.Now()
		e.eventually("another try in paris", func() error {
			if promised, _, _ := pods(e.hold("paris", "r")); promised == 2 {
				return nil
			}
			e.clock.Step(5 * time.Second)
			p.advertise(p.spec("paris", "10"))
			e.touch("r")
			return fmt.Errorf("not asked after %s", e.clock.Since(began))
		})
		if tries = append(tries, e.clock.Since(began)); tries[len(tries)-1] < delay {
			e.Errorf("asked again after %s, want at least %s each", tries, delay)
		}
		p.answer("paris", "r", true, "")
		e.expectAccepted("r", "paris")
		p.cannotUse("r", "paris", "namespace shop-rome exists there")
		e.expectPods("paris", "r", 0, 2, 0)
		p.answer("paris", "r", true, "")
		e.expectPods("paris", "r", 0, 0, 0)
	}

	p.advertise(p.spec("berlin", "10"))
	e.touch("r")
	e.expectPods("berlin", "r", 2, 0, 0)
}

// unusableMoves: another provider gets what the consumer cannot use, in one attempt.
func unusableMoves(e *env) {
	p := e.start(nil)
	p.advertise(p.spec("paris", "10"))
	e.request("r", 2)
	e.expectPods("paris", "r", 2, 0, 0)
	p.answer("paris", "r", true, "")
	e.expectAccepted("r", "paris")
	p.advertise(p.spec("berlin", "10"))
	p.cannotUse("r", "paris", "namespace shop-rome exists there")
	e.expectPods("berlin", "r", 2, 0, 0)
	e.expectPods("paris", "r", 0, 2, 0)
	p.answer("berlin", "r", true, "")
	e.expectAccepted("r", "berlin")
	if n := e.audit.count("Released capacity", "paris", "PlacementChanged"); n != 1 {
		e.Errorf("%d lines of the audit log about it: %s", n, &e.audit)
	}
	p.use("r", "berlin")
	e.expect("r", broker.ReservationActive, "2 of 2 pods in berlin")
}
