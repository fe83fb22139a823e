package limits

import (
	"fmt"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"
)

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func TestRateLimitsPerCaller(t *testing.T) {
	clock := clocktesting.NewFakePassiveClock(start)
	rates := NewRates(clock, Always(1, 2))
	for i, want := range []bool{true, true, false} {
		if got := rates.Take("rome", 1) == 0; got != want {
			t.Fatalf("call %d of rome: %v", i, got)
		}
	}
	if rates.Take("paris", 1) > 0 {
		t.Fatal("the calls of rome count for paris")
	}
	clock.SetTime(start.Add(time.Second))
	if rates.Take("rome", 1) > 0 {
		t.Fatal("rome is still limited after a second")
	}
	for i := range maxLimiters + 10 {
		rates.Take(fmt.Sprint(i), 1)
		rates.Take("oslo", 1)
	}
	if rates.byKey.Len() > maxLimiters {
		t.Fatalf("%d callers have a limiter", rates.byKey.Len())
	}
	if rates.Take("oslo", 1) == 0 {
		t.Fatal("who calls again and again is not limited beside many others")
	}
	if rates.Take("new", 1) > 0 {
		t.Fatal("the calls of others count for a new caller")
	}
}
