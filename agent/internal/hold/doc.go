// Package hold is the lender's side of a hold: it answers whether what the
// broker promised fits this cluster's own nodes now, sets it aside, and gives
// each consumer exactly the right to use what is set aside for it.
//
//	ProviderInstruction ─► fit (pure) ─► Provider.EnsureGrant ─► status
//
// Setting aside is accounting: what one consumer was promised and does not use
// yet counts as taken when the next one asks. Consumers are reconciled one at a
// time, from a live list of instructions, so two of them are never given the
// same room. A grant is raised before the broker hears yes and lowered before it
// hears that a hold is gone.
package hold
