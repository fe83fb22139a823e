package relay

import (
	"github.com/spillway-dev/spillway/broker/internal/server/stream"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// Source returns what a stream is sent of the mailbox of its cluster. Only the newest stream
// has the messages: an older one may be a connection whose loss was not detected, where they
// would be lost.
func (m *Mailboxes) Source() stream.Source { return &source{boxes: m} }

type source struct {
	boxes  *Mailboxes
	listed bool
}

// Events implements stream.Source.
func (s *source) Events(subscription *stream.Subscription) ([]protocol.Event, error) {
	var messages []protocol.RelayMessage
	if subscription.Newest() {
		messages = s.boxes.take(subscription.Cluster)
	}
	switch {
	case !s.listed:
		s.listed = true
		return []protocol.Event{{Type: protocol.EventRelist, Relay: messages}}, nil
	case len(messages) == 0:
		return nil, nil
	}
	return []protocol.Event{{Type: protocol.EventPut, Relay: messages}}, nil
}
