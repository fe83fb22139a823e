package transport

import (
	"context"
	"sync"

	"github.com/spillway-dev/spillway/broker/protocol"
)

// Mirror keeps what a role's stream has told last, so that controllers can work
// from what is, not from what happened. A broken stream changes nothing: only
// the broker's own word (a Relist or a Delete) makes a view disappear.
type Mirror[View any] struct {
	broker BrokerCommunicator
	role   protocol.Role
	views  func(protocol.Event) []View
	id     func(View) string

	mu          sync.Mutex
	synced      bool
	known       map[string]View
	subscribers []func(Change[View])
}

// Change is what one event of a stream changed.
type Change[View any] struct {
	// Views that were put or are gone: their last known state.
	Views []View
	// Relisted says that what is not in the mirror now is not at the broker
	// either, whoever remembers it.
	Relisted bool
}

// NewConsumerMirror mirrors the reservations of this cluster.
func NewConsumerMirror(broker BrokerCommunicator) *Mirror[protocol.ConsumerView] {
	return &Mirror[protocol.ConsumerView]{
		broker: broker, role: protocol.RoleRequester,
		views: func(e protocol.Event) []protocol.ConsumerView { return e.Consumer },
		id:    func(v protocol.ConsumerView) string { return v.ID },
		known: map[string]protocol.ConsumerView{},
	}
}

// NewProviderMirror mirrors the holds in this cluster.
func NewProviderMirror(broker BrokerCommunicator) *Mirror[protocol.ProviderView] {
	return &Mirror[protocol.ProviderView]{
		broker: broker, role: protocol.RoleProvider,
		views: func(e protocol.Event) []protocol.ProviderView { return e.Provider },
		id:    func(v protocol.ProviderView) string { return v.ID },
		known: map[string]protocol.ProviderView{},
	}
}

// Start follows the stream until ctx ends.
func (m *Mirror[View]) Start(ctx context.Context) error {
	m.broker.Watch(ctx, m.role, m.take)
	return nil
}

// NeedLeaderElection keeps the streams with the leader.
func (m *Mirror[View]) NeedLeaderElection() bool { return true }

// Synced reports whether the broker has told everything once. Before that, an
// absent view means nothing.
func (m *Mirror[View]) Synced() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.synced
}

// Get returns the view with a broker's ID.
func (m *Mirror[View]) Get(id string) (View, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	view, ok := m.known[id]
	return view, ok
}

// Select returns the views that match, in no order.
func (m *Mirror[View]) Select(match func(View) bool) []View {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []View
	for _, view := range m.known {
		if match(view) {
			out = append(out, view)
		}
	}
	return out
}

// Subscribe has changed called after every event, and once at the beginning if
// there is something to tell. It must not block and must not call the mirror.
func (m *Mirror[View]) Subscribe(changed func(Change[View])) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.subscribers = append(m.subscribers, changed)
	if m.synced {
		change := Change[View]{Relisted: true}
		for _, view := range m.known {
			change.Views = append(change.Views, view)
		}
		changed(change)
	}
}

func (m *Mirror[View]) take(event protocol.Event) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var change Change[View]
	switch event.Type {
	case protocol.EventRelist:
		before := m.known
		m.known, m.synced, change.Relisted = map[string]View{}, true, true
		for _, view := range m.views(event) {
			m.known[m.id(view)] = view
			change.Views = append(change.Views, view)
		}
		for id, view := range before {
			if _, still := m.known[id]; !still {
				change.Views = append(change.Views, view)
			}
		}
	case protocol.EventPut:
		for _, view := range m.views(event) {
			m.known[m.id(view)] = view
			change.Views = append(change.Views, view)
		}
	case protocol.EventDelete:
		view, ok := m.known[event.ID]
		if !ok {
			return
		}
		delete(m.known, event.ID)
		change.Views = append(change.Views, view)
	default:
		return
	}
	for _, changed := range m.subscribers {
		changed(change)
	}
}
