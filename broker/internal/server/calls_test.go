package server

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	clocktesting "k8s.io/utils/clock/testing"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// TestRevokedCallersAreLimited calls with a revoked certificate without pause: the rate
// limit comes before what reads.
func TestRevokedCallersAreLimited(t *testing.T) {
	m := newMemoryAt(logr.Discard(), clocktesting.NewFakeClock(start))
	m.callers.revoked = true
	const calls = 2000
	refused := map[int]int{}
	for range calls {
		refused[m.call(http.MethodGet, protocol.PathAdvertisements, "", "rome").status]++
	}
	if refused[http.StatusUnauthorized]+refused[http.StatusTooManyRequests] != calls || refused[http.StatusTooManyRequests] < calls/2 {
		t.Fatalf("got %v", refused)
	}
	if m.callers.reads != refused[http.StatusUnauthorized] {
		t.Fatalf("%d calls cost %d reads", refused[http.StatusUnauthorized], m.callers.reads)
	}
}

// TestNewerAgent calls as an agent that knows more fields, and as a caller without a version.
func TestNewerAgent(t *testing.T) {
	m := newMemory(t, logr.Discard())
	call := func(version, method, path, body string) (answer, string) {
		recorder := httptest.NewRecorder()
		request := m.request(method, path, body, "rome")
		if version != "" {
			request.Header.Set(protocol.HeaderVersion, version)
		}
		m.Handler().ServeHTTP(recorder, request)
		return answer{status: recorder.Code, body: recorder.Body.Bytes()}, recorder.Header().Get(protocol.HeaderVersion)
	}
	const path = protocol.PathReservations + "/some/ack?role=provider"
	newer := `{"reservationUID":"x","attempt":3,"accepted":false,"newer":{"field":1},"held":{"totals":{"cpu":"2"},"newer":true}}`
	got, version := call("1", http.MethodPost, path, newer)
	if got.status != http.StatusNoContent || version != "1" || len(m.agents.acks) != 1 || m.agents.acks[0].Held == nil || m.agents.acks[0].Held.Totals.CPU.String() != "2" {
		t.Fatalf("a newer agent got %d %s, version %q: %+v", got.status, got.body, version, m.agents.acks)
	}
	got, _ = call("", http.MethodPost, path, `{"reservationUID":"x","attempt":3,"accepted":true}`)
	if got.status != http.StatusNoContent {
		t.Fatalf("a caller without a version got %d %s", got.status, got.body)
	}
	got, _ = call("", http.MethodPost, path, newer)
	got.expect(t, http.StatusBadRequest, `unknown field "newer"`)
	got, _ = call("1", http.MethodPost, path, `{"attempt":"three","newer":1}`)
	got.expect(t, http.StatusBadRequest, "does not match the schema")
	for _, other := range []string{"2", "1-9", "x"} {
		got, _ = call(other, http.MethodGet, protocol.PathAdvertisements, "")
		got.expect(t, http.StatusBadRequest, "the same version")
	}
	got, _ = call("1", http.MethodPost, protocol.PathReservations+"/some/renew?role=requester", `{"reservationUID":"u"}`)
	if got.status != http.StatusNoContent || len(m.agents.renewals) != 1 || m.agents.renewals[0] != "u" {
		t.Fatalf("a renewal got %d %s: %v", got.status, got.body, m.agents.renewals)
	}
}

// TestAuditLog reads the log of calls and of a Reservation's phases.
func TestAuditLog(t *testing.T) {
	var mutex sync.Mutex
	var lines []string
	m := newMemory(t, funcr.New(func(prefix, args string) {
		mutex.Lock()
		defer mutex.Unlock()
		if prefix == "audit" {
			lines = append(lines, args)
		}
	}, funcr.Options{}))
	expectLine := func(parts ...string) {
		t.Helper()
		for _, line := range lines {
			missing := false
			for _, part := range parts {
				missing = missing || !strings.Contains(line, part)
			}
			if !missing {
				return
			}
		}
		t.Errorf("no line has %q:\n%s", parts, strings.Join(lines, "\n"))
	}
	m.call(http.MethodPost, protocol.PathReservations+"/some/ack?role=provider", `{"attempt":7,"accepted":false,"message":"no room"}`, "paris")
	expectLine(`"cluster"="paris"`, `"id"="some"`, `"role"="provider"`, `"attempt"=7`, `"accepted"=false`, `"message"="no room"`, `"outcome"="OK"`)
	m.call(http.MethodPost, protocol.PathAdvertisements, `{"clusterID":"rome"}`, "paris")
	expectLine(`"cluster"="paris"`, `"call"="POST /api/v1/advertisements"`, `"outcome"="Forbidden"`, "set clusterID to paris")
	lines = nil
	m.call(http.MethodPost, protocol.PathAdvertisements, encode(t, newAdvertisement("paris")), "paris")
	m.call(http.MethodGet, protocol.PathAdvertisements, "", "paris")
	if len(lines) > 0 {
		t.Errorf("calls that change nothing, or only beat, are logged: %v", lines)
	}
	placed := stored("one", "paris")
	placed.Status.Phase, placed.Status.Allocations[0].PricePerHour = "Reserved", "0.25 EUR"
	placed.Status.Decision = &broker.Decision{Scores: []broker.ClusterScore{{Cluster: "paris", Score: "61.00"}}}
	m.Observe(placed, false)
	expectLine(`"cluster"="rome"`, `"phase"="Reserved"`, `"sourceName"="one"`, `"provider"="paris" "pods"=2 "pricePerHour"="0.25 EUR" "score"="61.00"`)
}
