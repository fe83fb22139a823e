package server

import (
	"math"
	"time"

	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
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

// quotas limit what one cluster uses of the broker.
type quotas struct {
	// reservations is the number of a consumer's Reservations, allReservations of those of
	// all, reservationBytes the size of a new one's spec.
	reservations, allReservations, reservationBytes int
	// relayBytes is the size of the messages that wait for a cluster, and of those that it
	// has sent.
	relayBytes int
	// streams is the number of a cluster's open streams.
	streams int
	// writesPerSecond is the rate of a cluster's writes, writeBurst how many it may make at
	// once.
	writesPerSecond, writeBurst int
}

// quotas are those of the BrokerConfig, or the defaults.
func (s *Server) quotas() quotas {
	// Without the object, the API server has not filled in the defaults.
	var set broker.Quotas
	if config := s.Store.Config(); config != nil {
		set = ptr.Deref(config.Spec.Quotas, set)
	}
	return quotas{
		reservations:     int(ptr.Deref(set.ReservationsPerCluster, 1000)),
		allReservations:  int(ptr.Deref(set.Reservations, 50_000)),
		reservationBytes: int(ptr.Deref(set.ReservationBytes, 8<<10)),
		relayBytes:       int(ptr.Deref(set.RelayBytesPerCluster, 2<<20)),
		streams:          int(ptr.Deref(set.StreamsPerCluster, 16)),
		writesPerSecond:  int(ptr.Deref(set.WritesPerSecond, 20)),
		writeBurst:       int(ptr.Deref(set.WriteBurst, 200)),
	}
}

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
		return slower(wait, "cluster %s exceeds the rate limit of its writes, %d per second (spec.quotas.writesPerSecond of the BrokerConfig in the hub)", caller, s.quotas().writesPerSecond)
	}
	return nil
}
