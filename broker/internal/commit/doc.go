// Package commit has the broker's objects: what it knows of them (Store), and the one way in
// which a provider's ledger is written (Commit). What the broker has written itself is known
// before the watch repeats it. Each ledger has one queue: the changes that wait in it are
// written together, each with an outcome of its own, and a change that was computed from
// something outdated fails.
package commit
