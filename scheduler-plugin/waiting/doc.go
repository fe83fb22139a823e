// Package waiting has the pods that wait for a place: Gate keeps those back for which an attempt
// would be futile, PendingPods are those that PostFilter has reported, UntriedPods those that have
// had no cycle yet, WorkQueue what has changed since, and Waker opens the gate for the pods that a
// change concerns.
package waiting
