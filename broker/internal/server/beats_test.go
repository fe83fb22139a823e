package server

import (
	"bytes"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	clocktesting "k8s.io/utils/clock/testing"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// TestBeats: an advertisement that repeats the one before is not decoded, and one that
// does not is.
func TestBeats(t *testing.T) {
	clock := clocktesting.NewFakeClock(start)
	m := newMemoryAt(logr.Discard(), clock)
	spec := newAdvertisement("paris")
	send := func(body string) (decoded bool) {
		t.Helper()
		clock.Step(time.Minute)
		before := len(m.agents.stored)
		if got := m.call(http.MethodPost, protocol.PathAdvertisements, body, "paris"); got.status != http.StatusOK {
			t.Fatalf("got %d %s", got.status, got.body)
		}
		if at, _ := m.Receipts.ReceivedAt("paris"); !at.Equal(clock.Now()) {
			t.Errorf("the last receipt is of %s", at)
		}
		return len(m.agents.stored) > before
	}
	next := func() string {
		spec.Sequence++
		spec.Timestamp.Time = spec.Timestamp.Add(time.Minute)
		return encode(t, spec)
	}
	if !send(next()) {
		t.Error("the first advertisement was not decoded")
	}
	for range 3 {
		if body := next(); send(body) || m.agents.beat.Sequence != spec.Sequence || !m.agents.beat.Timestamp.Time.Equal(spec.Timestamp.Time) {
			t.Errorf("a repeated advertisement was decoded, or became %+v", m.agents.beat)
		}
	}
	spec.EndpointURL = "https://elsewhere.test"
	if !send(next()) || m.agents.stored[len(m.agents.stored)-1].EndpointURL != spec.EndpointURL {
		t.Error("a changed advertisement was not decoded")
	}
	if send(next()) {
		t.Error("its repetition was decoded")
	}
	m.agents.forgotten = true
	if !send(next()) {
		t.Error("it was not decoded although the stored one has changed")
	}
}

// FuzzBeats: what is taken for a repetition has the same content.
func FuzzBeats(f *testing.F) {
	spec, err := json.Marshal(newAdvertisement("paris"))
	if err != nil {
		f.Fatal(err)
	}
	for _, body := range []string{
		string(spec), `{"clusterID":"a","sequence":1,"timestamp":"2026-01-02T03:04:05Z"}`, `{"sequence":1,"Sequence":2,"timestamp":null}`,
		`{"clusterID":"a\"","x":{"sequence":7},"sequence":1,"timestamp":"2026-01-02T03:04:05Z","sequ\u0065nce":3}`,
		`{"timestamp":"2026-01-02T03:04:05Z","sequence":1} {}`, `[{"sequence":1}]`, `{"sequence":,"timestamp":}`, `{"a":[}],"sequence":1,"timestamp":null}`,
	} {
		f.Add([]byte(body), int64(2))
	}
	f.Fuzz(func(t *testing.T, body []byte, sequence int64) {
		var first, second broker.ClusterAdvertisementSpec
		before, ok := parseBeat(body, "2")
		if !ok || decodeJSON(bytes.NewReader(body), &first, false) != nil {
			return
		}
		if before.Sequence != first.Sequence || !before.Timestamp.Equal(&first.Timestamp) {
			t.Fatalf("%s is %+v, was taken for %+v", body, first, before)
		}
		// Another body with the same digest differs in the two values.
		encoded, err := json.Marshal(sequence)
		if err != nil {
			t.Fatal(err)
		}
		var other []byte
		members(body, func(key []byte, from, to int) bool {
			if string(key) == "sequence" {
				other = append(append(append(other, body[:from]...), encoded...), body[to:]...)
			}
			return true
		})
		again, ok := parseBeat(other, "2")
		if !ok || again.digest != before.digest || again.Sequence != sequence {
			t.Fatalf("%s became %s: %+v", body, other, again)
		}
		if err := decodeJSON(bytes.NewReader(other), &second, false); err != nil {
			t.Fatalf("%s is no advertisement: %v", other, err)
		}
		first.Sequence = sequence
		one, err := json.Marshal(first)
		if err != nil {
			t.Fatal(err)
		}
		two, err := json.Marshal(second)
		if err != nil || !bytes.Equal(one, two) {
			t.Fatalf("%s and %s have the same digest: %v", body, other, err)
		}
	})
}

// TestNoBeats: what does not say clearly what its sequence is must be decoded.
func TestNoBeats(t *testing.T) {
	const timestamp = `"timestamp":"2026-01-02T03:04:05Z"`
	for _, body := range []string{
		``, `null`, `[]`, `{}`, `{"sequence":1}`, `{` + timestamp + `}`, `{"sequence":1,` + timestamp, `{"sequence":1,` + timestamp + `} {}`,
		`{"sequence":1,"sequence":2,` + timestamp + `}`, `{"SEQUENCE":1,` + timestamp + `}`, `{"sequence":1,"timeſtamp":"x",` + timestamp + `}`,
		`{"sequ\u0065nce":1,"sequence":2,` + timestamp + `}`, `{"sequence":"1",` + timestamp + `}`, `{"sequence":{},` + timestamp + `}`,
	} {
		if got, ok := parseBeat([]byte(body), ""); ok {
			t.Errorf("%s was taken for %+v", body, got)
		}
	}
	one, _ := parseBeat([]byte(`{"sequence":1,`+timestamp+`,"a":"`+strings.Repeat("x", 10)+`"}`), "")
	two, ok := parseBeat([]byte(`{"sequence":2,`+timestamp+`,"a":"`+strings.Repeat("x", 11)+`"}`), "")
	if !ok || one.digest == two.digest {
		t.Error("another content has the same digest")
	}
}
