// Package protocol is the REST interface between the agents and the broker: paths,
// wire types, and the client that the agents use. All requests except joining use
// mutual TLS. The caller's identity is taken from its client certificate only, never
// from a body.
package protocol

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// REST paths.
const (
	// PathJoin: POST JoinRequest → JoinResponse. Needs a join token instead of a
	// client certificate.
	PathJoin = "/api/v1/join"
	// PathAdvertisements: POST ClusterAdvertisementSpec → AdvertisementResponse;
	// GET → AdvertisementList; GET /{id} → AdvertisementView.
	PathAdvertisements = "/api/v1/advertisements"
	// PathBeat: POST Beat → BeatResponse.
	PathBeat = PathAdvertisements + "/beat"
	// PathReservations: POST ReservationRequest → ConsumerView; GET
	// ?role=requester|provider → ConsumerList or ProviderList, with &watch=true a
	// stream of Events; GET /{id}?role= → ConsumerView or ProviderView; DELETE /{id};
	// POST /{id}/ack?role= takes a ProviderAck or RequesterAck, and POST
	// /{id}/renew?role=requester a Renewal, which apply only to the Reservation of their
	// reservationUID.
	PathReservations = "/api/v1/reservations"
	// PathHistory: GET → HistoryList, and PathUsage: GET → UsageList, both of the caller's own
	// Reservations, or as CSV.
	PathHistory = "/api/v1/history"
	PathUsage   = "/api/v1/usage"
	// PathRelay: POST RelayMessage sends a sealed message to another cluster; GET → RelayList
	// takes the messages to the caller, with ?watch=true a stream of them.
	PathRelay = "/api/v1/relay"
	// PathHealthz and PathReadyz need no certificate.
	PathHealthz = "/healthz"
	PathReadyz  = "/readyz"
	// PathOpenAPI serves the OpenAPI 3 document. It needs no certificate.
	PathOpenAPI = "/openapi.json"
)

// Limits of both sides.
const (
	// MaxBody is the maximum size of a request body in bytes.
	MaxBody = 1 << 20
	// MaxSealed is the maximum size of the payload of a RelayMessage in bytes.
	MaxSealed = 64 << 10
	// HeartbeatSeconds is the interval of Heartbeat events. A client that receives
	// nothing for three intervals reconnects.
	HeartbeatSeconds = 5
)

// Role is the caller's side of a reservation.
type Role string

const (
	// RoleRequester is the consumer's side.
	RoleRequester Role = "requester"
	// RoleProvider is the provider's side.
	RoleProvider Role = "provider"
)

// JoinRequest requests a client certificate.
type JoinRequest struct {
	// ClusterID of the caller.
	ClusterID string `json:"clusterID"`
	// Token from the broker's Secret.
	Token string `json:"token"`
	// CSR is a PEM certificate request with common name ClusterID.
	CSR string `json:"csr"`
}

// JoinResponse is an issued client certificate.
type JoinResponse struct {
	// Certificate chain in PEM, leaf first.
	Certificate string `json:"certificate"`
	// CA certificate in PEM.
	CA string `json:"ca"`
}

// AdvertisementResponse acknowledges an advertisement.
type AdvertisementResponse struct {
	// Sequence of the latest advertisement: if it is not the one that was sent, that one is
	// outdated and was ignored.
	Sequence int64 `json:"sequence"`
}

// ReservationRequest creates a consumer's Reservation at the broker, or updates its
// amounts.
type ReservationRequest struct {
	// SourceUID is the UID of the Reservation in the consumer's cluster and the
	// idempotency key: requests with the same UID are for the same reservation.
	SourceUID types.UID `json:"sourceUID"`
	// SourceNamespace and SourceName identify that Reservation.
	SourceNamespace string `json:"sourceNamespace"`
	SourceName      string `json:"sourceName"`
	// SourceGeneration is its metadata.generation. A request of an older generation
	// than the broker has changes nothing.
	SourceGeneration int64 `json:"sourceGeneration"`
	// SourceOwner is whose pods it is for, as kind/name. Empty if it was made by hand.
	SourceOwner string `json:"sourceOwner,omitempty"`
	// ByHand is true if it was made by hand, and not by the scheduler plugin.
	ByHand bool `json:"byHand,omitempty"`
	// Spec of that Reservation. Its requesterID must be empty or the caller's.
	Spec broker.ReservationSpec `json:"spec"`
}

// ConsumerView is a reservation as its consumer sees it.
type ConsumerView struct {
	// ID and UID are the name and UID of the broker's Reservation.
	ID  string    `json:"id"`
	UID types.UID `json:"uid"`
	// The source fields are those of the ReservationRequest.
	SourceUID        types.UID `json:"sourceUID"`
	SourceNamespace  string    `json:"sourceNamespace"`
	SourceName       string    `json:"sourceName"`
	SourceGeneration int64     `json:"sourceGeneration"`
	// Spec and Status of the broker's Reservation.
	Spec   broker.ReservationSpec   `json:"spec"`
	Status broker.ReservationStatus `json:"status"`
	// Asked are the clusters of the first attempt, from when the broker records it until
	// its status says more. The consumer may peer with them while they decide; they may
	// refuse.
	Asked []AskedCluster `json:"asked,omitempty"`
	// PeerKeys of the providers in Status.Allocations and Asked, by cluster ID.
	PeerKeys map[string]string `json:"peerKeys,omitempty"`
}

