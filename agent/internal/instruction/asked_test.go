package instruction_test

import (
	"context"
	"slices"
	"testing"

	"github.com/spillway-dev/spillway/agent/internal/instruction"
	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/transport"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// stream is a stream that ends.
type stream []protocol.Event

func (s stream) Watch(_ context.Context, _ protocol.Role, handle func(protocol.Event)) {
	for _, event := range s {
		handle(event)
	}
}

func TestAsked(t *testing.T) {
	asked := protocol.ConsumerView{ID: "a", PeerKeys: map[string]string{"paris": "key"}, Asked: []protocol.AskedCluster{{Cluster: "berlin"}, {Cluster: "paris", Endpoint: "https://paris"}}}
	mirror := transport.NewConsumerMirror(stream{
		{Type: protocol.EventRelist, Consumer: []protocol.ConsumerView{{ID: "b"}}},
		{Type: protocol.EventPut, Consumer: []protocol.ConsumerView{asked}},
	})
	var enqueued []string
	mirror.Subscribe(instruction.OnAsked(func(provider string) { enqueued = append(enqueued, provider) }))
	expect.NoError(t, mirror.Start(t.Context()))
	if !slices.Equal(enqueued, []string{"berlin", "paris"}) {
		t.Errorf("enqueued %v", enqueued)
	}
	if peer, ok := instruction.Asked(mirror, "paris"); !ok || peer != (peering.Peer{ClusterID: "paris", PeerKey: "key", Endpoint: "https://paris"}) {
		t.Errorf("got %+v, %t", peer, ok)
	}
	if peer, ok := instruction.Asked(mirror, "oslo"); ok {
		t.Errorf("oslo is asked: %+v", peer)
	}
}
