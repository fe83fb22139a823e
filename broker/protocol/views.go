package protocol

import (
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// AdvertisementView is an advertisement as other clusters see it: of holds and
// guests only those that concern the caller.
type AdvertisementView struct {
	Spec   broker.ClusterAdvertisementSpec   `json:"spec"`
	Status broker.ClusterAdvertisementStatus `json:"status"`
}

// AdvertisementList answers GET on PathAdvertisements.
type AdvertisementList struct {
	Items []AdvertisementView `json:"items"`
}

// ConsumerList answers GET on PathReservations with role requester.
type ConsumerList struct {
	Items []ConsumerView `json:"items"`
}

// ProviderList answers GET on PathReservations with role provider.
type ProviderList struct {
	Items []ProviderView `json:"items"`
}
