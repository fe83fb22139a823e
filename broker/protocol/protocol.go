// Package protocol is what the broker and the agents say to each other: REST
// paths, wire types and the client that agents use. Everything runs over
// mutual TLS (joining excepted), and who speaks is taken from the client
// certificate only, never from a body.
package protocol

import (
	"k8s.io/apimachinery/pkg/types"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// REST paths.
const (
	// PathJoin: POST JoinRequest → JoinResponse. The only path that needs no
	// client certificate; the token stands for it.
	PathJoin = "/api/v1/join"
	// PathAdvertisements: POST ClusterAdvertisementSpec → AdvertisementAnswer;
	// GET lists; GET /{id} reads one.
	PathAdvertisements = "/api/v1/advertisements"
	// PathReservations: POST ReservationRequest → ConsumerView (repeatable: the
	// same SourceUID is the same reservation); GET ?role=requester|provider
	// lists, with &watch=true streams Events; GET, DELETE /{id};
	// POST /{id}/ack takes ProviderAck or RequesterAck by role.
	PathReservations = "/api/v1/reservations"
	// PathRelay: POST RelayMessage hands a sealed message to another cluster;
	// GET ?watch=true streams those for the caller.
	PathRelay = "/api/v1/relay"
	// PathHealthz and PathReadyz need no certificate.
	PathHealthz = "/healthz"
	PathReadyz  = "/readyz"
	// PathOpenAPI serves the OpenAPI 3 document.
	PathOpenAPI = "/openapi.json"
)

// Bounds that both sides keep.
const (
	// MaxBody is the largest request body, in bytes.
	MaxBody = 1 << 20
	// MaxSealed is the largest sealed payload of a relayed message, in bytes.
	MaxSealed = 64 << 10
	// HeartbeatSeconds is how often a stream without news carries a Heartbeat; a
	// client that hears nothing for three of them connects anew.
	HeartbeatSeconds = 5
)

// Role is the side of a reservation the caller takes.
type Role string

const (
	// RoleRequester is the consumer's side.
	RoleRequester Role = "requester"
	// RoleProvider is the lender's side.
	RoleProvider Role = "provider"
)

// JoinRequest asks for a certificate.
type JoinRequest struct {
	// ClusterID that the caller wants to be.
	ClusterID string `json:"clusterID"`
	// Token from the broker's Secret.
	Token string `json:"token"`
	// CSR is a PEM certificate request with common name ClusterID.
	CSR string `json:"csr"`
}

// JoinResponse carries the certificate.
type JoinResponse struct {
	// Certificate chain in PEM, the cluster's own first.
	Certificate string `json:"certificate"`
	// CA in PEM.
	CA string `json:"ca"`
}

// AdvertisementAnswer acknowledges an advertisement.
type AdvertisementAnswer struct {
	// Sequence that was taken in.
	Sequence int64 `json:"sequence"`
}

// ReservationRequest is a consumer's ask.
type ReservationRequest struct {
	// SourceUID, SourceNamespace, SourceName, SourceGeneration identify the
	// Reservation in the consumer's cluster. SourceUID is the idempotency key.
	SourceUID        types.UID `json:"sourceUID"`
	SourceNamespace  string    `json:"sourceNamespace"`
	SourceName       string    `json:"sourceName"`
	SourceGeneration int64     `json:"sourceGeneration"`
	// Spec of that Reservation; its requesterID must be empty or the caller's.
	Spec broker.ReservationSpec `json:"spec"`
}

// ConsumerView is a reservation as its requester sees it.
type ConsumerView struct {
	// ID and UID are the name and UID of the broker's Reservation.
	ID               string    `json:"id"`
	UID              types.UID `json:"uid"`
	SourceUID        types.UID `json:"sourceUID"`
	SourceNamespace  string    `json:"sourceNamespace"`
	SourceName       string    `json:"sourceName"`
	SourceGeneration int64     `json:"sourceGeneration"`
	// Spec and Status are the broker's.
	Spec   broker.ReservationSpec   `json:"spec"`
	Status broker.ReservationStatus `json:"status"`
	// PeerKeys of the providers in Status.Allocations, by cluster ID.
	PeerKeys map[string]string `json:"peerKeys,omitempty"`
}

// ProviderView is a hold as its provider sees it.
type ProviderView struct {
	// ID is the name of the broker's Reservation.
	ID string `json:"id"`
	// Requester is the consumer; RequesterPeerKey its public key as the broker
	// knows it.
	Requester        string `json:"requester"`
	RequesterPeerKey string `json:"requesterPeerKey,omitempty"`
	// Hold as the ledger carries it. A hold that promises nothing is to be
	// released.
	Hold broker.Hold `json:"hold"`
}

// Releasing reports whether the hold promises nothing any more.
func (v ProviderView) Releasing() bool { return v.Hold.Promised.Empty() }

// ProviderAck is a provider's answer to a hold at one attempt.
type ProviderAck struct {
	// ReservationUID is the hold's; an answer to another one changes nothing.
	ReservationUID types.UID `json:"reservationUID"`
	// Attempt of the hold that is answered; an older one changes nothing.
	Attempt int64 `json:"attempt"`
	// Accepted is true when exactly this much is set aside (for a hold that
	// promises nothing: when everything of it is gone), false when it cannot be.
	Accepted bool `json:"accepted"`
	// Message says why not, with the figures.
	Message string `json:"message,omitempty"`
}

// RequesterAck is a consumer's report on one reservation.
type RequesterAck struct {
	// ReservationUID is the UID of the broker's Reservation; a report on another
	// one changes nothing.
	ReservationUID types.UID `json:"reservationUID"`
	// Ready lists the providers whose virtual node carries the allocation of
	// the attempt.
	Attempt int64    `json:"attempt"`
	Ready   []string `json:"ready,omitempty"`
	// Message for people.
	Message string `json:"message,omitempty"`
}

// RelayMessage is handed from one cluster to another, unread.
type RelayMessage struct {
	// From is filled in by the broker from the certificate.
	From string `json:"from,omitempty"`
	To   string `json:"to"`
	// ID lets the receiver drop what it has already seen.
	ID string `json:"id"`
	// Sealed is the payload, for the receiver's eyes only.
	Sealed []byte `json:"sealed"`
}

// EventType is what a stream's line means.
type EventType string

const (
	// EventRelist begins a stream: Consumer or Provider or Relay views listed in
	// it are all there is; everything else the receiver knew is gone.
	EventRelist EventType = "Relist"
	// EventPut carries new or changed views.
	EventPut EventType = "Put"
	// EventDelete carries the ID of one that is gone.
	EventDelete EventType = "Delete"
	// EventHeartbeat carries nothing.
	EventHeartbeat EventType = "Heartbeat"
)

// Event is one line of a watch stream (newline-delimited JSON).
type Event struct {
	Type EventType `json:"type"`
	// ID of what is gone.
	ID string `json:"id,omitempty"`
	// One of these, by the stream's role; the relay stream carries Relay.
	Consumer []ConsumerView `json:"consumer,omitempty"`
	Provider []ProviderView `json:"provider,omitempty"`
	Relay    []RelayMessage `json:"relay,omitempty"`
}

// Error is the body of every answer that is not 2xx.
type Error struct {
	// Code is one CamelCase word for programs.
	Code string `json:"code"`
	// Message is a sentence for people that says what to do.
	Message string `json:"message"`
}

// Error makes it an error.
func (e *Error) Error() string { return e.Code + ": " + e.Message }
