package limits

import (
	"net"
	"net/http"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"
)

// TestConnectionsAreBounded: who opens connections without making a call ends its own
// oldest, unless all are new: then the newest.
func TestConnectionsAreBounded(t *testing.T) {
	clock := clocktesting.NewFakePassiveClock(start)
	open := NewConnections(clock)
	var conns []net.Conn
	add := func() net.Conn {
		conn, other := net.Pipe()
		t.Cleanup(func() { _ = other.Close() })
		conns = append(conns, conn)
		open.Changed(conn, http.StateNew)
		return conn
	}
	closed := func(conn net.Conn) bool { return conn.SetDeadline(time.Time{}) != nil }
	known := add()
	if !open.Claim(WithConnection(t.Context(), known), "rome") {
		t.Fatal("the first connection of a caller does not stay open")
	}
	for range maxUnknown {
		add()
	}
	if last := add(); !closed(last) || closed(conns[1]) {
		t.Error("a new connection ended one that is as new")
	}
	clock.SetTime(start.Add(handshakeGrace))
	if last := add(); closed(last) || !closed(conns[1]) || closed(conns[2]) || closed(known) {
		t.Error("want the oldest connection without a caller to be closed")
	}
	for _, conn := range conns {
		open.Changed(conn, http.StateClosed)
	}
	if open.unknown.Len() > 0 || len(open.open) > 0 || len(open.byCaller) > 0 {
		t.Errorf("closed connections are kept: %+v", open)
	}
}
