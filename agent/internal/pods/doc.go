// Package pods moves the consumer's pods onto virtual nodes and off them.
//
// Two controllers share the work:
//
//	by Reservation  its pods, pending or on virtual nodes
//	                 └ Need (pure) ─► Admissions (pure) ─► tolerations for pending pods
//	                                ─► Surplus, Retain (pure) ─► lower count
//	by provider     the pods bound to its virtual node
//	                 └ not started in time ─► eviction
//	                   deleted, but the provider is unreachable ─► force-deletion
//	                pods of DaemonSets that wait for that node ─► deletion
//
// Before a count is lowered, package virtualnode, which sizes the nodes, shrinks
// them and reports when they have shrunk.
package pods
