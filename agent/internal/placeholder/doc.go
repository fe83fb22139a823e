// Package placeholder plans the pods that hold the places of what a consumer was
// promised and its guests do not use: which placeholders exist, whether the scheduler
// has found a place for each (the proof), and which of them makes room for a guest.
//
// It is pure. Package hold observes the pods, calls it, and writes.
package placeholder
