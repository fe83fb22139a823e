package server

import (
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	clocktesting "k8s.io/utils/clock/testing"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// TestWritesAreLimited: what changes an object in the hub has a limit of its own, below
// that of all calls. Reads, a provider's answers, and other clusters have none of it.
func TestWritesAreLimited(t *testing.T) {
	clock := clocktesting.NewFakeClock(start)
	m := newMemoryAt(logr.Discard(), clock)
	const ack = protocol.PathReservations + "/some/ack?role="
	// second makes calls for a second, and returns how many were not refused.
	second := func(caller string, role protocol.Role) (accepted int) {
		t.Helper()
		const calls = 50
		clock.Step(time.Second)
		for range calls {
			got := m.call(http.MethodPost, ack+string(role), `{"attempt":1}`, caller)
			if got.status == http.StatusNoContent {
				accepted++
				continue
			}
			got.expect(t, http.StatusTooManyRequests, "spec.quotas.writesPerSecond")
			if seconds, err := strconv.Atoi(got.header.Get("Retry-After")); err != nil || seconds < 1 || seconds > 10 {
				t.Fatalf("Retry-After is %q", got.header.Get("Retry-After"))
			}
		}
		return accepted
	}
	const seconds = 20
	burst := 0
	for range seconds {
		burst += second("rome", protocol.RoleRequester)
	}
	// 100 Reservations that are requested, become Active and are deleted are 300 writes.
	if burst < 300 || burst > 200+20*seconds {
		t.Fatalf("%d writes in %d s", burst, seconds)
	}
	if got := m.call(http.MethodGet, protocol.PathAdvertisements, "", "rome"); got.status != http.StatusOK {
		t.Fatalf("a read got %d %s", got.status, got.body)
	}
	if got := second("rome", protocol.RoleProvider); got != 50 {
		t.Fatalf("%d of 50 answers of a provider were accepted", got)
	}
	if got := second("berlin", protocol.RoleRequester); got != 50 {
		t.Fatalf("%d of 50 writes of another cluster were accepted", got)
	}
	config := &broker.BrokerConfig{}
	config.Namespace, config.Name = namespace, configName
	config.Spec.Quotas = &broker.Quotas{WritesPerSecond: new(int32(5)), WriteBurst: new(int32(10))}
	m.Observe(config, false)
	clock.Step(time.Minute)
	second("rome", protocol.RoleRequester)
	if got := second("rome", protocol.RoleRequester); got != 5 {
		t.Fatalf("%d writes in a second, the BrokerConfig allows 5", got)
	}
}

// TestRetryAfterIsForSpeed: only what waiting helps has a time to retry after.
func TestRetryAfterIsForSpeed(t *testing.T) {
	clock := clocktesting.NewFakeClock(start)
	m := newMemoryAt(logr.Discard(), clock)
	for range 1000 {
		got := m.call(http.MethodGet, protocol.PathAdvertisements+"/paris", "", "rome")
		after := got.header.Get("Retry-After")
		if limited := got.status == http.StatusTooManyRequests; limited != (after != "") {
			t.Fatalf("%d %s has Retry-After %q", got.status, got.body, after)
		} else if limited && !strings.Contains(string(got.body), "rate") {
			t.Fatalf("the refusal is %s", got.body)
		}
	}
}
