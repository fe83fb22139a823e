// Package direct links clusters and makes virtual nodes without anything else
// installed in them: Driver is the consumer's side, Provider the provider's. The
// provider makes a namespace for the consumer's guests, bounds it, and hands out
// a short-lived token that is good for that namespace alone; the program
// spillway-virtual-node, in the consumer's cluster, runs pods there with it.
//
//	consumer (rome)                            provider (paris)
//	Secret spillway-direct-paris
//	          ── Hello ────────────────────►   Namespace spillway-guests-rome: quota, Pod
//	                                           Security, network policies, then the right
//	          ◄─── Grant: namespace, token ──  to run pods
//	the Secret carries connection and capacity
//	virtual-node reads it → Node spillway-paris → pods in that namespace
//	          ── Hello (renews) ───────────►   another token, long before the old one ends
//	          ── Teardown ─────────────────►   rights first, then all the rest
//	          ◄──────────────────── Gone ────
//
// A link has a session: a number that the consumer picks when it begins and that
// grows from one link to the next. Every message names it, so that one which was
// delayed or repeated on its way touches no later link. A grant also repeats the
// number of the question that it answers: an old token that comes once more takes
// no new one's place.
//
// Both sides recompute everything from objects: the consumer from its Secrets
// (state.go has their states), the provider from its namespaces. What is kept in
// memory (answers that came, what was asked when, what consumers hold) is asked
// for again after a restart. Objects that somebody else made are reported and
// never changed.
//
// Nobody compares two machines' clocks: a grant says for how many seconds its
// token is good, and the consumer counts them itself.
package direct
