package server

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/go-logr/logr"
	clocktesting "k8s.io/utils/clock/testing"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/server/stream"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestChangeCostsWhatItChanges counts the views that are rendered for one change among
// a thousand.
func TestChangeCostsWhatItChanges(t *testing.T) {
	m := newMemory(t, logr.Discard())
	rendered := 0
	source := &stream.Tracker[protocol.ConsumerView]{
		Views: func(id string) []protocol.ConsumerView {
			found := m.views.Consumer("rome", id)
			rendered += max(len(found), 1)
			return found
		},
		ID:   func(view protocol.ConsumerView) string { return view.ID },
		Wrap: func(some []protocol.ConsumerView) protocol.Event { return protocol.Event{Consumer: some} },
	}
	for _, reservation := range many(1000, "paris") {
		m.Observe(reservation, false)
	}
	subscription := m.broadcaster.Subscribe("rome", protocol.RoleRequester, 16)
	relist, err := source.Events(subscription)
	expect.NoError(t, err)
	if len(relist) != 1 || relist[0].Type != protocol.EventRelist || len(relist[0].Consumer) != 1000 {
		t.Fatalf("want a Relist of all, got %d events", len(relist))
	}
	rendered = 0
	changed := stored("r-0500", "paris")
	changed.Status.Summary = "changed"
	m.Observe(changed, false)
	m.Observe(stored("r-0501", "paris"), false) // the same as before
	m.Observe(stored("r-0502"), true)
	events, err := source.Events(subscription)
	expect.NoError(t, err)
	if len(events) != 2 || events[0].Type != protocol.EventDelete || events[0].ID != "r-0502" || len(events[1].Consumer) != 1 || events[1].Consumer[0].ID != "r-0500" {
		t.Fatalf("got %+v", events)
	}
	if rendered != 3 {
		t.Fatalf("%d views were rendered for 3 changes", rendered)
	}
}

// TestFlippedEndpointWakesWhomItConcerns changes a cluster's endpoint and key.
func TestFlippedEndpointWakesWhomItConcerns(t *testing.T) {
	type viewer struct {
		cluster string
		role    protocol.Role
	}
	m := newMemory(t, logr.Discard())
	paris, berlin := stored("in-paris", "paris"), stored("in-berlin", "berlin")
	for _, object := range []*broker.Reservation{paris, berlin} {
		m.Observe(object, false)
	}
	m.Observe(advertised("paris", paris), false)
	m.Observe(advertised("berlin", berlin), false)
	m.Observe(advertised("rome"), false)
	open := map[viewer]*stream.Subscription{}
	for _, cluster := range []string{"rome", "paris", "berlin", "madrid"} {
		for _, role := range []protocol.Role{protocol.RoleRequester, protocol.RoleProvider} {
			open[viewer{cluster, role}] = m.broadcaster.Subscribe(cluster, role, 16)
		}
	}
	expectWoken := func(what string, want map[viewer]string) {
		t.Helper()
		for of, subscription := range open {
			ids, all := subscription.Take()
			if got := fmt.Sprint(ids); all || len(ids) > 0 && got != "["+want[of]+"]" || len(ids) == 0 && want[of] != "" {
				t.Errorf("%s: %v has %s to send, want %q", what, of, got, want[of])
			}
		}
	}
	flipped := advertised("paris", paris)
	flipped.Spec.EndpointURL = "https://elsewhere.test"
	m.Observe(flipped, false)
	expectWoken("another endpoint of paris", map[viewer]string{{"rome", protocol.RoleRequester}: "in-paris"})
	rekeyed := advertised("rome")
	rekeyed.Spec.PeerKey = "another"
	m.Observe(rekeyed, false)
	expectWoken("another key of rome", map[viewer]string{{"paris", protocol.RoleProvider}: "in-paris", {"berlin", protocol.RoleProvider}: "in-berlin"})
	grown := advertised("berlin", berlin)
	grown.Status.Holds[0].Attempt = 2
	m.Observe(grown, false)
	expectWoken("another attempt in berlin", map[viewer]string{{"berlin", protocol.RoleProvider}: "in-berlin"})
	idle := advertised("berlin", berlin)
	idle.Status.Holds[0].Attempt = 2
	idle.Spec.Sequence++
	m.Observe(idle, false)
	expectWoken("a beat of berlin", nil)
}

// TestAdvertisementsAreLimited advertises without pause.
func TestAdvertisementsAreLimited(t *testing.T) {
	m := newMemoryAt(logr.Discard(), clocktesting.NewFakeClock(start))
	for i := range 100 {
		spec := newAdvertisement("paris")
		spec.PeerKey = fmt.Sprint("key-", i)
		m.call(http.MethodPost, protocol.PathAdvertisements, encode(t, spec), "paris")
	}
	if stored := len(m.agents.stored); stored < 20 || stored > 40 {
		t.Fatalf("%d of 100 advertisements were stored", stored)
	}
	m.call(http.MethodPost, protocol.PathAdvertisements, encode(t, newAdvertisement("paris")), "paris").expect(t, http.StatusTooManyRequests, "at most every 500 ms")
}

// TestStreamSendsEachChange opens streams in memory. A reader that is slow gets the
// newest state only.
func TestStreamSendsEachChange(t *testing.T) {
	m := newMemory(t, logr.Discard())
	consumer, provider := m.open(t, "rome", protocol.RoleRequester), m.open(t, "paris", protocol.RoleProvider)
	for _, events := range []chan protocol.Event{consumer, provider} {
		if event := next(t, events); event.Type != protocol.EventRelist {
			t.Fatalf("got %+v", event)
		}
	}
	reservation := stored("one", "paris")
	m.Observe(advertised("paris", reservation), false)
	if event := next(t, provider); event.Type != protocol.EventPut || event.Provider[0].ID != "one" {
		t.Fatalf("got %+v", event)
	}
	m.Observe(reservation, false)
	if event := next(t, consumer); event.Type != protocol.EventPut || event.Consumer[0].Status.Allocations[0].Endpoint != "https://paris.test:6443" || event.Consumer[0].PeerKeys["paris"] != "key-of-paris" {
		t.Fatalf("got %+v", event)
	}
	m.Observe(reservation, true)
	if event := next(t, consumer); event.Type != protocol.EventDelete || event.ID != "one" {
		t.Fatalf("got %+v", event)
	}
}
