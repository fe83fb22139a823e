package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/maphash"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/spillway-dev/spillway/broker/protocol"
)

const (
	// writeTimeout is the timeout of a write to a subscriber.
	writeTimeout = 10 * time.Second
	// coalescePeriod is the minimum time between two reads of the changed views. A change
	// after a quiet period is sent at once.
	coalescePeriod = 20 * time.Millisecond
	// maxPut is the maximum number of views in one Put.
	maxPut = 100
)

func watching(r *http.Request) bool { return r.URL.Query().Get("watch") == "true" }

// source is the content of a stream: its first call of events returns a Relist, each
// further call the changes since the last.
type source interface {
	events(subscription *subscription) ([]protocol.Event, error)
}

// stream serves a source until the caller or the broker ends it.
func (s *Server) stream(w http.ResponseWriter, r *http.Request, caller string, role protocol.Role, source source) error {
	// Before the first list, so that no change is missed between the two.
	subscription := s.broadcaster.subscribe(caller, role, s.quotas().streams)
	defer s.broadcaster.unsubscribe(subscription)
	events, err := s.relist(caller, source, subscription)
	if err != nil {
		return err
	}
	listed := sync.OnceFunc(func() { s.listsInProgress.End(caller) })
	defer listed()
	control := http.NewResponseController(w)
	if err := supported(control.SetReadDeadline(time.Time{})); err != nil {
		return fmt.Errorf("opening stream: %w", err)
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("Connection", "close")
	w.WriteHeader(http.StatusOK)
	log := s.Log.WithValues("cluster", caller, "role", role)
	log.V(1).Info("Stream opened")
	err = s.write(w, events)
	listed()
	if err == nil {
		err = s.writeEvents(w, r, subscription, source)
	}
	if err != nil {
		log.V(1).Info("Stream closed", "reason", err.Error())
	}
	// The response has begun: an error cannot be sent any more.
	return nil
}

// relist returns the first events of a stream, which count as a list in progress of the caller.
func (s *Server) relist(caller string, source source, subscription *subscription) ([]protocol.Event, error) {
	if err := s.beginList(caller); err != nil {
		return nil, err
	}
	events, err := source.events(subscription)
	if err != nil {
		s.listsInProgress.End(caller)
	}
	return events, err
}

// writeEvents writes the further events of the source, until the caller disconnects, the server
// stops, or the caller is not authorized any more.
func (s *Server) writeEvents(w http.ResponseWriter, r *http.Request, subscription *subscription, source source) error {
	ctx := r.Context()
	heartbeat := s.Clock.NewTicker(s.heartbeat)
	defer heartbeat.Stop()
	for {
		var events []protocol.Event
		readAt := s.Clock.Now()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-s.stopping:
			return http.ErrServerClosed
		case <-subscription.dropped:
			return errors.New("the cluster has opened more streams than its quota")
		case <-heartbeat.C():
			// The registration may have been deleted.
			if _, err := s.Identity.Authenticate(ctx, r.TLS); err != nil {
				return err
			}
			events = []protocol.Event{{Type: protocol.EventHeartbeat}}
		case <-subscription.changed:
			if err := s.sleep(ctx, coalescePeriod-s.Clock.Since(readAt)); err != nil {
				return err
			}
			var err error
			if events, err = source.events(subscription); err != nil {
				return err
			}
		}
		if err := s.write(w, events); err != nil {
			return err
		}
	}
}

// write writes events, one per line, within writeTimeout.
func (s *Server) write(w http.ResponseWriter, events []protocol.Event) error {
	if len(events) == 0 {
		return nil
	}
	control := http.NewResponseController(w)
	if err := supported(control.SetWriteDeadline(s.Clock.Now().Add(writeTimeout))); err != nil {
		return fmt.Errorf("setting the write deadline: %w", err)
	}
	encoder := json.NewEncoder(w)
	for _, event := range events {
		if err := encoder.Encode(event); err != nil {
			return fmt.Errorf("writing event: %w", err)
		}
		streamEvents.WithLabelValues(string(event.Type)).Inc()
	}
	if err := control.Flush(); err != nil {
		return fmt.Errorf("writing event: %w", err)
	}
	return nil
}

// supported ignores that a response writer in memory has no deadlines.
func supported(err error) error {
	if errors.Is(err, http.ErrNotSupported) {
		return nil
	}
	return err
}

func (s *Server) sleep(ctx context.Context, duration time.Duration) error {
	if duration <= 0 {
		return nil
	}
	timer := s.Clock.NewTimer(duration)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C():
		return nil
	}
}

// tracker is a source of views. It keeps a hash of each view that it has returned.
type tracker[V any] struct {
	// list returns all views, get those with an ID.
	list func() []V
	get  func(id string) []V
	id   func(V) string
	wrap func([]V) protocol.Event

	seed maphash.Seed
	sent map[string]uint64
}

func (t *tracker[V]) events(subscription *subscription) ([]protocol.Event, error) {
	ids, all := subscription.take()
	relist := t.sent == nil
	if relist {
		t.seed, t.sent = maphash.MakeSeed(), map[string]uint64{}
	}
	views := map[string][]V{}
	if all || relist {
		ids = sortedKeys(t.sent)
		for _, view := range t.list() {
			views[t.id(view)] = append(views[t.id(view)], view)
		}
		for id := range views {
			if _, known := t.sent[id]; !known {
				ids = append(ids, id)
			}
		}
		slices.Sort(ids)
	} else {
		for _, id := range ids {
			views[id] = t.get(id)
		}
	}
	return t.compare(ids, views, relist)
}

// compare returns the events for the views of ids, as far as they differ from what was
// sent.
func (t *tracker[V]) compare(ids []string, views map[string][]V, relist bool) ([]protocol.Event, error) {
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
		event := t.wrap(changed)
		event.Type = protocol.EventRelist
		return []protocol.Event{event}, nil
	}
	for some := range slices.Chunk(changed, maxPut) {
		event := t.wrap(some)
		event.Type = protocol.EventPut
		events = append(events, event)
	}
	return events, nil
}
