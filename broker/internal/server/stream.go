package server

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"github.com/spillway-dev/spillway/broker/protocol"
)

const (
	// writeTimeout is the timeout of a write to a subscriber.
	writeTimeout = 10 * time.Second
	// coalesceDelay is the delay from a change to listing the views, which then include
	// further changes.
	coalesceDelay = 20 * time.Millisecond
)

func watching(r *http.Request) bool { return r.URL.Query().Get("watch") == "true" }

// source is the content of a stream: its first call of events returns a Relist, each
// further call the changes since the last.
type source interface {
	events(ctx context.Context, subscription *subscription) ([]protocol.Event, error)
}

// stream serves a source until the caller or the broker ends it.
func (s *Server) stream(w http.ResponseWriter, r *http.Request, caller string, role protocol.Role, source source) error {
	// Before the first list, so that no change is missed between the two.
	subscription := s.broadcaster.subscribe(caller, role)
	defer s.broadcaster.unsubscribe(subscription)
	events, err := source.events(r.Context(), subscription)
	if err != nil {
		return err
	}
	control := http.NewResponseController(w)
	if err := control.SetReadDeadline(time.Time{}); err != nil {
		return fmt.Errorf("opening stream: %w", err)
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("Connection", "close")
	w.WriteHeader(http.StatusOK)
	log := s.Log.WithValues("cluster", caller, "role", role)
	log.V(1).Info("Stream opened")
	if err := s.writeEvents(w, r, subscription, source, events); err != nil {
		log.V(1).Info("Stream closed", "reason", err.Error())
	}
	// The response has begun: an error cannot be sent any more.
	return nil
}

// writeEvents writes the given events and then those of the source, until the caller
// disconnects, the server stops, or the caller is not authorized any more.
func (s *Server) writeEvents(w http.ResponseWriter, r *http.Request, subscription *subscription, source source, events []protocol.Event) error {
	ctx := r.Context()
	heartbeat := time.NewTicker(s.heartbeat)
	defer heartbeat.Stop()
	for {
		if err := write(w, events); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-s.stopping:
			return http.ErrServerClosed
		case <-subscription.dropped:
			return fmt.Errorf("the cluster has opened more than %d streams", maxStreams)
		case <-heartbeat.C:
			// The registration may have been deleted.
			if _, err := s.Identity.Authenticate(ctx, r.TLS); err != nil {
				return err
			}
			events = []protocol.Event{{Type: protocol.EventHeartbeat}}
		case <-subscription.changed:
			if err := sleep(ctx, coalesceDelay); err != nil {
				return err
			}
			var err error
			if events, err = source.events(ctx, subscription); err != nil {
				return err
			}
		}
	}
}

// write writes events, one per line, within writeTimeout.
func write(w http.ResponseWriter, events []protocol.Event) error {
	if len(events) == 0 {
		return nil
	}
	control := http.NewResponseController(w)
	if err := control.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return fmt.Errorf("setting the write deadline: %w", err)
	}
	encoder := json.NewEncoder(w)
	for _, event := range events {
		if err := encoder.Encode(event); err != nil {
			return fmt.Errorf("writing event: %w", err)
		}
	}
	if err := control.Flush(); err != nil {
		return fmt.Errorf("writing event: %w", err)
	}
	return nil
}

func sleep(ctx context.Context, duration time.Duration) error {
	timer := time.NewTimer(duration)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}

// tracker is a source of views. It keeps a hash of each view that it has returned.
type tracker[V any] struct {
	list func(ctx context.Context) ([]V, error)
	id   func(V) string
	wrap func([]V) protocol.Event

	sent map[string][sha256.Size]byte
}

func (t *tracker[V]) events(ctx context.Context, _ *subscription) ([]protocol.Event, error) {
	views, err := t.list(ctx)
	if err != nil {
		return nil, err
	}
	current := make(map[string][sha256.Size]byte, len(views))
	var changed []V
	for _, view := range views {
		encoded, err := json.Marshal(view)
		if err != nil {
			return nil, fmt.Errorf("encoding view: %w", err)
		}
		id, hash := t.id(view), sha256.Sum256(encoded)
		current[id] = hash
		if before, known := t.sent[id]; !known || before != hash {
			changed = append(changed, view)
		}
	}
	before := t.sent
	t.sent = current
	event := t.wrap(changed)
	if before == nil {
		event.Type = protocol.EventRelist
		return []protocol.Event{event}, nil
	}
	var events []protocol.Event
	for id := range before {
		if _, exists := current[id]; !exists {
			events = append(events, protocol.Event{Type: protocol.EventDelete, ID: id})
		}
	}
	if len(changed) > 0 {
		event.Type = protocol.EventPut
		events = append(events, event)
	}
	return events, nil
}
