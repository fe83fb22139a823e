// Package plan decides on one Reservation: what of its capacity is released, placed and fenced
// (Plan), and what its status says (Status). It is pure: both depend on the Input only, which
// package reservation reads, and it writes nothing.
package plan
