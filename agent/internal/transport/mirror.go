package transport

import (
	"context"
	"sync"

	"github.com/spillway-dev/spillway/broker/protocol"
)

// Watcher streams events from the broker.
type Watcher interface {
	// Watch streams the reservations of a role, or relayed messages for role "",
	// and blocks until ctx ends. It reconnects by itself; each connection begins
	// with a Relist. Calls of handle do not overlap.
	Watch(ctx context.Context, role protocol.Role, handle func(protocol.Event))
}

// Mirror is a local copy of the views that the broker streams for one role, so
// that controllers reconcile against state instead of events. A broken stream
// leaves it unchanged: a view is removed only by a Relist or Delete event.
type Mirror[View any] struct {
	watcher Watcher
	role    protocol.Role
	views   func(protocol.Event) []View
	id      func(View) string

	mu          sync.Mutex
	synced      bool
	byID        map[string]View
	subscribers []func(Change[View])
}

// Change is the effect of one event on a Mirror.
type Change[View any] struct {
	// Views that were added, updated or removed, in their last known state.
	Views []View
	// Relisted is set when the mirror was replaced as a whole: a reservation that
	// is not in it does not exist at the broker.
	Relisted bool
}

// NewConsumerMirror mirrors the reservations of this cluster.
func NewConsumerMirror(watcher Watcher) *Mirror[protocol.ConsumerView] {
	return &Mirror[protocol.ConsumerView]{
		watcher: watcher, role: protocol.RoleRequester,
		views: func(e protocol.Event) []protocol.ConsumerView { return e.Consumer },
		id:    func(v protocol.ConsumerView) string { return v.ID },
		byID:  map[string]protocol.ConsumerView{},
	}
}

// NewProviderMirror mirrors the holds at this cluster.
func NewProviderMirror(watcher Watcher) *Mirror[protocol.ProviderView] {
	return &Mirror[protocol.ProviderView]{
		watcher: watcher, role: protocol.RoleProvider,
		views: func(e protocol.Event) []protocol.ProviderView { return e.Provider },
		id:    func(v protocol.ProviderView) string { return v.ID },
		byID:  map[string]protocol.ProviderView{},
	}
}

// Start watches the broker until ctx ends.
func (m *Mirror[View]) Start(ctx context.Context) error {
	m.watcher.Watch(ctx, m.role, m.handle)
	return nil
}

// Synced reports whether the first Relist was received. Until then the absence
// of a view has no meaning.
func (m *Mirror[View]) Synced() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.synced
}

// Get returns the view with the ID of a reservation at the broker.
func (m *Mirror[View]) Get(id string) (View, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	view, ok := m.byID[id]
	return view, ok
}

// Select returns the views that match, in random order.
func (m *Mirror[View]) Select(match func(View) bool) []View {
	m.mu.Lock()
	defer m.mu.Unlock()
	var selected []View
	for _, view := range m.byID {
		if match(view) {
			selected = append(selected, view)
		}
	}
	return selected
}

// Subscribe calls changed after each event; if the mirror is synced already, it
// first calls changed with all views. Changed must not block or call the mirror.
func (m *Mirror[View]) Subscribe(changed func(Change[View])) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.subscribers = append(m.subscribers, changed)
	if m.synced {
		change := Change[View]{Relisted: true}
		for _, view := range m.byID {
			change.Views = append(change.Views, view)
		}
		changed(change)
	}
}

func (m *Mirror[View]) handle(event protocol.Event) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var change Change[View]
	switch event.Type {
	case protocol.EventRelist:
		before := m.byID
		m.byID, m.synced, change.Relisted = map[string]View{}, true, true
		for _, view := range m.views(event) {
			m.byID[m.id(view)] = view
			change.Views = append(change.Views, view)
		}
		for id, view := range before {
			if _, exists := m.byID[id]; !exists {
				change.Views = append(change.Views, view)
			}
		}
	case protocol.EventPut:
		for _, view := range m.views(event) {
			m.byID[m.id(view)] = view
			change.Views = append(change.Views, view)
		}
	case protocol.EventDelete:
		view, ok := m.byID[event.ID]
		if !ok {
			return
		}
		delete(m.byID, event.ID)
		change.Views = append(change.Views, view)
	default:
		return
	}
	for _, changed := range m.subscribers {
		changed(change)
	}
}
