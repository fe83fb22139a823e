// Package transport is how an agent reaches its broker, whatever the wire.
package transport

import (
	"context"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// BrokerCommunicator reaches the broker. Every method may be repeated; none
// keeps its arguments. Errors that carry a *protocol.Error are the broker's own
// answers; any other means that it could not be asked.
type BrokerCommunicator interface {
	// PublishAdvertisement replaces what the broker knows of this cluster.
	PublishAdvertisement(ctx context.Context, spec broker.ClusterAdvertisementSpec) error
	// PutReservation asks, or asks again with another count.
	PutReservation(ctx context.Context, request protocol.ReservationRequest) (protocol.ConsumerView, error)
	// DeleteReservation lets go of a reservation by the broker's ID: the caller
	// uses nothing of it any more. Success when it is already gone.
	DeleteReservation(ctx context.Context, id string) error
	// Ack reports on a reservation, as provider or as requester (one of both).
	Ack(ctx context.Context, id string, provider *protocol.ProviderAck, requester *protocol.RequesterAck) error
	// Relay hands a sealed message to another cluster. It may get lost later:
	// whoever waits for an answer sends again.
	Relay(ctx context.Context, message protocol.RelayMessage) error
	// Watch streams a role's reservations, or relayed messages with role "".
	// It connects again by itself, with a Relist each time, and blocks until
	// ctx ends. Handle is called from one goroutine at a time.
	Watch(ctx context.Context, role protocol.Role, handle func(protocol.Event))
	// Ping reports whether the broker answers.
	Ping(ctx context.Context) error
}
