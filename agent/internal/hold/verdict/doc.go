// Package verdict decides on the instructions of a consumer. It is a chain of functions from a
// value to a value; it reads and writes nothing, and takes the time as an argument:
//
//	Input ─► Decide ─► Prove ─► Try ─► Grant ─► Statuses
//
// Decide judges by the provider's terms, by what fits the nodes, and by the time that is left. Prove
// refuses what the scheduler has found no place for, and Try what the API server does not admit.
// What none refuses is accepted; what is refused stays refused. Only this package makes a Decision
// or changes one.
package verdict
