package lease

import (
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// observe returns since when the state has been seen, and records it.
func observe(b *Book, name string, uid types.UID, seen Seen, now time.Time) Times {
	times := b.Times(name, uid, seen, now)
	b.Observe(name, uid, seen, now)
	return times
}

func TestObserve(t *testing.T) {
	start := time.Unix(1_000_000, 0)
	at := func(seconds int) time.Time { return start.Add(time.Duration(seconds) * time.Second) }
	asked := func(attempt int64) Seen { return Seen{Held: true, Asked: map[string]int64{"paris": attempt}} }

	t.Run("TheSameStateKeepsItsTime", func(t *testing.T) {
		b := NewBook()
		b.Observe("r", "1", asked(1), at(0))
		got := observe(b, "r", "1", asked(1), at(20))
		if !got.Held.Equal(at(0)) || !got.Asked["paris"].Equal(at(0)) {
			t.Errorf("the times moved: %+v", got)
		}
	})
	t.Run("ANewAttemptStartsAgainAndAnOlderOneDoesNot", func(t *testing.T) {
		b := NewBook()
		b.Observe("r", "1", asked(1), at(0))
		if got := observe(b, "r", "1", asked(2), at(20)); !got.Asked["paris"].Equal(at(20)) {
			t.Errorf("attempt 2 was asked at %s", got.Asked["paris"])
		}
		// A cache is behind the live read before it.
		b.Observe("r", "1", asked(1), at(25))
		if got := observe(b, "r", "1", asked(2), at(30)); !got.Asked["paris"].Equal(at(20)) {
			t.Errorf("attempt 2 was asked at %s", got.Asked["paris"])
		}
	})
	t.Run("PlacedAgainStartsAgain", func(t *testing.T) {
		b := NewBook()
		b.Observe("r", "1", Seen{Held: true}, at(0))
		if got := observe(b, "r", "1", Seen{Waiting: 1}, at(10)); !got.Start().IsZero() || !got.Waiting.Equal(at(10)) {
			t.Errorf("without a hold: %+v", got)
		}
		if got := observe(b, "r", "1", Seen{Held: true}, at(20)); !got.Start().Equal(at(20)) || !got.Waiting.IsZero() {
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
		if got := observe(b, "r", "1", Seen{Held: true}, at(50)); !got.Start().Equal(at(30)) {
			t.Errorf("the lease started at %s", got.Start())
		}
	})
	t.Run("AnUnannouncedLeaseStartsAgain", func(t *testing.T) {
		b := NewBook()
		b.Observe("r", "1", Seen{Held: true}, at(0))
		if got := observe(b, "r", "1", Seen{Held: true, Unannounced: true}, at(30)); !got.Start().Equal(at(30)) {
			t.Errorf("the lease started at %s", got.Start())
		}
		if got := b.Times("r", "1", Seen{Held: true}, at(40)); !got.Start().Equal(at(30)) {
			t.Errorf("once it is announced, the lease started at %s", got.Start())
		}
	})
	t.Run("TimesRecordNothing", func(t *testing.T) {
		b := NewBook()
		b.Times("new", "1", asked(1), at(0))
		b.Observe("r", "1", asked(1), at(0))
		b.Times("r", "1", Seen{Waiting: 1, Deleted: true, Unannounced: true}, at(10))
		b.Times("r", "2", asked(3), at(10))
		if got := b.Times("r", "1", asked(1), at(20)); !got.Start().Equal(at(0)) || !got.Asked["paris"].Equal(at(0)) || !got.Deleted.IsZero() {
			t.Errorf("what was only asked for counts: %+v", got)
		}
		if b.Renew("new", "1", at(30)) {
			t.Error("a Reservation that was only asked for is known")
		}
	})
	t.Run("AnotherUIDIsAnotherReservation", func(t *testing.T) {
		b := NewBook()
		b.Observe("r", "1", asked(5), at(0))
		if got := observe(b, "r", "2", asked(1), at(9)); !got.FirstSeen.Equal(at(9)) || !got.Asked["paris"].Equal(at(9)) {
			t.Errorf("it has the times of the former: %+v", got)
		}
	})
	t.Run("AnotherGenerationWaitsAgain", func(t *testing.T) {
		b := NewBook()
		b.Observe("r", "1", Seen{Waiting: 1}, at(0))
		if got := observe(b, "r", "1", Seen{Waiting: 2}, at(9)); !got.Waiting.Equal(at(9)) {
			t.Errorf("waits since %s", got.Waiting)
		}
	})
	t.Run("AnotherProcessStartsAllDurationsAgain", func(t *testing.T) {
		NewBook().Observe("r", "1", asked(1), at(0))
		if got := observe(NewBook(), "r", "1", asked(1), at(7200)); !got.Start().Equal(at(7200)) || !got.Asked["paris"].Equal(at(7200)) {
			t.Errorf("the durations of another process count: %+v", got)
		}
	})
}
