// Package reservation synchronizes the Reservations of this cluster with the
// broker's copies.
//
// The controller is level-triggered: it sends a Reservation whose generation the
// broker has not observed, copies the broker's status into the local one when they
// differ, and deletes the broker's copy of a deleted Reservation once no virtual
// node uses it. A finalizer keeps the Reservation until the broker has released
// its copy. A copy without a Reservation here, left by an interruption, is deleted
// in the same way.
package reservation
