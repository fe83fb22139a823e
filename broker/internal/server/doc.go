// Package server is the broker's REST interface. It receives advertisements,
// reservations and acks from the agents, streams to each agent the objects that concern
// it, and relays sealed messages between agents. Paths and bodies are defined by package
// protocol and described by its openapi.json.
//
// The caller is identified by its client certificate (package identity), never by a
// body. Reads come from the manager's cache. Writes go to the API server, or to package
// reservation, which owns placement and the ledger.
//
// A stream is level-triggered: whenever an object that a subscriber sees may have
// changed, its views are listed from the cache, and those that differ from what was
// last sent are sent. So no events are queued for a subscriber, and one that does not
// read is disconnected when a write times out.
package server
