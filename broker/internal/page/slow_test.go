package page_test

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/utils/clock"

	"github.com/spillway-dev/spillway/broker/internal/history"
	"github.com/spillway-dev/spillway/broker/internal/page"
	"github.com/spillway-dev/spillway/broker/internal/page/session"
	"github.com/spillway-dev/spillway/broker/internal/store"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// slow is a browser that reads nothing until it may.
type slow struct {
	*httptest.ResponseRecorder
	writes chan struct{}
	may    context.Context
}

func (s slow) Write(part []byte) (int, error) {
	s.writes <- struct{}{}
	<-s.may.Done()
	return len(part), nil
}

// TestSlowReaders: browsers that do not read their view keep no other one from being made.
func TestSlowReaders(t *testing.T) {
	s := serve(t, nil)
	b := s.signIn(t, "ada")
	at, err := url.Parse(s.url)
	expect.NoError(t, err)
	may, let := context.WithCancel(t.Context())
	defer let()
	writes := make(chan struct{}, 5)
	handler := s.Handler()
	for range 5 {
		request := httptest.NewRequestWithContext(t.Context(), http.MethodGet, s.url+"/clusters", nil)
		for _, cookie := range b.Jar.Cookies(at) {
			request.AddCookie(cookie)
		}
		go handler.ServeHTTP(slow{httptest.NewRecorder(), writes, may}, request)
	}
	for range 5 {
		select {
		case <-writes:
		case <-time.After(20 * time.Second):
			t.Fatal("a view waits for the readers of others")
		}
	}
}

// stuck is a history that does not answer.
type stuck struct{ asked chan struct{} }

func (stuck) List(ctx context.Context, _ history.Query) (history.Page, error) {
	return history.Page{}, ctx.Err()
}

func (s stuck) Usage(ctx context.Context, _ history.UsageQuery) ([]history.UsageRow, error) {
	s.asked <- struct{}{}
	<-ctx.Done()
	return nil, ctx.Err()
}

// TestBusy: who waits for others for too long gets an answer, and no document is without bounds.
func TestBusy(t *testing.T) {
	kept := stuck{make(chan struct{}, 2)}
	s := serveWith(t, nil, kept)
	b := s.signIn(t, "ada")
	for range 2 {
		go func() {
			request, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, s.url+"/history", nil)
			if response, err := b.Do(request); err == nil {
				_ = response.Body.Close()
			}
		}()
		<-kept.asked
	}
	began := time.Now()
	if a := do(t, b, http.MethodGet, s.url+"/history", nil); a.StatusCode != http.StatusServiceUnavailable || !strings.Contains(a.body, "other views") || time.Since(began) > 8*time.Second {
		t.Errorf("%s after %s:\n%s", a.Status, time.Since(began), a.body)
	}
	s = serveWith(t, nil, &past{ended: []history.Record{{Name: strings.Repeat("x", 5<<20)}}})
	if a := do(t, s.signIn(t, "ada"), http.MethodGet, s.url+"/history", nil); a.StatusCode != http.StatusServiceUnavailable || len(a.body) > 1<<20 {
		t.Errorf("a view without bounds: %s, %d bytes", a.Status, len(a.body))
	}
}

// start serves a page with TLS.
func start(t *testing.T) (listener net.Listener, transport *http.Transport, ended chan error) {
	t.Helper()
	donor := httptest.NewTLSServer(http.NotFoundHandler())
	t.Cleanup(donor.Close)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	expect.NoError(t, err)
	served := page.New(page.Options{
		Listener: listener, Secure: &tls.Config{Certificates: donor.TLS.Certificates}, Namespace: "default", Store: store.New(clock.RealClock{}), Clock: clock.RealClock{}, Log: logr.Discard(),
		Ready: func() error { return nil }, Sessions: session.New(everyone, clock.RealClock{}),
	})
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	ended = make(chan error, 1)
	go func() { ended <- served.Start(ctx) }()
	return listener, donor.Client().Transport.(*http.Transport).Clone(), ended
}

// TestConnectionsOfOneAddress: one address that opens all connections it can shuts the page to no other.
func TestConnectionsOfOneAddress(t *testing.T) {
	listener, transport, _ := start(t)
	from := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}
	for range 600 {
		conn, err := from.DialContext(t.Context(), "tcp", listener.Addr().String())
		expect.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close() })
	}
	b := &http.Client{Transport: transport, Timeout: 5 * time.Second}
	response, err := b.Get("https://" + listener.Addr().String() + "/sign-in")
	expect.NoError(t, err)
	expect.NoError(t, response.Body.Close())
}

// TestListenerFails: a page that cannot be served ends, and not with an error, which would end the broker.
func TestListenerFails(t *testing.T) {
	listener, _, ended := start(t)
	expect.NoError(t, listener.Close())
	expect.NoError(t, <-ended)
}
