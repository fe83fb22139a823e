package advertise_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/spillway-dev/spillway/agent/internal/advertise"
)

func TestNextBeat(t *testing.T) {
	const interval = 30 * time.Second
	start := time.Unix(1_700_000_000, 0)
	// By tenths of the interval.
	beats := map[int]int{}
	const clusters = 1000
	for i := range clusters {
		id := fmt.Sprintf("cluster-%d", i)
		first := advertise.NextBeat(start, interval, id)
		if wait := first.Sub(start); wait <= 0 || wait > interval {
			t.Errorf("%s waits %s", id, wait)
		}
		if second := advertise.NextBeat(first, interval, id); second.Sub(first) != interval {
			t.Errorf("%s beats after %s", id, second.Sub(first))
		}
		beats[int(10*first.Sub(first.Truncate(interval))/interval)]++
	}
	for tenth := range 10 {
		if n := beats[tenth]; n > clusters/5 {
			t.Errorf("%d of %d clusters advertise in one tenth of the interval: %v", n, clusters, beats)
		}
	}
}
