// Package v1alpha1 is the API group broker.fluidos.eu: the objects that the broker,
// the agents and the scheduler plugin read and write, and the names of labels,
// taints and conditions that they share.
//
// A Reservation requests capacity. The broker records it as a hold in the status of
// a provider's ClusterAdvertisement. From the hold, the provider's agent writes a
// ProviderInstruction; once the provider has accepted, the consumer's agent writes a
// ReservationInstruction.
//
// +kubebuilder:object:generate=true
// +groupName=broker.fluidos.eu
package v1alpha1
