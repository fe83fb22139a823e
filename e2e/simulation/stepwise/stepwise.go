// Package stepwise runs programs that are built with controller-runtime one step at a
// time: a Program is a manager.Manager whose calls to the API server, watch events and
// work queues wait until a scheduler lets them proceed. Programs run in a bubble of
// testing/synctest, so the scheduler knows when all of them wait.
package stepwise

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
)

// Outcome is what happens to a call that waits at the gate.
type Outcome int

// Outcomes of a call.
const (
	// Proceed performs the call.
	Proceed Outcome = iota
	// Refuse fails the call without performing it.
	Refuse
	// LoseReply performs the call and fails it.
	LoseReply
)

// ErrUnavailable is the result of a call that is refused, or whose reply is lost.
var ErrUnavailable = errors.New("the connection was lost")

// Call is a call that waits at the gate.
type Call struct {
	// Program that makes the call, and what it calls.
	Program, What string
	// Write is whether the call changes anything.
	Write bool

	order   int
	program *Program
	decided chan Outcome
}

// Gate is where all calls wait for the scheduler.
type Gate struct {
	mu      sync.Mutex
	order   int
	waiting []*Call
}

// Enter waits until the scheduler decides on a call. The calls of a program that was
// killed are refused.
func (g *Gate) Enter(p *Program, what string, write bool) Outcome {
	g.mu.Lock()
	if p.killed {
		g.mu.Unlock()
		return Refuse
	}
	g.order++
	call := &Call{Program: p.Name, What: what, Write: write, order: g.order, program: p, decided: make(chan Outcome, 1)}
	g.waiting = append(g.waiting, call)
	g.mu.Unlock()
	return <-call.decided
}

// Waiting lists the waiting calls in an order that depends on the calls only.
func (g *Gate) Waiting() []*Call {
	g.mu.Lock()
	defer g.mu.Unlock()
	out := slices.Clone(g.waiting)
	slices.SortStableFunc(out, func(a, b *Call) int {
		return cmp.Or(cmp.Compare(a.Program, b.Program), cmp.Compare(a.What, b.What), cmp.Compare(a.order, b.order))
	})
	return out
}

// Decide lets a call go on.
func (g *Gate) Decide(call *Call, outcome Outcome) {
	g.mu.Lock()
	g.waiting = slices.DeleteFunc(g.waiting, func(c *Call) bool { return c == call })
	g.mu.Unlock()
	call.decided <- outcome
}

// kill refuses all calls of a program from now on.
func (g *Gate) kill(p *Program) {
	g.mu.Lock()
	defer g.mu.Unlock()
	p.killed = true
	g.waiting = slices.DeleteFunc(g.waiting, func(call *Call) bool {
		if call.program == p {
			call.decided <- Refuse
			return true
		}
		return false
	})
}

// Step is something that may happen next in a Program.
type Step struct {
	// Name identifies the step among those that are possible.
	Name string
	Do   func()
}

// perform makes a call through the gate.
func (p *Program) perform(ctx context.Context, what string, write bool, do func() error) error {
	switch p.gate.Enter(p, what, write) {
	case Refuse:
		return fmt.Errorf("%s: %w", what, ErrUnavailable)
	case LoseReply:
		if err := do(); err != nil {
			return err
		}
		return fmt.Errorf("%s: reply: %w", what, ErrUnavailable)
	default:
		// The server does not know that the caller has given up.
		err := do()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return err
	}
}
