package server

import (
	"math"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/utils/clock"

	"github.com/spillway-dev/spillway/broker/protocol"
)

const (
	// maxLimiters is the maximum number of callers with a rate limiter of their own.
	maxLimiters = 1 << 16
	// cleanupPeriod is the minimum time between two searches for limiters that are not
	// needed any more.
	cleanupPeriod = time.Second
)

// limiters limit the rate of each caller.
type limiters struct {
	clock clock.PassiveClock
	// limits are the current ones.
	limits func() (perSecond float64, burst int)

	mutex     sync.Mutex
	byKey     map[string]*rate.Limiter
	cleanedAt time.Time
}

func newLimiters(clock clock.PassiveClock, limits func() (perSecond float64, burst int)) *limiters {
	return &limiters{clock: clock, limits: limits, byKey: map[string]*rate.Limiter{}}
}

// always are limits that do not change.
func always(perSecond float64, burst int) func() (float64, int) {
	return func() (float64, int) { return perSecond, burst }
}

// take takes n calls from the limit of a caller, or nothing if there are not as many: then
// it returns when there are. n is at most the burst.
func (l *limiters) take(key string, n int) (wait time.Duration) {
	perSecond, burst := l.limits()
	l.mutex.Lock()
	defer l.mutex.Unlock()
	now := l.clock.Now()
	limiter, known := l.byKey[key]
	if !known {
		if len(l.byKey) >= maxLimiters && now.Sub(l.cleanedAt) >= cleanupPeriod {
			l.cleanup(now)
		}
		if len(l.byKey) >= maxLimiters {
			// All further callers share one limiter.
			key = ""
			limiter, known = l.byKey[key]
		}
	}
	if !known {
		limiter = rate.NewLimiter(rate.Limit(perSecond), burst)
		l.byKey[key] = limiter
	}
	if limiter.Limit() != rate.Limit(perSecond) || limiter.Burst() != burst {
		limiter.SetLimitAt(now, rate.Limit(perSecond))
		limiter.SetBurstAt(now, burst)
	}
	n = min(n, burst)
	if limiter.AllowN(now, n) {
		return 0
	}
	missing := float64(n) - limiter.TokensAt(now)
	return time.Duration(missing / perSecond * float64(time.Second))
}

// cleanup deletes the limiters that are full again: a new one is the same.
func (l *limiters) cleanup(now time.Time) {
	l.cleanedAt = now
	for key, limiter := range l.byKey {
		if limiter.TokensAt(now) >= float64(limiter.Burst()) {
			delete(l.byKey, key)
		}
	}
}

// slower refuses a call that is over a rate limit until the wait is over.
func slower(wait time.Duration, format string, args ...any) error {
	refusal := refuse(protocol.CodeTooMany, format, args...)
	refusal.RetryAfter = max(wait, time.Millisecond)
	refusal.Message += ": retry after " + time.Duration(math.Ceil(wait.Seconds())*float64(time.Second)).String()
	return refusal
}

// takeWrite counts a call that changes an object in the hub, or reaches another cluster, of an
// amount of bytes of JSON: large ones count as several.
func (s *Server) takeWrite(caller string, size int) error {
	if wait := s.writers.take(caller, 1+size/writeSize); wait > 0 {
		return slower(wait, "cluster %s exceeds the rate limit of its writes, %d per second (spec.quotas.writesPerSecond of the BrokerConfig in the hub)", caller, s.quotas().writesPerSecond)
	}
	return nil
}

const (
	// writeSize is the size up to which a write counts as one.
	writeSize = 8 << 10
	// maxLists is the maximum number of lists of one cluster, and of first lists of its streams,
	// that are in progress at the same time: each may need some MB of memory until the cluster
	// has read it.
	maxLists = 4
)

// maxCalls is the maximum number of calls of one cluster that are in progress at the same
// time. Each may need memory of the size of its body and its response until the cluster
// has sent or read it.
const maxCalls = 80

// inProgress counts the calls of each caller that are in progress.
type inProgress struct {
	mutex sync.Mutex
	calls map[string]int
}

// begin counts a call, unless there are as many as there may be at most.
func (p *inProgress) begin(caller string, most int) bool {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if p.calls == nil {
		p.calls = map[string]int{}
	}
	if p.calls[caller] >= most {
		return false
	}
	p.calls[caller]++
	return true
}

func (p *inProgress) end(caller string) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if p.calls[caller]--; p.calls[caller] == 0 {
		delete(p.calls, caller)
	}
}
