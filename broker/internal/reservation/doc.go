// Package reservation reconciles the broker's Reservations. It gathers all that a decision
// depends on (gather.go), has package plan decide, writes what is decided (reconcile.go), and
// remembers what no object says (memory.go); calls.go is what clusters report and ask. Gathering writes nothing, and remembers nothing.
//
// A plan is committed in three writes, each a compare-and-swap on the object's
// resourceVersion. So two active brokers cannot promise the same capacity twice, and a
// broker that stops between two writes leaves nothing to clean up:
//
//	(a) Reservation.status.attempt: the attempt and the clusters that it changes. Of a
//	    Reservation that the broker itself has created, the first attempt is in an
//	    annotation until (c). What providers have withdrawn is taken from the allocations
//	(b) ClusterAdvertisement.status.holds: the changed holds, tagged with the attempt
//	(c) Reservation.status: phase, allocations and conditions, computed from the holds
//
// What the plan is computed from comes from the watch and from this broker's own writes
// (store.Store): a write that was based on something outdated fails. Only the clusters of the
// last attempt are read live, if they do not show it, and those of which (a) or the record of
// a consumer's report lowers the allocations. Each provider's ledger has one
// queue: the changes that wait in it are written together, each with an outcome of
// its own. What only releases has its status written with (a); what a deleted Reservation
// releases needs neither (a) nor (c): the deletion is recorded already.
//
// The ledger is authoritative, the Reservation's status is derived from it. After an
// interruption the next reconcile compares the holds with the requested capacity, and
// adds what is missing or shrinks what is too much. A hold whose Reservation does not
// exist any more is released after a live read.
package reservation
