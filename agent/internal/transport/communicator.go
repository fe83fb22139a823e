package transport

import (
	"context"

	"k8s.io/apimachinery/pkg/types"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// BrokerCommunicator is an agent's connection to the broker: the port that each transport
// implements, and all that the agent knows of it. The broker knows the calling cluster by the
// transport's credentials, never by an argument. Every call may be repeated. An error that wraps
// a *protocol.Error is the broker's response; any other error means that the broker was not
// reached. Package contract has the tests that each implementation passes.
type BrokerCommunicator interface {
	Watcher
	// PublishAdvertisement replaces this cluster's advertisement at the broker. It returns a
	// *protocol.OutdatedError if the broker has a later one.
	PublishAdvertisement(ctx context.Context, spec broker.ClusterAdvertisementSpec) error
	// Beat reports whether the broker has this cluster's advertisement as it is.
	Beat(ctx context.Context, beat protocol.Beat) (known bool, err error)
	// PutReservation creates or updates a reservation at the broker.
	PutReservation(ctx context.Context, request protocol.ReservationRequest) (protocol.ConsumerView, error)
	// DeleteReservation releases a reservation at the broker; it succeeds if there is none with
	// this ID.
	DeleteReservation(ctx context.Context, id string) error
	// AckProvider reports the provider's decision about a hold.
	AckProvider(ctx context.Context, id string, ack protocol.ProviderAck) error
	// AckRequester reports the consumer's progress on a reservation.
	AckRequester(ctx context.Context, id string, ack protocol.RequesterAck) error
	// Renew renews the lease of a reservation.
	Renew(ctx context.Context, id string, uid types.UID) error
	// Relay sends a sealed message to another cluster. Delivery is not guaranteed.
	Relay(ctx context.Context, message protocol.RelayMessage) error
}
