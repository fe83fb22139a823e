package server

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/spillway-dev/spillway/broker/internal/server/limits"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestListsAreLimited: a list, and the beginning of a stream, cost the broker as much as
// there are objects. They have a limit below that of all calls.
func TestListsAreLimited(t *testing.T) {
	for _, path := range []string{
		protocol.PathAdvertisements, protocol.PathReservations + "?role=requester", protocol.PathReservations + "?role=provider",
	} {
		clock := clocktesting.NewFakeClock(start)
		m := newMemoryAt(logr.Discard(), clock)
		accepted := 0
		const seconds, calls = 20, 50
		for range seconds {
			clock.Step(time.Second)
			for range calls {
				got := m.call(http.MethodGet, path, "", "rome")
				if got.status == http.StatusOK {
					accepted++
				} else if got.expect(t, http.StatusTooManyRequests, "lists"); got.header.Get("Retry-After") == "" {
					t.Fatal("there is no Retry-After")
				}
			}
		}
		if accepted > 300 {
			t.Errorf("%s: %d of %d calls were accepted in %d s", path, accepted, seconds*calls, seconds)
		}
		if got := m.call(http.MethodGet, path, "", "paris"); got.status != http.StatusOK {
			t.Errorf("%s: another cluster got %d", path, got.status)
		}
	}
}

// TestUnreadLists: what a cluster does not read takes memory of the broker, so there is little
// of it. That of a stream is its first list.
func TestUnreadLists(t *testing.T) {
	for path, open := range map[string]func(protocol.Role) string{
		"list": func(role protocol.Role) string { return protocol.PathReservations + "?role=" + string(role) },
		"stream": func(role protocol.Role) string {
			return protocol.PathReservations + "?watch=true&role=" + string(role)
		},
	} {
		t.Run(path, func(t *testing.T) {
			m := newMemory(t, logr.Discard())
			var ended sync.WaitGroup
			ctx, cancel := context.WithCancel(t.Context())
			slow := &unread{statuses: make(chan int, 20), read: make(chan struct{})}
			for range 2 * maxLists {
				ended.Go(func() {
					m.Handler().ServeHTTP(slow, m.request(http.MethodGet, open(protocol.RoleRequester), "", "rome").WithContext(ctx))
				})
			}
			got := map[int]int{}
			for range 2 * maxLists {
				select {
				case status := <-slow.statuses:
					got[status]++
				case <-time.After(time.Minute):
					t.Fatalf("no further answer after %v", got)
				}
			}
			if want := map[int]int{http.StatusOK: maxLists, http.StatusTooManyRequests: maxLists}; !maps.Equal(got, want) {
				t.Errorf("answers by status %v, want %v", got, want)
			}
			if got := m.call(http.MethodGet, protocol.PathReservations+"?role=provider", "", "rome"); got.status != http.StatusTooManyRequests {
				t.Errorf("one more list got %d", got.status)
			}
			if got := m.call(http.MethodGet, protocol.PathAdvertisements, "", "paris"); got.status != http.StatusOK {
				t.Errorf("another cluster got %d", got.status)
			}
			close(slow.read)
			expect.Eventually(t, "lists to be possible again", func() (bool, string) {
				got := m.call(http.MethodGet, protocol.PathAdvertisements, "", "rome")
				return got.status == http.StatusOK, string(got.body)
			})
			cancel()
			ended.Wait()
		})
	}
}

// unread is a response that is not read until read is closed, unless it is an error.
type unread struct {
	statuses chan int
	read     chan struct{}
}

func (u *unread) Header() http.Header  { return http.Header{} }
func (u *unread) WriteHeader(code int) { u.statuses <- code }
func (u *unread) FlushError() error    { return nil }
func (u *unread) Write(b []byte) (int, error) {
	if !bytes.Contains(b, []byte(protocol.CodeTooMany)) {
		<-u.read
	}
	return len(b), nil
}

// TestCallsInProgress: a cluster whose calls do not end gets no further ones, also if it
// calls them streams.
func TestCallsInProgress(t *testing.T) {
	m := newMemory(t, logr.Discard())
	gate := make(chan struct{})
	m.agents.gates = map[string]chan struct{}{"rome": gate}
	const calls = 100
	answers := make(chan answer, calls)
	for range calls {
		go func() {
			answers <- m.call(http.MethodPost, protocol.PathReservations+"/some/ack?role=provider&watch=true", `{"attempt":1}`, "rome")
		}()
	}
	refused := 0
	expect.Eventually(t, "most calls to be refused", func() (bool, string) {
		select {
		case got := <-answers:
			got.expect(t, http.StatusTooManyRequests, "in progress")
			refused++
		default:
		}
		return refused == calls-maxCalls, fmt.Sprint(refused)
	})
	if got := m.call(http.MethodGet, protocol.PathAdvertisements, "", "paris"); got.status != http.StatusOK {
		t.Errorf("another cluster got %d", got.status)
	}
	close(gate)
	for range maxCalls {
		if got := <-answers; got.status != http.StatusNoContent {
			t.Errorf("got %d %s", got.status, got.body)
		}
	}
	if got := m.call(http.MethodGet, protocol.PathAdvertisements, "", "rome"); got.status != http.StatusOK {
		t.Errorf("afterwards, a call got %d", got.status)
	}
}

