// Package hold is the provider's side of a hold: it decides whether what the broker
// promised fits this cluster's own nodes now, accepts or refuses it, and grants
// each consumer the right to use exactly what is held for it.
//
//	ProviderInstruction ─► decide (pure) ─► Provider.EnsureGrant ─► status
//
// A hold is accounting: what one consumer was promised and does not use yet counts
// as used when the next one is decided on. Consumers are reconciled one at a time, from
// a live list of instructions, so that the same capacity is never held for two of
// them. A grant is raised before the broker learns that a hold is accepted, and
// lowered before it learns that a hold is gone.
package hold
