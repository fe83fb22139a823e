// Package reservation takes the Reservations of this cluster to the broker and
// brings back what became of them.
//
// It works from what is, not from what happened: a Reservation whose generation
// the broker has not acknowledged is put (again), the broker's status is copied
// into the local one whenever they differ, and a deleted Reservation is let go
// of at the broker once nothing here uses it. The finalizer keeps it until the
// broker has forgotten it. A reservation at the broker without a Reservation
// here, left by a break at the wrong moment, is let go of the same way.
package reservation
