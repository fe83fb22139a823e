package server

import (
	"crypto/tls"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"testing"

	"github.com/go-logr/logr"

	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestStandbyClosesConnections shows that a client that is refused by a replica which is
// not the leader opens a new connection for its next call: the kept one would always
// reach the same replica, also after another one has become the leader.
func TestStandbyClosesConnections(t *testing.T) {
	m := newMemory(t, logr.Discard())
	standby := make(chan struct{})
	m.Server.elected = standby
	serving := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.TLS = &tls.ConnectionState{}
		m.Handler().ServeHTTP(w, r)
	}))
	defer serving.Close()
	reused := false
	trace := &httptrace.ClientTrace{GotConn: func(info httptrace.GotConnInfo) { reused = reused || info.Reused }}
	for range 2 {
		request, err := http.NewRequestWithContext(httptrace.WithClientTrace(t.Context(), trace), http.MethodGet, serving.URL+protocol.PathReservations, nil)
		expect.NoError(t, err)
		response, err := serving.Client().Do(request)
		expect.NoError(t, err)
		_, err = io.Copy(io.Discard, response.Body)
		expect.NoError(t, err)
		expect.NoError(t, response.Body.Close())
		if response.StatusCode != http.StatusServiceUnavailable {
			t.Errorf("a standby answers %s", response.Status)
		}
	}
	if reused {
		t.Error("the client uses the connection to the standby again")
	}
}
