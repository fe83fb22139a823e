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
// is set does. Package time has no function for it.
func shift(t time.Time, seconds int64) time.Time {
	const secondsShift = 30 // the lower bits of the first word are nanoseconds
	wall := (*uint64)(unsafe.Pointer(&t))
	*wall += uint64(seconds << secondsShift)
	return t
}
