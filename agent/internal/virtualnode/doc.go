// Package virtualnode is the consumer side of a grant: it keeps the peering with
// each provider, sizes the provider's virtual node to exactly what was granted,
// and reports the progress on every ReservationInstruction.
//
// One controller, by provider, recomputes everything from what it observes:
//
//	ReservationInstructions, Reservations, pods on the node (package podindex)
//	 └ gather ─► Snapshot ─► NodePlan (pure) ─► Driver ─► instruction statuses
//	   asked, but no grant yet: the driver peers with the provider while it decides
//	   no grant: the node is parked, later the peering is removed
//
// The order of the steps keeps grants safe. A virtual node grows before its
// condition says so, and only then does package pods admit pods to it. For a
// release the node shrinks first, then the pods on it are read from the API
// server, and only then is the count lowered or the instruction released. A node
// never shrinks below what running pods use.
//
// What is remembered between two reconciles (since when there is no grant, since
// when a node has less capacity) only delays an action; after a restart the agent waits
// once more.
package virtualnode
