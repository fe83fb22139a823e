package limits

import (
	"container/list"
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"sync"
	"time"

	"k8s.io/utils/clock"
)

const (
	// maxUnknown is the maximum number of connections whose caller is not known yet.
	maxUnknown = 4096
	// handshakeGrace is how long such a connection is not closed for another one, so that
	// many that begin at once, such as after a fail-over, do not end each other.
	handshakeGrace = 3 * time.Second
	// maxConnections is the maximum number of connections of one key that stay open
	// after a call: streams and calls in progress need one each.
	maxConnections = 64
)

// Connections bounds the open connections, so that neither one cluster nor a caller
// without a certificate takes the broker's memory and file descriptors.
type Connections struct {
	clock clock.PassiveClock
	mutex sync.Mutex
	// unknown are those whose caller is not known yet, oldest first.
	unknown *list.List
	open    map[net.Conn]*connection
	// byCaller has the number of each caller's.
	byCaller map[string]int
}

type connection struct {
	net.Conn
	since time.Time
	// caller is the one of the first call; before that, element is in unknown.
	caller  string
	element *list.Element
}

// NewConnections returns Connections without any.
func NewConnections(clock clock.PassiveClock) *Connections {
	return &Connections{clock: clock, unknown: list.New(), open: map[net.Conn]*connection{}, byCaller: map[string]int{}}
}

// Changed is the ConnState of the HTTP server.
func (c *Connections) Changed(conn net.Conn, state http.ConnState) {
	var surplus net.Conn
	c.mutex.Lock()
	switch state {
	case http.StateNew:
		surplus = c.add(conn)
	case http.StateClosed, http.StateHijacked:
		c.remove(conn)
	}
	c.mutex.Unlock()
	if surplus != nil {
		closeNow(surplus)
	}
}

// add adds a connection and returns the one to close: the oldest if that has had its
// time, or the new one.
func (c *Connections) add(conn net.Conn) (surplus net.Conn) {
	added := &connection{Conn: conn, since: c.clock.Now()}
	added.element = c.unknown.PushBack(added)
	c.open[conn] = added
	if c.unknown.Len() <= maxUnknown {
		return nil
	}
	surplus = conn
	if oldest := c.unknown.Front().Value.(*connection); added.since.Sub(oldest.since) >= handshakeGrace {
		surplus = oldest.Conn
	}
	c.remove(surplus)
	return surplus
}

func (c *Connections) remove(conn net.Conn) {
	known := c.open[conn]
	if known == nil {
		return
	}
	delete(c.open, conn)
	if known.element != nil {
		c.unknown.Remove(known.element)
	} else if c.byCaller[known.caller]--; c.byCaller[known.caller] == 0 {
		delete(c.byCaller, known.caller)
	}
}

// Claim records whose the connection of a call is, and reports whether it may stay open
// after the call.
func (c *Connections) Claim(ctx context.Context, caller string) bool {
	conn, _ := ctx.Value(connectionKey{}).(net.Conn)
	c.mutex.Lock()
	defer c.mutex.Unlock()
	known := c.open[conn]
	switch {
	case known == nil:
		// It is not of this server's listener.
		return true
	case known.element == nil:
		return known.caller == caller
	case c.byCaller[caller] >= maxConnections:
		return false
	}
	c.unknown.Remove(known.element)
	known.element, known.caller = nil, caller
	c.byCaller[caller]++
	return true
}

type connectionKey struct{}

// WithConnection is the ConnContext of the HTTP server.
func WithConnection(ctx context.Context, conn net.Conn) context.Context {
	return context.WithValue(ctx, connectionKey{}, conn)
}

// closeNow closes a connection without the alert of TLS, which may block.
func closeNow(conn net.Conn) {
	if encrypted, is := conn.(*tls.Conn); is {
		conn = encrypted.NetConn()
	}
	_ = conn.Close()
}
