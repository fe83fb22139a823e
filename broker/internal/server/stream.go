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
	// writeTimeout is what a subscriber gets to take an event in.
	writeTimeout = 10 * time.Second
	// coalesce is how long changes are gathered before views are listed.
	coalesce = 20 * time.Millisecond
)

func watching(r *http.Request) bool { return r.URL.Query().Get("watch") == "true" }

// source is what a stream shows: events lists what changed since it was last
// asked, and all there is, as a Relist, the first time.
type source interface {
	events(ctx context.Context, subscription *subscription) ([]protocol.Event, error)
}

// stream serves a source until the caller or the broker ends it.
func (s *Server) stream(w http.ResponseWriter, r *http.Request, caller string, role protocol.Role, source source) error {
	// Before the first listing, so that no change falls between the two.
	subscription := s.hub.subscribe(caller, role)
	defer s.hub.unsubscribe(subscription)
	events, err := source.events(r.Context(), subscription)
	if err != nil {
		return err
	}
	control := http.NewResponseController(w)
	if err := control.SetReadDeadline(time.Time{}); err != nil {
		return fmt.Errorf("opening a stream: %w", err)
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("Connection", "close")
	w.WriteHeader(http.StatusOK)
	log := s.Log.WithValues("cluster", caller, "role", role)
	log.V(1).Info("A stream began")
	if err := s.follow(w, r, subscription, source, events); err != nil {
		log.V(1).Info("A stream ended", "reason", err.Error())
	}
	// The answer has begun: it can only end, which tells the caller enough.
	return nil
}

// follow writes events, those first, until something ends the stream.
func (s *Server) follow(w http.ResponseWriter, r *http.Request, subscription *subscription, source source, events []protocol.Event) error {
	ctx := r.Context()
	beat := time.NewTicker(s.heartbeat)
	defer beat.Stop()
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
			return fmt.Errorf("the cluster has more than %d streams", maxStreams)
		case <-beat.C:
			// A cluster whose registration is gone hears no more.
			if _, err := s.Identity.Authenticate(ctx, r.TLS); err != nil {
				return err
			}
			events = []protocol.Event{{Type: protocol.EventHeartbeat}}
		case <-subscription.changed:
			if err := pause(ctx, coalesce); err != nil {
				return err
			}
			var err error
			if events, err = source.events(ctx, subscription); err != nil {
				return err
			}
		}
	}
}

// write sends events, each a line, within writeTimeout.
func write(w http.ResponseWriter, events []protocol.Event) error {
	if len(events) == 0 {
		return nil
	}
	control := http.NewResponseController(w)
	if err := control.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return fmt.Errorf("setting a write's deadline: %w", err)
	}
	encoder := json.NewEncoder(w)
	for _, event := range events {
		if err := encoder.Encode(event); err != nil {
			return fmt.Errorf("writing an event: %w", err)
		}
	}
	if err := control.Flush(); err != nil {
		return fmt.Errorf("writing an event: %w", err)
	}
	return nil
}

func pause(ctx context.Context, length time.Duration) error {
	timer := time.NewTimer(length)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}

// tracker is a source of views. It keeps a hash of each view it has shown.
type tracker[V any] struct {
	list func(ctx context.Context) ([]V, error)
	id   func(V) string
	wrap func([]V) protocol.Event

	shown map[string][sha256.Size]byte
}

func (t *tracker[V]) events(ctx context.Context, _ *subscription) ([]protocol.Event, error) {
	views, err := t.list(ctx)
	if err != nil {
		return nil, err
	}
	shown := make(map[string][sha256.Size]byte, len(views))
	var changed []V
	for _, view := range views {
		encoded, err := json.Marshal(view)
		if err != nil {
			return nil, fmt.Errorf("encoding a view: %w", err)
		}
		id, hash := t.id(view), sha256.Sum256(encoded)
		shown[id] = hash
		if before, known := t.shown[id]; !known || before != hash {
			changed = append(changed, view)
		}
	}
	before := t.shown
	t.shown = shown
	event := t.wrap(changed)
	if before == nil {
		event.Type = protocol.EventRelist
		return []protocol.Event{event}, nil
	}
	var events []protocol.Event
	for id := range before {
		if _, still := shown[id]; !still {
			events = append(events, protocol.Event{Type: protocol.EventDelete, ID: id})
		}
	}
	if len(changed) > 0 {
		event.Type = protocol.EventPut
		events = append(events, event)
	}
	return events, nil
}
