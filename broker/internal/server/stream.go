package server

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/spillway-dev/spillway/broker/internal/server/stream"
	"github.com/spillway-dev/spillway/broker/protocol"
)

const (
	// writeTimeout is the timeout of a write to a subscriber.
	writeTimeout = 10 * time.Second
	// coalescePeriod is the minimum time between two reads of the changed views. A change
	// after a quiet period is sent at once.
	coalescePeriod = 20 * time.Millisecond
)

func watching(r *http.Request) bool { return r.URL.Query().Get("watch") == "true" }

// stream serves a source until the caller or the broker ends it.
func (s *Server) stream(w http.ResponseWriter, r *http.Request, caller string, role protocol.Role, source stream.Source) error {
	// Before the first list, so that no change is missed between the two.
	subscription := s.broadcaster.Subscribe(caller, role, s.Store.Settings().StreamsPerCluster)
	defer subscription.Close()
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
func (s *Server) relist(caller string, source stream.Source, subscription *stream.Subscription) ([]protocol.Event, error) {
	if err := s.beginList(caller); err != nil {
		return nil, err
	}
	events, err := source.Events(subscription)
	if err != nil {
		s.listsInProgress.End(caller)
	}
	return events, err
}

// writeEvents writes the further events of the source, until the caller disconnects, the server
// stops, or the caller is not authorized any more.
func (s *Server) writeEvents(w http.ResponseWriter, r *http.Request, subscription *stream.Subscription, source stream.Source) error {
	ctx := r.Context()
	heartbeat := s.Clock.NewTicker(protocol.HeartbeatSeconds * time.Second)
	defer heartbeat.Stop()
	for {
		var events []protocol.Event
		readAt := s.Clock.Now()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-s.stopping:
			return http.ErrServerClosed
		case <-subscription.Dropped:
			return errors.New("the cluster has opened more streams than its quota")
		case <-heartbeat.C():
			// The registration may have been deleted.
			if _, err := s.Identity.Authenticate(ctx, r.TLS); err != nil {
				return err
			}
			events = []protocol.Event{{Type: protocol.EventHeartbeat}}
		case <-subscription.Changed:
			if rest := coalescePeriod - s.Clock.Since(readAt); rest > 0 {
				select {
				case <-ctx.Done():
					return ctx.Err()
				case <-s.Clock.After(rest):
				}
			}
			var err error
			if events, err = source.Events(subscription); err != nil {
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
