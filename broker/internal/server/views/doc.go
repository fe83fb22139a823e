// Package views is what each cluster sees of the hub's Reservations and ClusterAdvertisements,
// which are in package store, and whose views a change of one of them may change.
package views
