// Package commit is the one way in which a provider's ledger is written. Each ledger has one
// queue: the changes that wait in it are written together, each with an outcome of its own, and
// a change that was computed from something outdated fails. What is written is in the store
// before the watch repeats it. The audit log of promises follows the watch.
package commit