// TestBodiesAreLimited: a call takes no larger body than it needs, and large
// advertisements are accepted less often.
func TestBodiesAreLimited(t *testing.T) {
	clock := clocktesting.NewFakeClock(start)
	m := newMemoryAt(logr.Discard(), clock)
	large := `{"message":"` + strings.Repeat("x", 512<<10) + `"}`
	for _, route := range m.routes() {
		if route.method != http.MethodPost || route.path == protocol.PathAdvertisements {
			continue
		}
		clock.Step(time.Minute)
		path := strings.ReplaceAll(route.path, "{id}", "some") + "?role=requester"
		m.call(route.method, path, large, "rome").expect(t, http.StatusRequestEntityTooLarge, "the maximum")
	}
	spec := newAdvertisement("rome")
	spec.PeerKey = strings.Repeat("x", 256<<10)
	accepted := 0
	for range 10 {
		clock.Step(time.Second)
		spec.Sequence++
		if got := m.call(http.MethodPost, protocol.PathAdvertisements, encode(t, spec), "rome"); got.status == http.StatusOK {
			accepted++
		} else {
			got.expect(t, http.StatusTooManyRequests, "too often")
		}
	}
	if accepted < 1 || accepted > 3 {
		t.Errorf("%d advertisements of 256 KiB were accepted in 10 s", accepted)
	}
}

// TestJoinersOfOneNetwork: the addresses of one IPv6 network have one limit.
func TestJoinersOfOneNetwork(t *testing.T) {
	m := newMemoryAt(logr.Discard(), clocktesting.NewFakeClock(start))
	refused := 0
	for i := range 100 {
		request := m.request(http.MethodPost, protocol.PathJoin, `{}`, "rome")
		request.RemoteAddr = fmt.Sprintf("[2001:db8::%x]:443", i+1)
		if got := m.serveRequest(request); got.status == http.StatusTooManyRequests {
			refused++
		}
	}
	if refused < 50 {
		t.Errorf("%d of 100 were refused", refused)
	}
}

// TestConnectionsOfACaller: of one caller's connections only so many stay open after a
// call, and those without a certificate, or with a revoked one, do not.
func TestConnectionsOfACaller(t *testing.T) {
	m := newMemory(t, logr.Discard())
	serving := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.TLS = m.request(http.MethodGet, "/", "", r.Header.Get("Caller")).TLS
		m.Handler().ServeHTTP(w, r)
	}))
	serving.Config.ConnState, serving.Config.ConnContext = m.connections.Changed, limits.WithConnection
	serving.Start()
	t.Cleanup(serving.Close)
	// call makes a call on a connection of its own, and reports whether it stays open.
	call := func(path, caller string) bool {
		transport := &http.Transport{}
		t.Cleanup(transport.CloseIdleConnections)
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, serving.URL+path, nil)
		expect.NoError(t, err)
		request.Header.Set("Caller", caller)
		response, err := transport.RoundTrip(request)
		expect.NoError(t, err)
		_, err = io.Copy(io.Discard, response.Body)
		expect.NoError(t, err)
		expect.NoError(t, response.Body.Close())
		if response.StatusCode >= http.StatusInternalServerError {
			t.Fatalf("got %s", response.Status)
		}
		return !response.Close
	}
	const one, maxConnections = protocol.PathReservations + "/some?role=requester", 64
	for i := range maxConnections + 10 {
		if stays := call(one, "rome"); stays != (i < maxConnections) {
			t.Fatalf("connection %d stays open: %v", i+1, stays)
		}
	}
	if !call(one, "paris") {
		t.Error("the connections of rome count for paris")
	}
	if call(protocol.PathHealthz, "berlin") || call("/other", "berlin") {
		t.Error("a connection stays open whose caller is not known")
	}
	m.callers.mutex.Lock()
	m.callers.revoked = true
	m.callers.mutex.Unlock()
	if call(one, "paris") {
		t.Error("a connection stays open whose caller is revoked")
	}
}
