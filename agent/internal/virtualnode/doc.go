// Package virtualnode is the borrower's side of a grant: it has a provider's virtual
// node carry exactly what was granted, lets the pods that own a grant go there,
// and gives back what is no longer needed.
//
// Two controllers share the work, each recomputing everything from what it sees:
//
//	by provider     ReservationInstructions, Reservations, pods on the node
//	                 └ gather ─► NodePlan (pure) ─► Driver ─► conditions
//	                   idle: parked, then torn down
//	by Reservation  its pods, waiting or running elsewhere
//	                 └ Need (pure) ─► tolerations for those with a place
//	                                ─► Slack, Keep (pure) ─► release
//
// Order is what keeps promises. A virtual node grows before its condition says
// so, and only then may pods go there. To release, the node shrinks first, then
// the pods on it are looked at live, and only then is the count lowered or the
// Reservation deleted; nothing shrinks below what running pods use.
//
// What is remembered between two rounds (since when nothing is needed, since
// when a node carries less) only ever delays an action; losing it in a restart
// makes the agent wait once more.
package virtualnode
