package server

import (
	"math"
	"time"

	"github.com/spillway-dev/spillway/broker/protocol"
)

const (
	// writeSize is the size up to which a write counts as one.
	writeSize = 8 << 10
	// maxLists is the maximum number of lists of one cluster, and of first lists of its streams,
	// that are in progress at the same time: each may need some MB of memory until the cluster
	// has read it.
	maxLists = 4
	// maxCalls is the maximum number of calls of one cluster that are in progress at the same
	// time. Each may need memory of the size of its body and its response until the cluster
	// has sent or read it.
	maxCalls = 80
)

// slower refuses a call that is over a rate limit until the wait is over.
func slower(wait time.Duration, format string, args ...any) error {
	refusal := refuse(protocol.CodeTooMany, format, args...)
	refusal.RetryAfter = max(wait, time.Millisecond)
	refusal.Message += ": retry after " + time.Duration(math.Ceil(wait.Seconds())*float64(time.Second)).String()
	return refusal
}

// takeWrite counts a call that changes an object in the hub, or reaches another cluster, of an
// amount of bytes of JSON: large ones count as several.
func (s *Server) takeWrite(caller string, size int) error {
	if wait := s.writers.Take(caller, 1+size/writeSize); wait > 0 {
		return slower(wait, "cluster %s exceeds the rate limit of its writes, %d per second (spec.quotas.writesPerSecond of the BrokerConfig in the hub)", caller, s.Store.Settings().WritesPerSecond)
	}
	return nil
}
