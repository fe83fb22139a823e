// Package transporttest is a broker in memory for tests of the agent: it records
// the agent's calls and streams the views that the test sets.
package transporttest

import (
	"context"
	"encoding/json"
	"sync"

	"k8s.io/apimachinery/pkg/types"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// Call is one recorded call.
type Call struct {
	// Method of Broker.
	Method string
	// ID of the reservation, or the receiver of a relayed message.
	ID string
	// Argument of the call besides the ID; nil for a deletion.
	Argument any
}

// Broker is the broker as one cluster sees it.
type Broker struct {
	clusterID string

	mu         sync.Mutex
	calls      []Call
	failures   map[string]error
	consumer   map[string]protocol.ConsumerView
	provider   map[string]protocol.ProviderView
	streams    map[*stream]struct{}
	up         bool
	changed    chan struct{}
	slowDelete bool
	// advertised is the digest of the last advertisement, "" if the broker knows none.
	advertised string
}

type stream struct {
	role   protocol.Role
	events chan protocol.Event
}

// New returns an empty broker for the cluster under test.
func New(clusterID string) *Broker {
	return &Broker{
		clusterID: clusterID, failures: map[string]error{}, up: true, changed: make(chan struct{}),
		consumer: map[string]protocol.ConsumerView{}, provider: map[string]protocol.ProviderView{}, streams: map[*stream]struct{}{},
	}
}

// Fail makes every call of a method return err; nil ends that.
func (b *Broker) Fail(method string, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.failures[method] = err
}

// SlowDelete makes deleted reservations remain with phase Released until Remove.
func (b *Broker) SlowDelete(slow bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.slowDelete = slow
}

// Calls returns the calls of a method with an ID ("" for any), oldest first.
func (b *Broker) Calls(method, id string) []Call {
	b.mu.Lock()
	defer b.mu.Unlock()
	var out []Call
	for _, call := range b.calls {
		if call.Method == method && (id == "" || call.ID == id) {
			out = append(out, call)
		}
	}
	return out
}

// Update changes a reservation of this cluster and streams it.
func (b *Broker) Update(id string, change func(*protocol.ConsumerView)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	view := b.consumer[id]
	view.ID = id
	change(&view)
	b.consumer[id] = view
	b.send(protocol.RoleRequester, protocol.Event{Type: protocol.EventPut, Consumer: []protocol.ConsumerView{view}})
}

// UpdateHold changes a hold in this cluster and streams it.
func (b *Broker) UpdateHold(id string, change func(*protocol.ProviderView)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	view := b.provider[id]
	view.ID = id
	change(&view)
	b.provider[id] = view
	b.send(protocol.RoleProvider, protocol.Event{Type: protocol.EventPut, Provider: []protocol.ProviderView{view}})
}

// Remove deletes a reservation and a hold and streams the deletion.
func (b *Broker) Remove(id string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.remove(id)
}

func (b *Broker) remove(id string) {
	if _, ok := b.consumer[id]; ok {
		delete(b.consumer, id)
		b.send(protocol.RoleRequester, protocol.Event{Type: protocol.EventDelete, ID: id})
	}
	if _, ok := b.provider[id]; ok {
		delete(b.provider, id)
		b.send(protocol.RoleProvider, protocol.Event{Type: protocol.EventDelete, ID: id})
	}
}

// Deliver streams a relayed message.
func (b *Broker) Deliver(message protocol.RelayMessage) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.send("", protocol.Event{Type: protocol.EventPut, Relay: []protocol.RelayMessage{message}})
}

// Down breaks all streams until Up.
func (b *Broker) Down() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.up = false
	b.reconnect()
}

// Up lets streams reconnect.
func (b *Broker) Up() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.up = true
	b.reconnect()
}

// Empty removes every reservation and hold without an event; the next Relist
// shows it.
func (b *Broker) Empty() {
	b.mu.Lock()
	defer b.mu.Unlock()
	clear(b.consumer)
	clear(b.provider)
}

func (b *Broker) reconnect() {
	for s := range b.streams {
		close(s.events)
	}
	clear(b.streams)
	close(b.changed)
	b.changed = make(chan struct{})
}

func (b *Broker) send(role protocol.Role, event protocol.Event) {
	for s := range b.streams {
		if s.role == role {
			s.events <- event
		}
	}
}

// call records a call and returns its result.
func (b *Broker) call(method, id string, argument any) error {
	b.calls = append(b.calls, Call{Method: method, ID: id, Argument: argument})
	return b.failures[method]
}

