package stepwise

import (
	"sync/atomic"
	"time"
	"unsafe"

	"k8s.io/utils/clock"
)

// Clock is the clock of one machine: its wall time can be set, its durations are true.
type Clock struct {
	clock.RealClock
	// OnlyWall makes durations follow the wall time, as a planted fault.
	OnlyWall bool
	offset   atomic.Int64
}

var _ clock.WithTicker = &Clock{}

// Set sets the clock ahead of the true time.
func (c *Clock) Set(ahead time.Duration) { c.offset.Store(int64(ahead / time.Second)) }

// Now implements clock.PassiveClock.
func (c *Clock) Now() time.Time {
	now := shift(time.Now(), c.offset.Load())
	if c.OnlyWall {
		return now.Round(0)
	}
	return now
}

// Since implements clock.PassiveClock.
func (c *Clock) Since(t time.Time) time.Duration { return c.Now().Sub(t) }

// shift changes the wall time of a time, but not its monotonic reading, as a clock that
// is set does. Package time has no function for it, and no monotonic reading in a bubble:
// it is what has passed since the bubble's first second.
func shift(t time.Time, seconds int64) time.Time {
	const (
		hasMonotonic = 1 << 63
		secondsShift = 30
		// unixToWall is the number of seconds from 1885, where the encoding begins, to 1970.
		unixToWall = 2682288000
	)
	type encoding struct {
		wall uint64
		ext  int64
	}
	monotonic := t.Sub(bubbleStart).Nanoseconds() + 1
	words := (*encoding)(unsafe.Pointer(&t))
	*words = encoding{hasMonotonic | uint64(t.Unix()+seconds+unixToWall)<<secondsShift | uint64(t.Nanosecond()), monotonic}
	return t
}

// bubbleStart is the time at which bubbles begin.
var bubbleStart = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)
