package stepwise

import (
	"testing"
	"testing/synctest"
	"time"
)

// TestClock checks that setting a clock changes its wall time only.
func TestClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		clock := &Clock{}
		before := clock.Now()
		if got := time.Until(before); got != 0 {
			t.Errorf("the clock is %s ahead", got)
		}
		for _, ahead := range []time.Duration{2 * time.Hour, -3 * time.Hour, 0} {
			clock.Set(ahead)
			<-time.After(time.Second)
			if got := clock.Since(before); got%time.Second != 0 || got <= 0 || got > 3*time.Second {
				t.Errorf("%s ahead: %s passed", ahead, got)
			}
			if got := time.Until(clock.Now().Round(0)); got != ahead {
				t.Errorf("the wall time is %s ahead instead of %s", got, ahead)
			}
		}
	})
}
