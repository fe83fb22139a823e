package server

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"regexp"
	"slices"
	"testing"

	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// testMetrics scrapes the broker after calls, streams and a placement, and compares with
// the table in ARCHITECTURE.md, both ways.
func (c *clusters) testMetrics(t *testing.T) {
	expect.NoError(t, c.rome.client.Renew(t.Context(), c.placed.ID, c.placed.UID))
	// One Reservation waits for capacity, and one message for berlin, which does not take any.
	waiting := newRequest("waiting")
	waiting.Spec.PodSets[0].Count = 1000
	queued, err := c.rome.client.PutReservation(t.Context(), waiting)
	expect.NoError(t, err)
	defer func() { expect.NoError(t, c.rome.client.DeleteReservation(context.Background(), queued.ID)) }()
	expect.NoError(t, c.rome.client.Relay(t.Context(), protocol.RelayMessage{To: "berlin", ID: "waiting", Sealed: []byte("sealed")}))
	expectEvent(t, watch(t, c.rome, protocol.RoleRequester), "a Relist", func(event protocol.Event) bool { return event.Type == protocol.EventRelist })
	text, err := os.ReadFile("../../../ARCHITECTURE.md")
	expect.NoError(t, err)
	var documented []string
	for _, row := range regexp.MustCompile("(?m)^\\| `(broker_[a-z_]+)").FindAllStringSubmatch(string(text), -1) {
		documented = append(documented, row[1])
	}
	if len(documented) < 10 {
		t.Fatalf("only %d metrics are documented: %v", len(documented), documented)
	}
	sample := regexp.MustCompile(`(?m)^# TYPE (broker_[a-z_]+) `)
	eventually(t, "each documented metric to be there", func() error {
		response, err := http.Get(c.hub.metrics)
		if err != nil {
			return err
		}
		defer response.Body.Close()
		scraped, err := io.ReadAll(response.Body)
		expect.NoError(t, err)
		var served []string
		for _, found := range sample.FindAllStringSubmatch(string(scraped), -1) {
			served = append(served, found[1])
			if !slices.Contains(documented, found[1]) {
				t.Fatalf("metric %s is not in the table in ARCHITECTURE.md", found[1])
			}
		}
		for _, name := range documented {
			if !slices.Contains(served, name) {
				return fmt.Errorf("%s is missing", name)
			}
		}
		// What the calls before must have counted.
		for _, name := range []string{
			"broker_reservations_total", "broker_reservations", "broker_decision_latency_seconds_count",
			"broker_ledger_commit_batch_size_count", "broker_ledger_commit_latency_seconds_count", "broker_cluster_score",
			"broker_calls_total", "broker_advertisements_total", "broker_lease_renewals_total",
			"broker_certificate_expiry_timestamp_seconds", "broker_cluster_certificate_expiry_timestamp_seconds",
			"broker_stream_events_total", "broker_certificates_issued_total", "broker_reservation_duration_seconds_count",
			"broker_queue_length", "broker_streams", "broker_relay_messages", "broker_relay_bytes",
		} {
			if !regexp.MustCompile(`(?m)^` + name + `(\{[^}]*\})? [1-9]`).Match(scraped) {
				return fmt.Errorf("%s is 0", name)
			}
		}
		return nil
	})
}
