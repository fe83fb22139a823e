// Package sealing sends drivers' messages between two clusters so that the broker
// that relays them can neither read nor change them.
//
// Each agent has an X25519 key pair; its public key travels in the cluster's
// advertisement. A message is a small envelope in JSON, sealed with nacl/box
// between the sender's and the receiver's keys, so that opening it also proves who
// sealed it. The peer's key is taken from the broker at first contact and pinned
// then: another key is refused later until an administrator removes the pin. With
// a fingerprint configured in advance, the broker is not trusted at first contact
// either.
//
// A broker can still drop messages, or repeat old ones to an agent that has
// restarted since. Drivers' messages are therefore statements that may be repeated
// (package session).
package sealing
