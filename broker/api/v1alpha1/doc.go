// Package v1alpha1 is the shared contract of Spillway: the objects of API
// group broker.fluidos.eu that the broker, the agents and the scheduler plugin
// read and write, and the names (labels, taints, conditions) they agree on.
//
// A Reservation asks for capacity. The broker charges it to a provider's
// ClusterAdvertisement as a hold, tells the provider through a
// ProviderInstruction and the consumer through a ReservationInstruction.
//
// +kubebuilder:object:generate=true
// +groupName=broker.fluidos.eu
package v1alpha1
