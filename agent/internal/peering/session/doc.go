// Package session is what the drivers share: the handshake between a consumer
// and a provider, and the helpers that both sides need.
//
// A peering has a session: a number that the consumer picks when the peering
// begins and that grows from one peering to the next. Every message carries it,
// so a message that was delayed or repeated does not affect a later peering.
//
//	consumer: Client                      provider: Server
//	          ── Hello ────────────────►  session newer than the recorded one: remove
//	                                      the old peering; older: Refusal StaleSession
//	          ◄── Offer, Grant, Refusal   the driver's answer
//	          ── Teardown ─────────────►  the driver's teardown
//	          ◄───────────────── Gone ──  nothing is left of the session
//
// Messages are statements that may be repeated: the Client sends until it has a
// reply, the Server derives every reply from the objects in its cluster. What
// both keep in memory is requested again after a restart. A message that the
// receiving driver cannot decode is answered with Unreadable, so two clusters
// with different drivers report that instead of waiting forever.
package session
