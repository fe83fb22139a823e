// Package usage keeps what is used and what is granted, as the scheduling cycle reads it:
// Placements has where pods are, GrantCache what Reservations grant by key, PoolCache what those
// made by hand provide. Which hold a pod uses is what charge.Of answers. All are kept from events
// and do no I/O; a full recount is the tests' oracle.
package usage
