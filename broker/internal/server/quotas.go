package server

import (
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// configName is the name of the BrokerConfig in use.
const configName = "default"

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
	if config := s.config.Load(); config != nil {
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
