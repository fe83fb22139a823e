package main

import (
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// plant is a fault that is put at a seam on purpose, to see that the invariants find it.
type plant struct {
	name string
	// setUp changes the world before its programs start.
	setUp func(*world)
	// brokerWrites and agentWrites wrap the client of a program's writes and live reads.
	brokerWrites, agentWrites func(*world, client.Client) client.Client
	// brokerLive and agentLive replace the reader of a program's live reads.
	brokerLive, agentLive func(live, cached client.Reader) client.Reader
	// request changes a request on its way to the broker.
	request func(*world, message) message
	// ignoreGuests makes the agents recognize no guest.
	ignoreGuests bool
}

var plants []plant
