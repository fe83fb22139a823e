package session

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/spillway-dev/spillway/agent/internal/peering"
)

// refusedFactor is by how much a Hello's resend interval grows after a refusal
// that does not pass by itself.
const refusedFactor = 5

// noHoldFactor is by how much that interval shrinks while the provider knows of no hold: it
// may not have heard of it yet.
const noHoldFactor = 6

// Client is the consumer's end of the handshake with all providers: what was sent
// to and received from each, in memory. It is safe for concurrent use.
type Client[M Message] struct {
	codec   *Codec[M]
	options Options
	replies []Kind

	mu        sync.Mutex
	exchanges map[string]*Exchange[M]
}

// NewClient returns a Client that accepts the given kinds of replies.
func NewClient[M Message](codec *Codec[M], options Options, replies ...Kind) *Client[M] {
	return &Client[M]{codec: codec, options: options, replies: replies, exchanges: map[string]*Exchange[M]{}}
}

// Exchange is what was sent to and received from one provider.
type Exchange[M Message] struct {
	// Received is the last message of each kind. Messages are not modified.
	Received map[Kind]M
	// Sent is when a message of each kind was last sent.
	Sent map[Kind]time.Time
	// OtherDriver is the driver of a provider that could not decode a message.
	OtherDriver string

	requestID int64
	waiting   map[string]time.Time
}

// Reply returns the last message of a kind if it belongs to the session.
func (e Exchange[M]) Reply(kind Kind, session int64) (M, bool) {
	m, ok := e.Received[kind]
	return m, ok && m.Head().Session == session
}

// Removed reports whether nothing of the session is left at the provider: it
// replied Gone, or it uses another driver and never had anything.
func (e Exchange[M]) Removed(session int64) bool {
	_, gone := e.Reply(Gone, session)
	return gone || e.OtherDriver != ""
}

// Due reports whether a message of the kind was not sent within interval.
func (e Exchange[M]) Due(kind Kind, now time.Time, interval time.Duration) bool {
	sent, ok := e.Sent[kind]
	return !ok || now.Sub(sent) >= interval
}

// HelloDue is Due for the Hello of a session. After a refusal that
// does not pass by itself the interval is longer, without a hold it is shorter.
func (e Exchange[M]) HelloDue(session int64, now time.Time, interval time.Duration) bool {
	switch refusal, ok := e.Reply(Refusal, session); {
	case e.OtherDriver != "" || ok && !refusal.Head().transient():
		interval *= refusedFactor
	case ok && refusal.Head().Reason == ReasonNoHold:
		interval /= noHoldFactor
	}
	return e.Due(Hello, now, interval)
}

// Refused is the Progress of a session that the provider does not grant to this
// cluster's driver, nil if it has not refused.
func (e Exchange[M]) Refused(session int64, provider, driver string) *peering.Progress {
	var progress peering.Progress
	refusal, refused := e.Reply(Refusal, session)
	switch {
	case e.OtherDriver != "":
		progress = Mismatch(provider, e.OtherDriver, driver)
	case refused:
		progress = peering.Waiting("PeeringRefused", fmt.Sprintf("provider %s refused the peering: %s: %s", provider, refusal.Head().Reason, refusal.Head().Text))
	default:
		return nil
	}
	return &progress
}

// exchange returns a provider's exchange; the caller holds the lock.
func (c *Client[M]) exchange(provider string) *Exchange[M] {
	e := c.exchanges[provider]
	if e == nil {
		e = &Exchange[M]{Received: map[Kind]M{}, Sent: map[Kind]time.Time{}, waiting: map[string]time.Time{}}
		c.exchanges[provider] = e
	}
	return e
}

// Exchange returns a copy of a provider's exchange. From the first call on, the
// provider's replies are accepted.
func (c *Client[M]) Exchange(provider string) Exchange[M] {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.exchange(provider)
	return Exchange[M]{Received: maps.Clone(e.Received), Sent: maps.Clone(e.Sent), OtherDriver: e.OtherDriver}
}

// Reset drops a provider's exchange; later replies are ignored.
func (c *Client[M]) Reset(provider string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.exchanges, provider)
}

// RequestID is the number of the Hello that has no reply yet. It stays the same
// until Reset.
func (c *Client[M]) RequestID(provider string) int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.exchange(provider)
	if e.requestID == 0 {
		e.requestID = max(c.options.Clock.Now().UnixNano(), 1)
	}
	return e.requestID
}

// Waited is how long this process has waited for something of a provider; the
// first call begins the wait.
func (c *Client[M]) Waited(provider, what string) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	now, waiting := c.options.Clock.Now(), c.exchange(provider).waiting
	if _, begun := waiting[what]; !begun {
		waiting[what] = now
	}
	return now.Sub(waiting[what])
}

// StopWaiting ends waits of a provider, all of them if none is named.
func (c *Client[M]) StopWaiting(provider string, waits ...string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	waiting := c.exchange(provider).waiting
	if len(waits) == 0 {
		clear(waiting)
	}
	for _, what := range waits {
		delete(waiting, what)
	}
}

// Waiting returns how long something has been waited for, 0 if it is not.
func (c *Client[M]) Waiting(provider, what string) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	begun, ok := c.exchange(provider).waiting[what]
	if !ok {
		return 0
	}
	return c.options.Clock.Now().Sub(begun)
}

// Send encodes a message and sends it to a provider.
func (c *Client[M]) Send(ctx context.Context, peer peering.Peer, m M) error {
	raw, err := c.codec.Encode(m)
	if err != nil {
		return err
	}
	kind := m.Head().Kind
	// Recorded first, because the reply may arrive before Send returns.
	c.mu.Lock()
	c.exchange(peer.ClusterID).Sent[kind] = c.options.Clock.Now()
	c.mu.Unlock()
	if err := c.options.Messenger.Send(ctx, peer, raw); err != nil {
		c.mu.Lock()
		delete(c.exchange(peer.ClusterID).Sent, kind)
		c.mu.Unlock()
		return fmt.Errorf("sending %s to %s: %w", kind, peer.ClusterID, err)
	}
	return nil
}

// Receive implements peering.Receiver: it records the reply of a provider that is
// in an exchange and enqueues the provider.
func (c *Client[M]) Receive(provider string, raw []byte) {
	var reply M
	otherDriver, unreadable := ReadsOnly(raw)
	if !unreadable {
		var err error
		if reply, err = c.codec.Decode(raw, c.replies...); err != nil {
			c.options.Log.Info("Dropping a provider's message", "provider", provider, "reason", err.Error())
			return
		}
	}
	if c.record(provider, otherDriver, reply) {
		c.options.Enqueue(provider)
	}
}

// record reports whether the provider is in an exchange. A reply to another
// request than the pending one is dropped.
func (c *Client[M]) record(provider, otherDriver string, reply M) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	e, known := c.exchanges[provider]
	if !known {
		return false
	}
	e.OtherDriver = otherDriver
	if otherDriver != "" {
		return true
	}
	head := reply.Head()
	if head.RequestID != 0 && head.RequestID != e.requestID {
		return true
	}
	if head.RequestID != 0 {
		delete(e.Received, Grant) // one reply to a request
		delete(e.Received, Refusal)
	}
	e.Received[head.Kind] = reply
	return true
}
