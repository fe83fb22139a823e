package server

import (
	"container/list"
	"net/http"
	"slices"
	"sync"
	"time"

	"k8s.io/utils/clock"

	"github.com/spillway-dev/spillway/broker/protocol"
)

const (
	// maxMessages is the maximum number of messages in a cluster's mailbox, and
	// maxMessagesFrom that of one sender.
	maxMessages, maxMessagesFrom = 64, 32
	// maxMail is the maximum size of all messages in bytes.
	maxMail = 64 << 20
	// messageTTL is the time after which a message in a mailbox expires.
	messageTTL = 2 * time.Minute
	// messageOverhead is added to the size of a message, for what it takes in memory.
	messageOverhead = 256
	// maxMessageID is the maximum length of a message's ID in bytes.
	maxMessageID = 128
)

// mailboxes keep relayed messages in memory until the receiver's stream takes them.
// Each message is delivered at most once: a sender that expects a reply must send again.
type mailboxes struct {
	clock clock.PassiveClock
	mutex sync.Mutex
	// all messages, and those of each receiver, oldest first.
	all   *list.List
	boxes map[string][]*list.Element
	// sizes of all messages, of those to a receiver, and of those from a sender.
	size     int
	to, from map[string]int
}

type mail struct {
	message    protocol.RelayMessage
	receivedAt time.Time
}

func (m *mail) size() int { return len(m.message.Sealed) + len(m.message.ID) + messageOverhead }

func newMailboxes(clock clock.PassiveClock) *mailboxes {
	return &mailboxes{clock: clock, all: list.New(), boxes: map[string][]*list.Element{}, to: map[string]int{}, from: map[string]int{}}
}

// post adds a message to its receiver's mailbox, unless a limit refuses it. perCluster is
// the limit in bytes of what one cluster has sent, and of what is for one cluster.
func (m *mailboxes) post(message protocol.RelayMessage, perCluster int) error {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	m.expireLocked()
	added := &mail{message: message, receivedAt: m.clock.Now()}
	from, size := message.From, added.size()
	var ownCount, ownBytes int
	box := m.boxes[message.To]
	for _, element := range box {
		if other := element.Value.(*mail); other.message.From == from {
			ownCount++
			ownBytes += other.size()
		}
	}
	switch {
	case m.from[from]+size > perCluster:
		return refuseMail("cluster %s has too many messages in the mailboxes of others", from)
	case ownCount >= maxMessagesFrom, len(box) >= maxMessages, m.to[message.To]+size > perCluster:
		// What others have sent there is not the sender's to know.
		return refuseMail("the mailbox of cluster %s is full (%d messages and %d bytes in it are from %s): check that its agent is running",
			message.To, ownCount, ownBytes, from)
	case m.size+size > maxMail:
		return refuseMail("the mailboxes of the broker are full")
	}
	m.boxes[message.To] = append(box, m.all.PushBack(added))
	m.account(added, size)
	return nil
}

// refuseMail refuses a message because there is no room for it.
func refuseMail(format string, args ...any) error {
	relayRefused.Inc()
	return refuse(protocol.CodeTooMany, format+": retry in %s", append(args, messageTTL)...)
}

// removeLocked removes a message.
func (m *mailboxes) removeLocked(element *list.Element) *mail {
	removed := m.all.Remove(element).(*mail)
	box := m.boxes[removed.message.To]
	at := slices.Index(box, element)
	if box = slices.Delete(box, at, at+1); len(box) == 0 {
		delete(m.boxes, removed.message.To)
	} else {
		m.boxes[removed.message.To] = box
	}
	m.account(removed, -removed.size())
	return removed
}

// take removes and returns the messages in a cluster's mailbox.
func (m *mailboxes) take(cluster string) []protocol.RelayMessage {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	m.expireLocked()
	var messages []protocol.RelayMessage
	for _, element := range slices.Clone(m.boxes[cluster]) {
		messages = append(messages, m.removeLocked(element).message)
	}
	return messages
}

// expire removes the messages that are older than messageTTL.
func (m *mailboxes) expire() {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	m.expireLocked()
}

func (m *mailboxes) expireLocked() {
	now := m.clock.Now()
	for oldest := m.all.Front(); oldest != nil; oldest = m.all.Front() {
		if now.Sub(oldest.Value.(*mail).receivedAt) < messageTTL {
			return
		}
		m.removeLocked(oldest)
		relayExpired.Inc()
	}
}

// account adds a message's size, or removes a negative one.
func (m *mailboxes) account(of *mail, size int) {
	m.size += size
	if m.to[of.message.To] += size; m.to[of.message.To] == 0 {
		delete(m.to, of.message.To)
	}
	if m.from[of.message.From] += size; m.from[of.message.From] == 0 {
		delete(m.from, of.message.From)
	}
	relayMessages.Set(float64(m.all.Len()))
	relayBytes.Set(float64(m.size))
}

func (s *Server) postRelay(w http.ResponseWriter, r *http.Request, caller string) error {
	if err := s.takeWrite(caller, 0); err != nil {
		return err
	}
	var message protocol.RelayMessage
	if err := decode(r, &message); err != nil {
		return err
	}
	audit(r, "to", short(message.To), "bytes", len(message.Sealed))
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
	// Whether that cluster has joined is not the caller's to know: it gets the same answer, and
	// the message expires.
	message.From = caller
	if err := s.mailboxes.post(message, s.quotas().relayBytes); err != nil {
		return err
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

func (m *mailSource) events(subscription *subscription) ([]protocol.Event, error) {
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
