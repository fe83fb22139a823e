// Package views is what each cluster sees of the hub's Reservations and ClusterAdvertisements.
// The Index has them by the clusters that they concern: it says whose views a change of an
// object may change, and how many Reservations a consumer has.
package views
