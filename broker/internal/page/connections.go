package page

import (
	"net"
	"sync"

	"github.com/spillway-dev/spillway/broker/internal/server/limits"
)

// byAddress closes at once what is more than maxOfAddress connections of one address.
type byAddress struct {
	net.Listener
	open limits.InProgress
}

func (l *byAddress) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if of := hostOf(conn.RemoteAddr().String()); l.open.Begin(of, maxOfAddress) {
			return &counted{Conn: conn, end: sync.OnceFunc(func() { l.open.End(of) })}, nil
		}
		_ = conn.Close()
	}
}

// counted is a connection that is counted until it is closed.
type counted struct {
	net.Conn
	end func()
}

func (c *counted) Close() error {
	c.end()
	return c.Conn.Close()
}

// hostOf is an address without its port.
func hostOf(address string) string {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return address
	}
	return host
}
