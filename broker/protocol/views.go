package protocol

import (
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// AdvertisementView is an advertisement as the caller sees it. In another cluster's
// advertisement, holds and guests are the caller's only.
type AdvertisementView struct {
	Spec   broker.ClusterAdvertisementSpec   `json:"spec"`
	Status broker.ClusterAdvertisementStatus `json:"status"`
}

// AdvertisementList is the response to GET on PathAdvertisements.
type AdvertisementList struct {
	Items []AdvertisementView `json:"items"`
}

// DecisionView is the response to GET on the decision of a reservation: the clusters
// that lend to the caller and are not chosen, and how many do not lend to it.
type DecisionView struct {
	Rejections      []broker.ClusterRejection `json:"rejections"`
	RejectionCounts []broker.RejectionCount   `json:"rejectionCounts,omitempty"`
}

// ConsumerList is the response to GET on PathReservations with role requester.
type ConsumerList struct {
	Items []ConsumerView `json:"items"`
}

// ReservationList is the response to GET on PathReservations without a role.
type ReservationList struct {
	// Requester are the caller's reservations.
	Requester []ConsumerView `json:"requester"`
	// Provider are the holds on the caller.
	Provider []ProviderView `json:"provider"`
}

// ProviderList is the response to GET on PathReservations with role provider.
type ProviderList struct {
	Items []ProviderView `json:"items"`
}

// RelayList is the response to GET on PathRelay: the messages to the caller, which the broker
// keeps no longer.
type RelayList struct {
	Items []RelayMessage `json:"items"`
}