// AskedCluster is a cluster that has been asked to hold capacity.
type AskedCluster struct {
	// Cluster ID.
	Cluster string `json:"cluster"`
	// Endpoint of its API server.
	Endpoint string `json:"endpoint,omitempty"`
}

// ProviderView is a hold as its provider sees it.
type ProviderView struct {
	// ID is the name of the broker's Reservation.
	ID string `json:"id"`
	// Requester is the cluster ID of the consumer.
	Requester string `json:"requester"`
	// RequesterPeerKey is the consumer's public key as the broker knows it.
	RequesterPeerKey string `json:"requesterPeerKey,omitempty"`
	// Hold in the broker's ledger. A hold that promises nothing is to be released.
	Hold broker.Hold `json:"hold"`
	// AnswerWithin is how long the broker waits for the answer to the attempt, from when it
	// asked. Unset if there is nothing to accept or refuse.
	AnswerWithin *metav1.Duration `json:"answerWithin,omitempty"`
}

// Releasing reports whether the hold is to be released.
func (v ProviderView) Releasing() bool { return v.Hold.Promised.Empty() }

// ProviderAck accepts or refuses one attempt of a hold. It changes nothing if the
// hold is of another reservation or attempt.
type ProviderAck struct {
	// ReservationUID of the hold.
	ReservationUID types.UID `json:"reservationUID"`
	// Attempt of the hold.
	Attempt int64 `json:"attempt"`
	// Accepted is true if the provider holds exactly the promised capacity; for a hold
	// that promises nothing, if nothing of it is left.
	Accepted bool `json:"accepted"`
	// Message is the reason of a refusal, with figures.
	Message string `json:"message,omitempty"`
	// Held is the capacity that the provider still holds for the reservation when it
	// refuses, from attempts that it accepted before. Unset if it holds nothing.
	Held *broker.HeldCapacity `json:"held,omitempty"`
	// LeaveWithin is set if the provider withdraws what it had accepted, except for Held:
	// how long pods may still use the rest. If it is unset, they may use it until the
	// provider ends them.
	LeaveWithin *metav1.Duration `json:"leaveWithin,omitempty"`
}

// Renewal renews the lease of a reservation that is in use. It changes nothing if the
// reservation is another one.
type Renewal struct {
	// ReservationUID is the UID of the broker's Reservation.
	ReservationUID types.UID `json:"reservationUID"`
}

// RequesterAck reports on which virtual nodes a reservation can be used. It changes
// nothing if the reservation is another one or at another attempt.
type RequesterAck struct {
	// ReservationUID is the UID of the broker's Reservation.
	ReservationUID types.UID `json:"reservationUID"`
	// Attempt of the reservation.
	Attempt int64 `json:"attempt"`
	// Ready lists the providers whose virtual node provides the allocation of the
	// attempt.
	Ready []string `json:"ready,omitempty"`
	// Unusable says of providers that have accepted why no pod can use the allocation there,
	// whatever the virtual node. The broker releases it and asks others, and these again later.
	Unusable map[string]string `json:"unusable,omitempty"`
	// Used is what pods use of a reservation that was created in the hub; unset for others,
	// which show it in the consumer.
	Used *broker.Use `json:"used,omitempty"`
}

// MaxLeaveWithin is the longest LeaveWithin. The broker lowers what is longer.
const MaxLeaveWithin = 24 * time.Hour

// RelayMessage is a sealed message from one cluster to another. The broker cannot
// read it.
type RelayMessage struct {
	// From is the sender. The broker sets it from the certificate.
	From string `json:"from,omitempty"`
	// To is the receiver.
	To string `json:"to"`
	// ID lets the receiver drop duplicates.
	ID string `json:"id"`
	// Sealed is the payload, encrypted for the receiver.
	Sealed []byte `json:"sealed"`
}

// EventType is the type of an Event.
type EventType string

const (
	// EventRelist begins a stream and lists everything that there is. The receiver
	// drops what is not listed.
	EventRelist EventType = "Relist"
	// EventPut has new or changed views, or messages.
	EventPut EventType = "Put"
	// EventDelete has the ID of a deleted view.
	EventDelete EventType = "Delete"
	// EventHeartbeat is empty.
	EventHeartbeat EventType = "Heartbeat"
)

// Event is one line of a watch stream (newline-delimited JSON).
type Event struct {
	Type EventType `json:"type"`
	// ID of the deleted view.
	ID string `json:"id,omitempty"`
	// Consumer, Provider or Relay, by the role of the stream.
	Consumer []ConsumerView `json:"consumer,omitempty"`
	Provider []ProviderView `json:"provider,omitempty"`
	Relay    []RelayMessage `json:"relay,omitempty"`
}

// Error is the body of every response that is not 2xx.
type Error struct {
	// Code is a CamelCase word for programs.
	Code string `json:"code"`
	// Message explains what is wrong and what to do.
	Message string `json:"message"`
	// RetryAfter is when the same request may succeed, as in the header Retry-After, which
	// has whole seconds; 0 if the broker does not know.
	RetryAfter time.Duration `json:"-"`
}

// Error implements error.
func (e *Error) Error() string { return e.Code + ": " + e.Message }
