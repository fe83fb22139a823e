package cluster

import (
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
)

// The ports tried are below the kernel's range for outgoing connections, which could
// otherwise take a port between the check and the moment a program listens on it.
const firstPort, lastPort = 20000, 32000

// given are the ports that this process has given away: their programs may not listen yet.
var given sync.Map

// FreePort returns a port of 127.0.0.1 that was free a moment ago, each once. The caller
// must handle losing the race for it.
func FreePort() (int, error) {
	for range 200 {
		port := firstPort + rand.IntN(lastPort-firstPort)
		l, err := net.Listen("tcp", Address(port))
		if err != nil {
			continue
		}
		if _, known := given.LoadOrStore(port, true); known {
			l.Close()
			continue
		}
		return port, l.Close()
	}
	return 0, fmt.Errorf("no free port found between %d and %d", firstPort, lastPort)
}

// Address is host:port of a local port.
func Address(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }
