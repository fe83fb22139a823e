package advertise_test

import (
	"testing"
	"time"

	"github.com/spillway-dev/spillway/agent/internal/advertise"
)

func TestNextBeat(t *testing.T) {
	const interval = 30 * time.Second
	start := time.Unix(1_700_000_000, 0)
	offsets := map[time.Duration]bool{}
	for _, id := range []string{"rome", "paris", "berlin", "oslo"} {
		first := advertise.NextBeat(start, interval, id)
		if wait := first.Sub(start); wait <= 0 || wait > interval {
			t.Errorf("%s waits %s", id, wait)
		}
		if second := advertise.NextBeat(first, interval, id); second.Sub(first) != interval {
			t.Errorf("%s beats after %s", id, second.Sub(first))
		}
		offset := first.Sub(first.Truncate(interval))
		if offset >= interval/10 {
			t.Errorf("%s is %s off the beat", id, offset)
		}
		offsets[offset] = true
	}
	if len(offsets) < 3 {
		t.Errorf("clusters advertise at once: %v", offsets)
	}
}
