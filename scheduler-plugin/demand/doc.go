// Package demand groups unschedulable pods into requests for capacity.
//
// Pods of one root owner and one shape are interchangeable: one Reservation
// covers all of them, and any of them may use any of its slots. Key identifies
// such a group. The scheduler plugin and the agent both compute it from the pod,
// so that they agree without communicating.
//
// It also says which OverflowPolicy limits the requests of a namespace, and to what.
//
// The package is pure: it reads pods, no cluster, and its only clock is injected.
package demand
