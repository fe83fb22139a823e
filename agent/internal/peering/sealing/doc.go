// Package sealing carries drivers' messages between two clusters so that the
// broker that relays them can neither read nor change them.
//
// Each agent has an X25519 key pair; its public key travels in the cluster's
// advertisement. A message is a small envelope in JSON, sealed with nacl/box
// between the sender's and the receiver's keys, so that opening it also proves
// who sealed it. The peer's key is what the broker said at first contact and is
// pinned then: another key later is refused until a person has looked. A
// fingerprint given beforehand takes even the first contact out of the broker's
// hands.
//
// What a broker can still do is drop messages, or repeat old ones to an agent
// that has restarted since. Drivers' messages are therefore statements that may
// be repeated, never steps that count.
package sealing
