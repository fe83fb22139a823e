package answers_test

import (
	"math"
	"testing"

	"github.com/spillway-dev/spillway/broker/internal/answers"
)

// TestRecords: what a provider did not deliver lowers its reliability, once, and for a while.
func TestRecords(t *testing.T) {
	m := answers.New()
	reliability := func(cluster string, seconds int) float64 {
		return math.Round(100*m.Records(at(seconds))[cluster].Reliability()) / 100
	}
	expect := func(when, cluster string, seconds int, want float64) {
		t.Helper()
		if got := reliability(cluster, seconds); got != want {
			t.Errorf("%s: the reliability of %s is %v, want %v", when, cluster, got, want)
		}
	}
	expect("before anything", "paris", 0, 1)
	for range 3 {
		m.Accepted("paris", pods(1, "a", "1"), at(0))
	}
	m.Accepted("paris", pods(0, "a", "1"), at(0)) // a release that is confirmed
	expect("all is kept", "paris", 0, 1)
	for range 2 {
		m.Refused("paris", "rome", pods(1, "a", "1"), "full", wait, at(0)) // the second one is no news
	}
	expect("one of four is refused", "paris", 0, 0.8)
	m.Missed("berlin", "r", at(0), false, wait, at(30))
	expect("no answer", "berlin", 30, 0.5)
	m.Missed("oslo", "r", at(0), true, wait, at(30))
	expect("it waits for the Reservation's own guests", "oslo", 30, 1)
	expect("long ago", "berlin", 30+5*3600, 0.97)
	share := func(cluster string, seconds int) float64 {
		return math.Round(100*m.Records(at(seconds))[cluster].Share()) / 100
	}
	if got := share("paris", 5*3600); got != 0.75 {
		t.Errorf("the share of kept promises has become %v", got)
	}
	if records := m.Records(at(24*3600 + 30)); len(records) > 0 {
		t.Errorf("a day later, these count: %+v", records)
	}
	// What is withdrawn is one promise, that is not kept: at once, or when half of it is forgotten.
	for seconds, cluster := range map[int]string{1: "milan", 3600: "turin"} {
		m.Accepted(cluster, pods(1, "a", "1"), at(0))
		m.Withdrawn(cluster, "rome", pods(1, "a", "1"), "drained", wait, at(seconds))
		m.Withdrawn(cluster, "rome", pods(1, "a", "1"), "drained", wait, at(seconds)) // no news
		if got := share(cluster, seconds); got != 0 {
			t.Errorf("the share of %s is %v", cluster, got)
		}
		expect("withdrawn", cluster, seconds, 0.5)
	}
	m.Forget("paris")
	expect("forgotten", "paris", 0, 1)
}
