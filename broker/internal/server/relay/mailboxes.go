package relay

import (
	"container/list"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/spillway-dev/spillway/broker/internal/server/stream"
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
)

var (
	messageCount = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "broker_relay_messages",
		Help: "Number of relayed messages in the mailboxes.",
	})
	messageBytes = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "broker_relay_bytes",
		Help: "Size of the relayed messages in the mailboxes in bytes.",
	})
	expired = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "broker_relay_expired_total",
		Help: "Number of relayed messages that expired before the receiver took them.",
	})
	refused = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "broker_relay_refused_total",
		Help: "Number of relayed messages that were refused because a mailbox was full.",
	})
)

func init() { metrics.Registry.MustRegister(messageCount, messageBytes, expired, refused) }

// Mailboxes keep relayed messages in memory until the receiver's stream takes them.
// Each message is delivered at most once: a sender that expects a reply must send again.
type Mailboxes struct {
	clock clock.WithTicker
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

// NewMailboxes returns Mailboxes without messages.
func NewMailboxes(clock clock.WithTicker) *Mailboxes {
	return &Mailboxes{clock: clock, all: list.New(), boxes: map[string][]*list.Element{}, to: map[string]int{}, from: map[string]int{}}
}

// Post adds a message to its receiver's mailbox, unless a limit refuses it. perCluster is
// the limit in bytes of what one cluster has sent, and of what is for one cluster.
func (m *Mailboxes) Post(message protocol.RelayMessage, perCluster int) error {
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
		return refuse("cluster %s has too many messages in the mailboxes of others", from)
	case ownCount >= maxMessagesFrom, len(box) >= maxMessages, m.to[message.To]+size > perCluster:
		// What others have sent there is not the sender's to know.
		return refuse("the mailbox of cluster %s is full (%d messages and %d bytes in it are from %s): check that its agent is running",
			message.To, ownCount, ownBytes, from)
	case m.size+size > maxMail:
		return refuse("the mailboxes of the broker are full")
	}
	m.boxes[message.To] = append(box, m.all.PushBack(added))
	m.account(added, size)
	return nil
}

// refuse refuses a message because there is no room for it.
func refuse(format string, args ...any) error {
	refused.Inc()
	return &protocol.Error{Code: protocol.CodeTooMany, Message: fmt.Sprintf(format+": retry in %s", append(args, messageTTL)...)}
}

// removeLocked removes a message.
func (m *Mailboxes) removeLocked(element *list.Element) *mail {
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

// Take removes and returns the messages in a cluster's mailbox.
func (m *Mailboxes) Take(cluster string) []protocol.RelayMessage {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	m.expireLocked()
	taken := []protocol.RelayMessage{}
	for _, element := range slices.Clone(m.boxes[cluster]) {
		taken = append(taken, m.removeLocked(element).message)
	}
	return taken
}

// Run removes expired messages until ctx ends, of clusters that do not take them too.
func (m *Mailboxes) Run(ctx context.Context) {
	ticker := m.clock.NewTicker(messageTTL / 4)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C():
			m.expire()
		}
	}
}

// expire removes the messages that are older than messageTTL.
func (m *Mailboxes) expire() {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	m.expireLocked()
}

func (m *Mailboxes) expireLocked() {
	now := m.clock.Now()
	for oldest := m.all.Front(); oldest != nil; oldest = m.all.Front() {
		if now.Sub(oldest.Value.(*mail).receivedAt) < messageTTL {
			return
		}
		m.removeLocked(oldest)
		expired.Inc()
	}
}

// account adds a message's size, or removes a negative one.
func (m *Mailboxes) account(of *mail, size int) {
	m.size += size
	if m.to[of.message.To] += size; m.to[of.message.To] == 0 {
		delete(m.to, of.message.To)
	}
	if m.from[of.message.From] += size; m.from[of.message.From] == 0 {
		delete(m.from, of.message.From)
	}
	messageCount.Set(float64(m.all.Len()))
	messageBytes.Set(float64(m.size))
}

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
		messages = s.boxes.Take(subscription.Cluster)
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
