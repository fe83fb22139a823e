package stream

import (
	"encoding/json"
	"fmt"
	"hash/maphash"
	"maps"
	"slices"

	"github.com/spillway-dev/spillway/broker/protocol"
)

// maxPut is the maximum number of views in one Put.
const maxPut = 100

// Source is the content of a stream: its first call of Events returns a Relist, each
// further call the changes since the last.
type Source interface {
	Events(subscription *Subscription) ([]protocol.Event, error)
}

// Tracker is a Source of views. It keeps a hash of each view that it has returned.
type Tracker[V any] struct {
	// Views returns the views with an ID, all if it is empty.
	Views func(id string) []V
	ID    func(V) string
	// Wrap returns an event with views.
	Wrap func([]V) protocol.Event

	seed maphash.Seed
	sent map[string]uint64
}

// Events implements Source.
func (t *Tracker[V]) Events(subscription *Subscription) ([]protocol.Event, error) {
	ids, all := subscription.Take()
	relist := t.sent == nil
	if relist {
		t.seed, t.sent = maphash.MakeSeed(), map[string]uint64{}
	}
	views := map[string][]V{}
	if all || relist {
		ids = slices.Collect(maps.Keys(t.sent))
		for _, view := range t.Views("") {
			views[t.ID(view)] = append(views[t.ID(view)], view)
		}
		for id := range views {
			if _, known := t.sent[id]; !known {
				ids = append(ids, id)
			}
		}
		slices.Sort(ids)
	} else {
		for _, id := range ids {
			views[id] = t.Views(id)
		}
	}
	return t.compare(ids, views, relist)
}

// compare returns the events for the views of ids, as far as they differ from what was
// sent.
func (t *Tracker[V]) compare(ids []string, views map[string][]V, relist bool) ([]protocol.Event, error) {
	var events []protocol.Event
	var changed []V
	for _, id := range ids {
		before, known := t.sent[id]
		if len(views[id]) == 0 {
			if known {
				delete(t.sent, id)
				events = append(events, protocol.Event{Type: protocol.EventDelete, ID: id})
			}
			continue
		}
		encoded, err := json.Marshal(views[id])
		if err != nil {
			return nil, fmt.Errorf("encoding view: %w", err)
		}
		if hash := maphash.Bytes(t.seed, encoded); !known || hash != before {
			t.sent[id] = hash
			changed = append(changed, views[id]...)
		}
	}
	if relist {
		event := t.Wrap(changed)
		event.Type = protocol.EventRelist
		return []protocol.Event{event}, nil
	}
	for some := range slices.Chunk(changed, maxPut) {
		event := t.Wrap(some)
		event.Type = protocol.EventPut
		events = append(events, event)
	}
	return events, nil
}
