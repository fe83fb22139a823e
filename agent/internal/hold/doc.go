// Package hold is the provider's side of a hold: it decides whether what the broker
// promised fits this cluster's own nodes now, accepts or refuses it, and grants
// each consumer the right to use exactly what is held for it.
//
//	ProviderInstruction ─► verdict (pure) ─► Provider.EnsureGrant ─► status
//
// A hold is accounting: what one consumer was promised and does not use yet counts
// as used when the next one is decided on. Consumers are reconciled one at a time. A
// larger hold is first recorded in the status; then the instructions are read from the
// API server, so that of two agents at most one accepts the same capacity; then the
// grant is raised, and only when it is in effect the broker learns that the hold is
// accepted. A grant is lowered before the broker learns that a hold is gone. Holds that
// are decided are left alone while others change.
//
// With placeholders (package placeholder), a hold is accepted only when the scheduler has
// found a place for a pod of each shape in it, and these pods keep the places: each
// reconciliation creates and removes placeholders so that there is one for each pod that no
// guest uses, decides, and then hands places over to the next guests that wait for one. The gate
// of a guest for which there is none stays.
//
// A guest of each shape is also created with a server-side dry run, in the namespaces of the
// consumer's guests or in one that the driver makes for it: a hold is accepted only when the API
// server admits it, and waits while it cannot be tried yet.
//
// When nodes or pods change so that less capacity may be free, all holds are judged
// again: what no longer fits is given up, and the acknowledgement says what is left.
package hold
