package sealing

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/transport"
	"github.com/spillway-dev/spillway/broker/protocol"
)

const (
	// rememberedIDs is how many message IDs are kept to detect repetitions.
	rememberedIDs = 4096
	// queuedPerPeer and queuedPeers bound the queues; messages that are dropped are
	// sent again.
	queuedPerPeer = 16
	queuedPeers   = 256
	// handlers is how many peers' messages are handled concurrently.
	handlers = 16
	// handleTimeout is the timeout for handling one message.
	handleTimeout = 30 * time.Second
	// holdTimeout is how long the messages of a cluster that neither holds capacity here
	// nor is pinned wait for its hold: a consumer peers while this cluster decides, and its
	// message may be faster than the news of its hold. holdInterval is the interval of the
	// checks.
	holdTimeout, holdInterval = 2 * time.Second, 100 * time.Millisecond
)

// Broker relays messages between clusters.
type Broker interface {
	transport.Watcher
	// Relay sends a sealed message to another cluster. Delivery is not guaranteed.
	Relay(ctx context.Context, message protocol.RelayMessage) error
}

// Messenger seals drivers' requests and sends them to the broker.
type Messenger struct {
	self   string
	key    *Key
	pins   *Pins
	broker Broker
}

var _ peering.Messenger = (*Messenger)(nil)

// NewMessenger returns a Messenger that sends as the cluster self.
func NewMessenger(self string, key *Key, pins *Pins, broker Broker) *Messenger {
	return &Messenger{self: self, key: key, pins: pins, broker: broker}
}

// Send seals a request for a peer and sends it to the broker. It pins the peer's key
// at first contact.
func (m *Messenger) Send(ctx context.Context, peer peering.Peer, message []byte) error {
	key, err := m.pins.Resolve(ctx, peer.ClusterID, peer.PeerKey)
	if err != nil {
		return err
	}
	return m.send(ctx, peer.ClusterID, key, kindRequest, message)
}

func (m *Messenger) send(ctx context.Context, to, key string, kind Kind, payload []byte) error {
	message, err := m.key.Seal(m.self, to, key, kind, payload)
	if err != nil {
		return err
	}
	if err := m.broker.Relay(ctx, message); err != nil {
		return fmt.Errorf("sending a message for %s to the broker: %w", to, err)
	}
	return nil
}

// Dispatcher passes the messages that the broker relays to the driver's side that
// they are for.
type Dispatcher struct {
	messenger *Messenger
	options   DispatcherOptions

	mu     sync.Mutex
	seen   *seen
	queues map[string][]protocol.RelayMessage
	slots  chan struct{}
	wait   sync.WaitGroup
}

// DispatcherOptions are a Dispatcher's collaborators.
type DispatcherOptions struct {
	// Provider answers consumers' requests; they are dropped if it is nil.
	Provider peering.Provider
	// Receiver takes providers' replies; they are dropped if it is nil.
	Receiver peering.Receiver
	// Consumer returns the public key, according to the broker, of a cluster that
	// holds capacity here. Messages of clusters that neither hold capacity nor are
	// pinned are refused.
	Consumer func(ctx context.Context, clusterID string) (peerKey string, holds bool, err error)
	// Refused is called for every peer whose key or message is refused; may be nil.
	Refused func(peer string, err error)
	Log     logr.Logger
}

// NewDispatcher returns a Dispatcher that replies through messenger.
func NewDispatcher(messenger *Messenger, options DispatcherOptions) *Dispatcher {
	return &Dispatcher{
		messenger: messenger, options: options,
		seen: newSeen(rememberedIDs), queues: map[string][]protocol.RelayMessage{}, slots: make(chan struct{}, handlers),
	}
}

// Start handles messages until ctx ends, and returns after the last of them.
func (d *Dispatcher) Start(ctx context.Context) error {
	d.messenger.broker.Watch(ctx, "", func(event protocol.Event) {
		for _, message := range event.Relay {
			d.enqueue(ctx, message)
		}
	})
	d.wait.Wait()
	return nil
}

