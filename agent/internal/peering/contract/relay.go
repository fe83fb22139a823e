package contract

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/e2e/expect"
)

const (
	// UnreachableAfter is an option for both sides that no slow machine reaches: time
	// passes quickly for a side whose messages are lost.
	UnreachableAfter = 2 * time.Minute
	lostMessageTakes = 10 * time.Second
)

// Paris is the provider of a Relay; its consumer is rome.
var Paris = peering.Peer{ClusterID: "paris"}

// Relay is the part of an Environment that does not depend on the driver: it sends the
// messages of rome's Driver to paris's Provider and the replies back.
type Relay[D interface {
	peering.Driver
	peering.Receiver
}, P peering.Provider] struct {
	t                                       testing.TB
	disconnected, dropEverySecond, holdsNot atomic.Bool
	sent                                    atomic.Int64
	handling                                sync.WaitGroup
	// Clock is for both sides.
	Clock Clock

	mu       sync.Mutex
	driver   D
	provider P
}

// Start waits for messages that are being handled and runs the two sides from now on.
func (r *Relay[D, P]) Start(t testing.TB, driver D, provider P) {
	r.handling.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.t, r.driver, r.provider = t, driver, provider
}

// Sides are the two sides as they run now.
func (r *Relay[D, P]) Sides() (D, P) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.driver, r.provider
}

// Consumer implements Environment, as do the methods up to PassTime.
func (r *Relay[D, P]) Consumer() string               { return "rome" }
func (r *Relay[D, P]) Provider() peering.Peer         { return Paris }
func (r *Relay[D, P]) Driver() peering.Driver         { driver, _ := r.Sides(); return driver }
func (r *Relay[D, P]) ProviderSide() peering.Provider { _, provider := r.Sides(); return provider }
func (r *Relay[D, P]) Namespaces() [2]string          { return [2]string{"shop", "tools"} }
func (r *Relay[D, P]) DropEverySecond(drop bool)      { r.dropEverySecond.Store(drop) }
func (r *Relay[D, P]) Disconnect(disconnect bool)     { r.disconnected.Store(disconnect) }
func (r *Relay[D, P]) PassTime(d time.Duration)       { r.Clock.Advance(d) }

// SetHolds sets whether rome holds capacity in paris, as it does at first.
func (r *Relay[D, P]) SetHolds(holds bool) { r.holdsNot.Store(!holds) }

// Sent is the number of messages that rome has sent, including lost ones.
func (r *Relay[D, P]) Sent() int64 { return r.sent.Load() }

// Send implements peering.Messenger.
func (r *Relay[D, P]) Send(ctx context.Context, _ peering.Peer, raw []byte) error {
	n := r.sent.Add(1)
	if r.disconnected.Load() {
		r.Clock.Advance(lostMessageTakes)
		return nil
	}
	if r.dropEverySecond.Load() && n%2 == 1 {
		return nil
	}
	r.handling.Go(func() {
		reply, err := r.ProviderSide().Handle(context.WithoutCancel(ctx), peering.Peer{ClusterID: "rome", Holds: !r.holdsNot.Load()}, raw)
		if err != nil {
			r.t.Logf("handling a message: %v", err)
		}
		if reply != nil {
			r.Reply(reply)
		}
	})
	return nil
}

// Reply delivers a message of paris to rome.
func (r *Relay[D, P]) Reply(raw []byte) {
	driver, _ := r.Sides()
	driver.Receive("paris", raw)
}

// Repeat runs step in the background until the test ends; messages that are being
// handled then end first.
func (r *Relay[D, P]) Repeat(t testing.TB, step func(context.Context)) {
	ctx, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { wait.UntilWithContext(ctx, step, 20*time.Millisecond) })
	t.Cleanup(func() { stop(); running.Wait(); r.handling.Wait() })
}

// Until repeats a step until its progress has the reason.
func Until(t testing.TB, reason string, step func() (peering.Progress, error)) (progress peering.Progress) {
	t.Helper()
	expect.Eventually(t, reason, func() (bool, string) {
		var err error
		if progress, err = step(); err != nil {
			return false, err.Error()
		}
		return progress.Reason == reason, progress.Reason + ": " + progress.Message
	})
	return progress
}

// Clock is the real clock with an offset. Its zero value has none.
type Clock struct {
	mu     sync.Mutex
	offset time.Duration
}

// Now implements clock.PassiveClock, as does Since.
func (c *Clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Now().Add(c.offset)
}

func (c *Clock) Since(t time.Time) time.Duration { return c.Now().Sub(t) }

// Advance changes the offset.
func (c *Clock) Advance(by time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.offset += by
}
