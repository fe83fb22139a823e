package cluster

import (
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
)

// The ports tried lie below those that the kernel gives to outgoing connections,
// of which there are many here: one of them could take a port between the moment
// it was found free and the moment a program listens on it.
const firstPort, lastPort = 20000, 32000

// FreePort is a port of 127.0.0.1 that nobody listened on a moment ago. Whoever
// uses it must cope with losing the race for it.
func FreePort() (int, error) {
	for range 200 {
		port := firstPort + rand.IntN(lastPort-firstPort)
		l, err := net.Listen("tcp", Address(port))
		if err != nil {
			continue
		}
		return port, l.Close()
	}
	return 0, fmt.Errorf("no free port found between %d and %d", firstPort, lastPort)
}

// Address is host:port of a local port.
func Address(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }
