package lease

import (
	"testing"
	"time"
)

func TestObserve(t *testing.T) {
	start := time.Unix(1_000_000, 0)
	at := func(seconds int) time.Time { return start.Add(time.Duration(seconds) * time.Second) }
	asked := func(attempt int64) Seen { return Seen{Held: true, Asked: map[string]int64{"paris": attempt}} }

	t.Run("TheSameStateKeepsItsTime", func(t *testing.T) {
		b := NewBook()
		b.Observe("r", "1", asked(1), at(0))
		got := b.Observe("r", "1", asked(1), at(20))
		if !got.Held.Equal(at(0)) || !got.Asked["paris"].Equal(at(0)) {
			t.Errorf("the times moved: %+v", got)
		}
	})
	t.Run("ANewAttemptStartsAgainAndAnOlderOneDoesNot", func(t *testing.T) {
		b := NewBook()
		b.Observe("r", "1", asked(1), at(0))
		if got := b.Observe("r", "1", asked(2), at(20)); !got.Asked["paris"].Equal(at(20)) {
			t.Errorf("attempt 2 was asked at %s", got.Asked["paris"])
		}
		// A cache is behind the live read before it.
		b.Observe("r", "1", asked(1), at(25))
		if got := b.Observe("r", "1", asked(2), at(30)); !got.Asked["paris"].Equal(at(20)) {
			t.Errorf("attempt 2 was asked at %s", got.Asked["paris"])
		}
	})
	t.Run("PlacedAgainStartsAgain", func(t *testing.T) {
		b := NewBook()
		b.Observe("r", "1", Seen{Held: true}, at(0))
		if got := b.Observe("r", "1", Seen{Waiting: 1}, at(10)); !got.Start().IsZero() || !got.Waiting.Equal(at(10)) {
			t.Errorf("without a hold: %+v", got)
		}
		if got := b.Observe("r", "1", Seen{Held: true}, at(20)); !got.Start().Equal(at(20)) || !got.Waiting.IsZero() {
			t.Errorf("placed again: %+v", got)
		}
	})
	t.Run("UseRenews", func(t *testing.T) {
		b := NewBook()
		if b.Renew("r", "1", at(0)) {
			t.Error("renewed before it was seen")
		}
		b.Observe("r", "1", Seen{Held: true}, at(0))
		if b.Renew("r", "2", at(40)) || !b.Renew("r", "1", at(30)) {
			t.Error("want a renewal of its own UID only")
		}
		if got := b.Observe("r", "1", Seen{Held: true}, at(50)); !got.Start().Equal(at(30)) {
			t.Errorf("the lease started at %s", got.Start())
		}
	})
	t.Run("AnotherUIDIsAnotherReservation", func(t *testing.T) {
		b := NewBook()
		b.Observe("r", "1", asked(5), at(0))
		if got := b.Observe("r", "2", asked(1), at(9)); !got.FirstSeen.Equal(at(9)) || !got.Asked["paris"].Equal(at(9)) {
			t.Errorf("it has the times of the former: %+v", got)
		}
	})
	t.Run("AnotherGenerationWaitsAgain", func(t *testing.T) {
		b := NewBook()
		b.Observe("r", "1", Seen{Waiting: 1}, at(0))
		if got := b.Observe("r", "1", Seen{Waiting: 2}, at(9)); !got.Waiting.Equal(at(9)) {
			t.Errorf("waits since %s", got.Waiting)
		}
	})
	t.Run("AnotherProcessStartsAllDurationsAgain", func(t *testing.T) {
		NewBook().Observe("r", "1", asked(1), at(0))
		if got := NewBook().Observe("r", "1", asked(1), at(7200)); !got.Start().Equal(at(7200)) || !got.Asked["paris"].Equal(at(7200)) {
			t.Errorf("the durations of another process count: %+v", got)
		}
	})
}
