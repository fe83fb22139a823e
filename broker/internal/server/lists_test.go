package server

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/go-logr/logr"

	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestListsThatHaveNotChanged: a list is not sent again to a caller that has it.
func TestListsThatHaveNotChanged(t *testing.T) {
	m := newMemory(t, logr.Discard())
	m.Observe(stored("one", "paris"), false)
	list := func(role protocol.Role, etag string) answer {
		request := m.request(http.MethodGet, protocol.PathReservations+"?role="+string(role), "", "rome")
		request.Header.Set("If-None-Match", etag)
		return m.serveRequest(request)
	}
	for _, role := range []protocol.Role{protocol.RoleRequester, protocol.RoleProvider, ""} {
		first := list(role, "")
		etag := first.header.Get("ETag")
		if first.status != http.StatusOK || etag == "" {
			t.Fatalf("role %q: %d, %s", role, first.status, etag)
		}
		if again := list(role, etag); again.status != http.StatusNotModified || len(again.body) > 0 {
			t.Errorf("role %q, the same: %d, %s", role, again.status, again.body)
		}
	}
	etag := list(protocol.RoleRequester, "").header.Get("ETag")
	m.Observe(stored("two", "paris"), false)
	if changed := list(protocol.RoleRequester, etag); changed.status != http.StatusOK || changed.header.Get("ETag") == etag {
		t.Errorf("after a change: %d", changed.status)
	}
}

// TestMessagesAreListedOnce: what a list has taken is there no more, and is its receiver's.
func TestMessagesAreListedOnce(t *testing.T) {
	m := newMemory(t, logr.Discard())
	if sent := m.call(http.MethodPost, protocol.PathRelay, encode(t, protocol.RelayMessage{To: "paris", ID: "1", Sealed: []byte("x")}), "rome"); sent.status != http.StatusAccepted {
		t.Fatalf("sending: %d", sent.status)
	}
	for _, c := range []struct {
		caller string
		want   int
	}{{"rome", 0}, {"paris", 1}, {"paris", 0}} {
		var list protocol.RelayList
		got := m.call(http.MethodGet, protocol.PathRelay, "", c.caller)
		expect.NoError(t, json.Unmarshal(got.body, &list))
		if list.Items == nil || len(list.Items) != c.want {
			t.Errorf("%s has %s", c.caller, got.body)
		}
	}
}

// TestInsiders: another interface of the process calls as a cluster, as long as that is admitted; no
// certificate makes a caller one.
func TestInsiders(t *testing.T) {
	m := newMemory(t, logr.Discard())
	m.Observe(stored("one", "paris"), false)
	var refused error
	as := func(cluster string) context.Context {
		return As(t.Context(), Insider{Cluster: cluster, Admitted: func(context.Context) error { return refused }})
	}
	list := func(ctx context.Context) answer {
		return m.serveRequest(httptest.NewRequestWithContext(ctx, http.MethodGet, protocol.PathReservations+"?role=requester", nil))
	}
	for cluster, want := range map[string]int{"rome": 1, "oslo": 0} {
		var items protocol.ConsumerList
		expect.NoError(t, json.Unmarshal(list(as(cluster)).body, &items))
		if len(items.Items) != want {
			t.Errorf("%s sees %+v", cluster, items)
		}
	}
	refused = refuse(protocol.CodeForbidden, "revoked")
	list(as("rome")).expect(t, http.StatusForbidden, "revoked")
}
