// Package demand says which pods ask for the same thing, and gathers those that
// found no room at home into asks.
//
// Pods of one root owner and one shape are interchangeable: one Reservation is
// made for all of them, and any of them may use any of its places. Key is that
// identity. The scheduler plugin and the agent both compute it, so that they
// mean the same pods without telling each other.
//
// The package is pure: it reads pods, never a cluster, and knows the time only
// from the clock that it is given.
package demand
