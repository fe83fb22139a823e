// Package direct is the driver that needs nothing else installed in the clusters:
// Driver is the consumer's side, Provider the provider's. The provider creates a
// namespace for the consumer's guests, limits it, and issues a short-lived
// token that is valid for that namespace only; the program spillway-virtual-node,
// in the consumer's cluster, runs pods there with it.
//
//	consumer (rome)                            provider (paris)
//	Secret spillway-direct-paris
//	          ── Hello ────────────────────►   Namespace spillway-guests-rome: quota, Pod
//	                                           Security, network policies, then the right
//	          ◄─── Grant: namespace, token ──  to run pods
//	the Secret has the connection and the capacity
//	virtual-node reads it → Node spillway-paris → pods in that namespace
//	          ── Hello (renews) ───────────►   another token, long before the old one expires
//	          ── Teardown ─────────────────►   RBAC first, then everything else
//	          ◄──────────────────── Gone ────
//
// Package session has the handshake. Here a Grant also repeats the number of the
// Hello that it answers, so an old token that is delivered twice does not replace
// a new one.
//
// Both sides recompute everything from objects: the consumer from its Secrets
// (record.go has their states), the provider from its namespaces. Objects that
// Spillway did not make are reported and never changed.
//
// Clocks of two clusters are never compared: a Grant has the token's lifetime in
// seconds, which the consumer measures with its own clock.
package direct
