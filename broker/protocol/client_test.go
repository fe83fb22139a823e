package protocol

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"

	"github.com/spillway-dev/spillway/e2e/expect"
)

// serve starts a server and a client of it with short intervals.
func serve(t *testing.T, handler http.HandlerFunc) *Client {
	t.Helper()
	server := httptest.NewTLSServer(handler)
	t.Cleanup(server.Close)
	roots := x509.NewCertPool()
	roots.AddCert(server.Certificate())
	client, err := NewClient(server.URL, &tls.Config{RootCAs: roots}, logr.Discard())
	expect.NoError(t, err)
	t.Cleanup(client.Close)
	client.backoff, client.heartbeat = time.Millisecond, 150*time.Millisecond
	return client
}

func TestRetriesSendTheBodyAgain(t *testing.T) {
	var tries atomic.Int32
	bodies := make(chan string, callTries)
	client := serve(t, func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		bodies <- string(body)
		switch tries.Add(1) {
		case 1: // The connection breaks.
			panic(http.ErrAbortHandler)
		case 2:
			w.WriteHeader(http.StatusServiceUnavailable)
			_, _ = io.WriteString(w, `{"code":"Unavailable","message":"not yet"}`)
		}
	})
	expect.NoError(t, client.Relay(t.Context(), RelayMessage{To: "paris", ID: "1", Sealed: []byte("x")}))
	first := <-bodies
	for range callTries - 1 {
		if retried := <-bodies; retried != first || !strings.Contains(retried, "paris") {
			t.Fatalf("first %q was sent, then %q", first, retried)
		}
	}
}

func TestRefusalsAreNotRetried(t *testing.T) {
	var tries atomic.Int32
	client := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		tries.Add(1)
		w.WriteHeader(http.StatusForbidden)
		_, _ = io.WriteString(w, `{"code":"Forbidden","message":"no"}`)
	})
	err := client.AckProvider(t.Context(), "some", ProviderAck{})
	if !HasCode(err, CodeForbidden) || tries.Load() != 1 {
		t.Fatalf("got %v after %d tries", err, tries.Load())
	}
}

func TestServerIsNoBroker(t *testing.T) {
	client := serve(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusBadGateway) })
	err := client.Ping(t.Context())
	if err == nil || !strings.Contains(err.Error(), "502") {
		t.Fatalf("want the status in the error, got %v", err)
	}
	for _, url := range []string{"http://hub", "hub:8443", "https://", "https://hub?x=y"} {
		if _, err := NewClient(url, nil, logr.Discard()); err == nil {
			t.Errorf("%q was accepted as a broker's URL", url)
		}
	}
}

func TestWatchReconnects(t *testing.T) {
	const want = "Relist 1, Put more, Relist 2, Relist 6"
	var got string
	// A machine that stands still for longer than the client waits for a heartbeat costs a
	// connection: then the client waits for longer.
	for heartbeat := 150 * time.Millisecond; heartbeat < 10*time.Second; heartbeat *= 4 {
		if got = watched(t, heartbeat); got == want {
			return
		}
	}
	t.Fatalf("want %s, got %s", want, got)
}

// watched returns the events of a stream that breaks in several ways, and then lasts for
// longer than without heartbeats.
func watched(t *testing.T, heartbeat time.Duration) string {
	t.Helper()
	var connections atomic.Int32
	client := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("watch") != "true" {
			// Lists fail as well: there is nothing to poll.
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		n := connections.Add(1)
		send := func(event Event) {
			if err := json.NewEncoder(w).Encode(event); err == nil {
				_ = http.NewResponseController(w).Flush()
			}
		}
		relist := Event{Type: EventRelist, Consumer: []ConsumerView{{ID: fmt.Sprint(n)}}}
		switch n {
		case 1: // Ends.
			send(relist)
			send(Event{Type: EventPut, Consumer: []ConsumerView{{ID: "more"}}})
		case 2: // Sends nothing more and keeps the connection open.
			send(relist)
			<-r.Context().Done()
		case 3: // Does not begin with a Relist.
			send(Event{Type: EventDelete, ID: "never listed"})
		case 4: // Sends no event.
			_, _ = io.WriteString(w, "hello\n")
		case 5: // Refuses the client.
			w.WriteHeader(http.StatusUnauthorized)
		default: // Sends heartbeats.
			send(relist)
			heartbeat := time.NewTicker(10 * time.Millisecond)
			defer heartbeat.Stop()
			for r.Context().Err() == nil {
				<-heartbeat.C
				send(Event{Type: EventHeartbeat})
			}
		}
	})
	client.heartbeat = heartbeat
	ctx, cancel := context.WithTimeout(t.Context(), expect.Deadline)
	defer cancel()
	var got []string
	client.Watch(ctx, RoleRequester, func(event Event) {
		switch event.Type {
		case EventRelist, EventPut:
			got = append(got, string(event.Type)+" "+event.Consumer[0].ID)
		default:
			got = append(got, string(event.Type))
		}
		if len(got) == 4 {
			// Long enough that only heartbeats keep the stream open.
			time.AfterFunc(5*client.heartbeat, cancel)
		}
	})
	return strings.Join(got, ", ")
}

func TestReservationIDs(t *testing.T) {
	const uid = "4c6a0c5e-6f0d-4c2f-9a38-8f6a2a0d1c11"
	if got := ReservationID("rome", uid); got != "rome-"+uid {
		t.Fatalf("got %s", got)
	}
	long := strings.Repeat("r", MaxClusterID)
	got, other := ReservationID(long, uid), ReservationID(long[1:]+"s", uid)
	if len(got) > 63 || got == other || !strings.HasSuffix(got, "-"+uid) {
		t.Fatalf("got %s and %s", got, other)
	}
}

// TestRetryAfter: a call that is over a limit is repeated no sooner than the broker says,
// and not at all if that is long or not stated.
func TestRetryAfter(t *testing.T) {
	for name, tc := range map[string]struct {
		header string
		calls  int32
		after  time.Duration
	}{
		"soon":       {"1", 2, time.Second},
		"late":       {"3600", 1, time.Hour},
		"not stated": {"", 1, 0},
		"not a time": {"x", 1, 0},
	} {
		t.Run(name, func(t *testing.T) {
			var calls atomic.Int32
			var first time.Time
			client := serve(t, func(w http.ResponseWriter, _ *http.Request) {
				if calls.Add(1) == 1 {
					first = time.Now()
					w.Header().Set("Retry-After", tc.header)
					w.WriteHeader(http.StatusTooManyRequests)
					_, _ = io.WriteString(w, `{"code":"TooMany","message":"slower"}`)
				} else if waited := time.Since(first); waited < tc.after {
					t.Errorf("the call was repeated after %s", waited)
				}
			})
			err := client.Renew(t.Context(), "some", "uid")
			var refusal *Error
			if tc.calls == 1 && (!errors.As(err, &refusal) || refusal.RetryAfter != tc.after) || tc.calls > 1 && err != nil {
				t.Errorf("got %v", err)
			}
			if calls.Load() != tc.calls {
				t.Errorf("%d calls, want %d", calls.Load(), tc.calls)
			}
		})
	}
}
