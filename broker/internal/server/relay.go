package server

import (
	"context"
	"net/http"
	"sync"
	"time"

	"k8s.io/utils/clock"

	"github.com/spillway-dev/spillway/broker/protocol"
)

const (
	// maxMessages is the maximum number of messages in a cluster's mailbox.
	maxMessages = 64
	// messageTTL is the time after which a message in a mailbox expires.
	messageTTL = 2 * time.Minute
	// maxMessageID is the maximum length of a message's ID in bytes.
	maxMessageID = 128
)

// mailboxes keep relayed messages in memory until the receiver's stream takes them.
// Each message is delivered at most once: a sender that expects a reply must send again.
type mailboxes struct {
	clock clock.PassiveClock
	mutex sync.Mutex
	boxes map[string][]mail
}

type mail struct {
	message    protocol.RelayMessage
	receivedAt time.Time
}

func newMailboxes(clock clock.PassiveClock) *mailboxes {
	return &mailboxes{clock: clock, boxes: map[string][]mail{}}
}

// post adds a message to its receiver's mailbox. It returns false if the mailbox is full.
func (m *mailboxes) post(message protocol.RelayMessage) bool {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	now := m.clock.Now()
	box := m.boxes[message.To]
	// The expired messages are at the beginning.
	for len(box) > 0 && now.Sub(box[0].receivedAt) >= messageTTL {
		box = box[1:]
	}
	full := len(box) >= maxMessages
	if !full {
		box = append(box, mail{message: message, receivedAt: now})
	}
	m.boxes[message.To] = box
	return !full
}

// take removes and returns the messages in a cluster's mailbox.
func (m *mailboxes) take(cluster string) []protocol.RelayMessage {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	now := m.clock.Now()
	var messages []protocol.RelayMessage
	for _, mail := range m.boxes[cluster] {
		if now.Sub(mail.receivedAt) < messageTTL {
			messages = append(messages, mail.message)
		}
	}
	delete(m.boxes, cluster)
	return messages
}

func (s *Server) postRelay(w http.ResponseWriter, r *http.Request, caller string) error {
	var message protocol.RelayMessage
	if err := decode(w, r, &message); err != nil {
		return err
	}
	switch {
	case message.From != "" && message.From != caller:
		return refuse(protocol.CodeForbidden, "cluster %s cannot send as cluster %q: leave from empty", caller, short(message.From))
	case !protocol.ValidClusterID(message.To) || message.To == caller:
		return refuse(protocol.CodeInvalid, "to must be the ID of another cluster")
	case message.ID == "" || len(message.ID) > maxMessageID:
		return refuse(protocol.CodeInvalid, "id must have 1 to %d characters", maxMessageID)
	case len(message.Sealed) == 0:
		return refuse(protocol.CodeInvalid, "sealed must not be empty")
	case len(message.Sealed) > protocol.MaxSealed:
		return refuse(protocol.CodeTooLarge, "sealed has %d bytes, the maximum is %d", len(message.Sealed), protocol.MaxSealed)
	}
	known, err := s.Identity.Known(r.Context(), message.To)
	if err != nil {
		return err
	}
	if !known {
		return refuse(protocol.CodeNotFound, "cluster %s has not joined this broker: check the cluster ID", message.To)
	}
	message.From = caller
	if !s.mailboxes.post(message) {
		return refuse(protocol.CodeTooMany, "the mailbox of cluster %s is full (%d messages): check that its agent is running, and retry later", message.To, maxMessages)
	}
	s.broadcaster.notify(message.To, "")
	return respond(w, http.StatusAccepted, nil)
}

func (s *Server) watchRelay(w http.ResponseWriter, r *http.Request, caller string) error {
	if !watching(r) {
		return refuse(protocol.CodeInvalid, "messages are available as a stream only: add ?watch=true")
	}
	return s.stream(w, r, caller, "", &mailSource{server: s})
}

// mailSource is the source of a cluster's messages. Only the newest stream has them: an
// older one may be a connection whose loss was not detected, where they would be lost.
type mailSource struct {
	server *Server
	listed bool
}

func (m *mailSource) events(_ context.Context, subscription *subscription) ([]protocol.Event, error) {
	var messages []protocol.RelayMessage
	if m.server.broadcaster.newest(subscription) {
		messages = m.server.mailboxes.take(subscription.cluster)
	}
	switch {
	case !m.listed:
		m.listed = true
		return []protocol.Event{{Type: protocol.EventRelist, Relay: messages}}, nil
	case len(messages) == 0:
		return nil, nil
	}
	return []protocol.Event{{Type: protocol.EventPut, Relay: messages}}, nil
}
