package direct

import (
	"fmt"
	"time"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// conversation is what was said to and by one provider.
type conversation struct {
	// ask is the number of the Hello that waits for its answer, 0 where none does;
	// asked is when it was last sent.
	ask   int64
	asked time.Time
	// answer is the last Grant or Refusal of it.
	answer message
	// otherDriver is that of a provider that could not read what it was sent.
	otherDriver string
	// ended is when a Teardown was last sent, gone the session whose end the
	// provider has confirmed.
	ended time.Time
	gone  int64
	// since is when something began to be waited for.
	since map[string]time.Time
}

// conversation with a provider; the caller holds the lock.
func (d *Driver) conversation(provider string) *conversation {
	c := d.conversations[provider]
	if c == nil {
		c = &conversation{since: map[string]time.Time{}}
		d.conversations[provider] = c
	}
	return c
}

// forget drops what was said to and by a provider.
func (d *Driver) forget(provider string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.conversations, provider)
	delete(d.leases, broker.VirtualNodeName(provider))
}

// waitedFor is how long something has been waited for, by this process.
func (d *Driver) waitedFor(provider, what string) time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	since := d.conversation(provider).since
	if since[what].IsZero() {
		since[what] = d.Clock.Now()
	}
	return d.Clock.Now().Sub(since[what])
}

// hear keeps an answer to what was asked, and nothing else: one that is repeated
// later has another number.
func (c *conversation) hear(m message) {
	switch {
	case m.Kind == kindGone:
		c.gone = m.Session
	case c.ask != 0 && m.Ask == c.ask:
		c.answer = m
	}
}

// due reports whether the provider is to be asked now. After a refusal it is
// asked again in time: what was wrong may be right by then.
func (c *conversation) due(now time.Time, resendAfter time.Duration) bool {
	patience := resendAfter
	if c.otherDriver != "" || c.answer.Kind == kindRefusal && !passes(c.answer.Reason) {
		patience = 5 * resendAfter
	}
	return c.asked.IsZero() || now.Sub(c.asked) >= patience
}

// said is the provider's no, nil where it has said none.
func (c *conversation) said(provider string) *peering.Progress {
	var progress peering.Progress
	switch {
	case c.otherDriver != "":
		progress = peering.Mismatched(provider, c.otherDriver, driverName)
	case c.answer.Kind == kindRefusal:
		progress = peering.Waiting("Refused", fmt.Sprintf("%s refused the link: %s: %s", provider, c.answer.Reason, c.answer.Text))
	default:
		return nil
	}
	return &progress
}