// enqueue adds a message to its peer's queue: messages of one peer are handled one
// after another, and never in the stream's goroutine.
func (d *Dispatcher) enqueue(ctx context.Context, message protocol.RelayMessage) {
	d.mu.Lock()
	defer d.mu.Unlock()
	queue, busy := d.queues[message.From]
	if len(queue) >= queuedPerPeer || (!busy && len(d.queues) >= queuedPeers) {
		d.options.Log.Info("Dropping a relayed message because the queue is full", "peer", message.From)
		return
	}
	d.queues[message.From] = append(queue, message)
	if !busy {
		d.wait.Go(func() { d.serve(ctx, message.From) })
	}
}

// serve handles a peer's messages until its queue is empty.
func (d *Dispatcher) serve(ctx context.Context, peer string) {
	// Before it takes a slot, so that it delays no other peer.
	d.awaitHold(ctx, peer)
	select {
	case d.slots <- struct{}{}:
		defer func() { <-d.slots }()
	case <-ctx.Done():
	}
	for {
		d.mu.Lock()
		queue := d.queues[peer]
		if len(queue) == 0 || ctx.Err() != nil {
			delete(d.queues, peer)
			d.mu.Unlock()
			return
		}
		d.queues[peer] = queue[1:]
		d.mu.Unlock()
		if err := d.handle(ctx, queue[0]); err != nil {
			d.options.Log.Error(err, "Failed to handle a relayed message", "peer", peer, "id", queue[0].ID)
			if d.options.Refused != nil && (errors.Is(err, errKeyRefused) || errors.Is(err, errMessageRefused)) {
				d.options.Refused(peer, err)
			}
		}
	}
}

// awaitHold waits for the hold of a peer that is not pinned, for holdTimeout at most. The
// messages of one that remains unknown are refused with the reason.
func (d *Dispatcher) awaitHold(ctx context.Context, peer string) {
	holds := func(ctx context.Context) (bool, error) {
		_, holds, err := d.options.Consumer(ctx, peer)
		return holds, err
	}
	if held, err := holds(ctx); held || err != nil {
		return
	}
	if _, pinned, err := d.messenger.pins.Lookup(ctx, peer); pinned || err != nil {
		return
	}
	_ = wait.PollUntilContextTimeout(ctx, holdInterval, holdTimeout, false, holds)
}

// handle opens one message and passes it to the side that it is for.
func (d *Dispatcher) handle(ctx context.Context, message protocol.RelayMessage) error {
	ctx, cancel := context.WithTimeout(ctx, handleTimeout)
	defer cancel()
	key, holds, err := d.peerKey(ctx, message.From)
	if err != nil {
		return err
	}
	envelope, err := d.messenger.key.Open(d.messenger.self, key, message)
	if err != nil {
		return err
	}
	d.mu.Lock()
	fresh := d.seen.add(envelope.From + "/" + envelope.ID)
	d.mu.Unlock()
	if !fresh {
		return nil
	}
	switch {
	case envelope.Kind == kindReply && d.options.Receiver != nil:
		d.options.Receiver.Receive(envelope.From, envelope.Payload)
	case envelope.Kind == kindRequest && d.options.Provider != nil:
		reply, err := d.options.Provider.Handle(ctx, peering.Peer{ClusterID: envelope.From, PeerKey: key, Holds: holds}, envelope.Payload)
		if err != nil {
			return fmt.Errorf("answering %s: %w", envelope.From, err)
		}
		if reply != nil {
			return d.messenger.send(ctx, envelope.From, key, kindReply, reply)
		}
	}
	return nil
}

// peerKey returns the key to open a peer's messages with: the pinned one, or at first
// contact that of a consumer with a hold here.
func (d *Dispatcher) peerKey(ctx context.Context, peer string) (key string, holds bool, err error) {
	announced, holds, err := d.options.Consumer(ctx, peer)
	if err != nil {
		return "", false, fmt.Errorf("reading holds of %s: %w", peer, err)
	}
	if !holds {
		_, pinned, err := d.messenger.pins.Lookup(ctx, peer)
		if err != nil {
			return "", false, err
		}
		if !pinned {
			return "", false, fmt.Errorf("%w: %s holds no capacity here and is not pinned", errMessageRefused, peer)
		}
		announced = ""
	}
	key, err = d.messenger.pins.Resolve(ctx, peer, announced)
	return key, holds, err
}
