// Package rehearsal says what the broker would decide on Reservations that do not exist, from what a
// reader of the hub sees.
//
// It decides by the broker's own code (plan, decide, queue, ledger), and changes nothing but its own
// copy. What only the broker's process knows is not in it: which providers have refused such a
// request a moment ago or have not answered, how they have kept their promises, and whether the last
// beat of a cluster is too old. Whether the consumer may use the broker is not checked.
package rehearsal
