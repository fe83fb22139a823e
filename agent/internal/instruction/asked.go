package instruction

import (
	"slices"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/transport"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// Asked returns how to reach a provider that the broker has asked for capacity for a
// reservation in mirror, and that has not answered; asked is false if there is none.
func Asked(mirror *transport.Mirror[protocol.ConsumerView], provider string) (peer peering.Peer, asked bool) {
	of := func(a protocol.AskedCluster) bool { return a.Cluster == provider }
	views := mirror.Select(func(v protocol.ConsumerView) bool { return slices.ContainsFunc(v.Asked, of) })
	if len(views) == 0 {
		return peering.Peer{}, false
	}
	view := views[0]
	return peering.Peer{
		ClusterID: provider, PeerKey: view.PeerKeys[provider], Endpoint: view.Asked[slices.IndexFunc(view.Asked, of)].Endpoint,
	}, true
}

// OnAsked returns a subscriber of a mirror that calls enqueue with each provider that has
// been asked and has not answered.
func OnAsked(enqueue func(provider string)) func(transport.Change[protocol.ConsumerView]) {
	return func(change transport.Change[protocol.ConsumerView]) {
		for _, view := range change.Views {
			for _, asked := range view.Asked {
				enqueue(asked.Cluster)
			}
		}
	}
}
