// Package moves evicts overflowed pods, one at a time, so that their replacements run in
// this cluster again: it observes for which of them there is room, and what becomes of
// the replacement. Package returnhome decides which one moves, and when.
package moves
