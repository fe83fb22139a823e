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
	// maxMail is how many messages wait for one cluster, and mailLife how long.
	maxMail  = 64
	mailLife = 2 * time.Minute
	// maxMessageID bounds a message's ID, in bytes.
	maxMessageID = 128
)

// mailboxes keep relayed messages, in memory, until their receiver's stream
// takes them. A message is handed over once at most; whoever waits for an answer
// sends again.
type mailboxes struct {
	clock clock.PassiveClock
	mutex sync.Mutex
	boxes map[string][]letter
}

type letter struct {
	message protocol.RelayMessage
	since   time.Time
}

func newMailboxes(clock clock.PassiveClock) *mailboxes {
	return &mailboxes{clock: clock, boxes: map[string][]letter{}}
}

// post puts a message into its receiver's box, and reports whether there was
// room.
func (m *mailboxes) post(message protocol.RelayMessage) bool {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	now := m.clock.Now()
	box := m.boxes[message.To]
	// Oldest first, so the expired ones lead.
	for len(box) > 0 && now.Sub(box[0].since) >= mailLife {
		box = box[1:]
	}
	room := len(box) < maxMail
	if room {
		box = append(box, letter{message: message, since: now})
	}
	m.boxes[message.To] = box
	return room
}

// take empties a cluster's box.
func (m *mailboxes) take(cluster string) []protocol.RelayMessage {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	now := m.clock.Now()
	var messages []protocol.RelayMessage
	for _, letter := range m.boxes[cluster] {
		if now.Sub(letter.since) < mailLife {
			messages = append(messages, letter.message)
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
		return refuse(protocol.CodeForbidden, "cluster %s cannot send as %q", caller, bounded(message.From))
	case !protocol.ValidClusterID(message.To) || message.To == caller:
		return refuse(protocol.CodeInvalid, "to must be the ID of another cluster")
	case message.ID == "" || len(message.ID) > maxMessageID:
		return refuse(protocol.CodeInvalid, "id must have 1 to %d characters", maxMessageID)
	case len(message.Sealed) == 0:
		return refuse(protocol.CodeInvalid, "sealed must not be empty")
	case len(message.Sealed) > protocol.MaxSealed:
		return refuse(protocol.CodeTooLarge, "sealed has %d bytes; %d are relayed", len(message.Sealed), protocol.MaxSealed)
	}
	known, err := s.Identity.Known(r.Context(), message.To)
	if err != nil {
		return err
	}
	if !known {
		return refuse(protocol.CodeNotFound, "no cluster %s has joined this broker", message.To)
	}
	message.From = caller
	if !s.mail.post(message) {
		return refuse(protocol.CodeTooMany, "%d messages wait for cluster %s already; is its agent running? Send again later", maxMail, message.To)
	}
	s.hub.notify(message.To, "")
	return respond(w, http.StatusAccepted, nil)
}

func (s *Server) watchRelay(w http.ResponseWriter, r *http.Request, caller string) error {
	if !watching(r) {
		return refuse(protocol.CodeInvalid, "messages come as a stream only: say ?watch=true")
	}
	return s.stream(w, r, caller, "", &mailSource{server: s})
}

// mailSource shows a cluster's messages. Only its newest stream does: an older
// one may be a connection that broke unseen, where they would be lost.
type mailSource struct {
	server *Server
	begun  bool
}

func (m *mailSource) events(_ context.Context, subscription *subscription) ([]protocol.Event, error) {
	var messages []protocol.RelayMessage
	if m.server.hub.newest(subscription) {
		messages = m.server.mail.take(subscription.cluster)
	}
	switch {
	case !m.begun:
		m.begun = true
		return []protocol.Event{{Type: protocol.EventRelist, Relay: messages}}, nil
	case len(messages) == 0:
		return nil, nil
	}
	return []protocol.Event{{Type: protocol.EventPut, Relay: messages}}, nil
}