// PublishAdvertisement records the advertisement.
func (b *Broker) PublishAdvertisement(_ context.Context, spec broker.ClusterAdvertisementSpec) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	err := b.call("PublishAdvertisement", spec.ClusterID, spec)
	if err == nil {
		b.advertised = protocol.Digest(spec)
	}
	return err
}

// Beat reports whether the digest is that of the last advertisement.
func (b *Broker) Beat(_ context.Context, beat protocol.Beat) (known bool, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return beat.Digest == b.advertised, b.call("Beat", b.clusterID, beat)
}

// Advertised is the digest of the last advertisement that was accepted, "" if there is none.
func (b *Broker) Advertised() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.advertised
}

// ForgetAdvertisement makes the broker know no advertisement.
func (b *Broker) ForgetAdvertisement() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.advertised = ""
}

// PutReservation stores the request as a pending reservation.
func (b *Broker) PutReservation(_ context.Context, request protocol.ReservationRequest) (protocol.ConsumerView, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	id := protocol.ReservationID(b.clusterID, request.SourceUID)
	if err := b.call("PutReservation", id, request); err != nil {
		return protocol.ConsumerView{}, err
	}
	view, exists := b.consumer[id]
	if !exists {
		view.Status.Phase = broker.ReservationPending
	}
	view.ID, view.SourceUID, view.SourceNamespace, view.SourceName = id, request.SourceUID, request.SourceNamespace, request.SourceName
	view.SourceGeneration, view.Spec = request.SourceGeneration, request.Spec
	b.consumer[id] = view
	b.send(protocol.RoleRequester, protocol.Event{Type: protocol.EventPut, Consumer: []protocol.ConsumerView{view}})
	return copied(view), nil
}

// DeleteReservation removes the reservation, or releases it with SlowDelete.
func (b *Broker) DeleteReservation(_ context.Context, id string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.call("DeleteReservation", id, nil); err != nil {
		return err
	}
	view, exists := b.consumer[id]
	if !exists {
		return nil
	}
	if !b.slowDelete {
		b.remove(id)
		return nil
	}
	view.Status.Phase, view.Status.Allocations = broker.ReservationReleased, nil
	b.consumer[id] = view
	b.send(protocol.RoleRequester, protocol.Event{Type: protocol.EventPut, Consumer: []protocol.ConsumerView{view}})
	return nil
}

// AckProvider records the ack.
func (b *Broker) AckProvider(_ context.Context, id string, ack protocol.ProviderAck) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.call("AckProvider", id, ack)
}

// AckRequester records the ack.
func (b *Broker) AckRequester(_ context.Context, id string, ack protocol.RequesterAck) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.call("AckRequester", id, ack)
}

// Renew records the renewal.
func (b *Broker) Renew(_ context.Context, id string, uid types.UID) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.call("Renew", id, uid)
}

// Relay records the message; Deliver delivers one.
func (b *Broker) Relay(_ context.Context, message protocol.RelayMessage) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.call("Relay", message.To, message)
}

// Watch implements transport.Watcher.
func (b *Broker) Watch(ctx context.Context, role protocol.Role, handle func(protocol.Event)) {
	for ctx.Err() == nil {
		b.mu.Lock()
		changed, up := b.changed, b.up
		s := &stream{role: role, events: make(chan protocol.Event, 1024)}
		relist := protocol.Event{Type: protocol.EventRelist}
		if up {
			b.streams[s] = struct{}{}
			switch role {
			case protocol.RoleRequester:
				for _, view := range b.consumer {
					relist.Consumer = append(relist.Consumer, view)
				}
			case protocol.RoleProvider:
				for _, view := range b.provider {
					relist.Provider = append(relist.Provider, view)
				}
			}
		}
		b.mu.Unlock()
		if !up {
			select {
			case <-changed:
			case <-ctx.Done():
			}
			continue
		}
		handle(copied(relist))
		b.follow(ctx, s, handle)
	}
}

func (b *Broker) follow(ctx context.Context, s *stream, handle func(protocol.Event)) {
	defer func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.streams, s)
	}()
	for {
		select {
		case event, ok := <-s.events:
			if !ok {
				return
			}
			handle(copied(event))
		case <-ctx.Done():
			return
		}
	}
}

// copied returns a deep copy by way of JSON, as the wire does.
func copied[T any](value T) T {
	text, err := json.Marshal(value)
	if err != nil {
		panic(err)
	}
	var out T
	if err := json.Unmarshal(text, &out); err != nil {
		panic(err)
	}
	return out
}
