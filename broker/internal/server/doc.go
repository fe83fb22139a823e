// Package server is the broker's HTTPS interface. It takes advertisements,
// reservations and acks from the agents, streams to each agent what concerns it,
// and relays sealed messages between them. The paths and bodies are those of
// package protocol; openapi.json there describes them.
//
// Who speaks is taken from the client certificate (package identity) and never
// from a body. Reads come from the manager's cache; writes go to the API server,
// or to package reservation, which owns placement and the ledger.
//
// A stream carries states, not changes: whenever something that a subscriber
// sees may have changed, its views are listed anew from the cache and those that
// differ from what it was last sent go out. So nothing is queued for a
// subscriber, and one that does not read is dropped when a write times out.
package server
