// Package verdict decides on the instructions of a consumer. It is a chain of functions from a
// value to a value; it reads and writes nothing, and takes the time as an argument:
//
//	Input ─► Decide ─► Prove ─► Try ─► Grant ─► Statuses
//
// Decide judges by the provider's terms, by what fits the nodes, and by the time that is left.
// What is open then is refused by one of the next, or is accepted because none has: of what the
// scheduler places, and of guests that the API server admits. What is refused stays refused. Only
// this package makes a Decision or changes one.
package verdict
