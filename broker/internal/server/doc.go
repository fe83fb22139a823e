// Package server is the broker's REST interface. It receives advertisements,
// reservations and acks from the agents, streams to each agent the objects that concern
// it, and relays sealed messages between agents. Paths and bodies are defined by package
// protocol and described by its openapi.json.
//
// The caller is identified by its client certificate (package identity), never by a
// body. Reads come from package store. Writes go to the API server, or to package
// reservation, which owns placement and the ledger.
//
// What one caller may use is in package limits, what each cluster sees in package views, what
// its open streams still have to be sent in package stream, and the messages of agents to each
// other in package relay. A stream that is not read ends when a write times out.
package server
