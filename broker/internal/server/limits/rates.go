package limits

import (
	"sync"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/utils/clock"
	"k8s.io/utils/lru"
)

// maxLimiters is the maximum number of callers whose rate is known: who called longest ago is
// forgotten.
const maxLimiters = 1 << 16

// Rates limit the rate of each caller.
type Rates struct {
	clock clock.PassiveClock
	// limits are the current ones.
	limits func() (perSecond float64, burst int)

	mutex sync.Mutex
	// byKey are the limiters (*rate.Limiter) of callers.
	byKey *lru.Cache
}

// NewRates returns Rates with the limits that are current at each call.
func NewRates(clock clock.PassiveClock, limits func() (perSecond float64, burst int)) *Rates {
	return &Rates{clock: clock, limits: limits, byKey: lru.New(maxLimiters)}
}

// Always are limits that do not change.
func Always(perSecond float64, burst int) func() (float64, int) {
	return func() (float64, int) { return perSecond, burst }
}

// Take takes n calls from the limit of a caller, or nothing if there are not as many: then
// it returns when there are. n is at most the burst.
func (r *Rates) Take(key string, n int) (wait time.Duration) {
	perSecond, burst := r.limits()
	r.mutex.Lock()
	defer r.mutex.Unlock()
	now := r.clock.Now()
	known, _ := r.byKey.Get(key)
	limiter, _ := known.(*rate.Limiter)
	if limiter == nil {
		limiter = rate.NewLimiter(rate.Limit(perSecond), burst)
		r.byKey.Add(key, limiter)
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

// InProgress counts the calls of each caller that are in progress.
type InProgress struct {
	mutex sync.Mutex
	calls map[string]int
}

// Begin counts a call, unless there are as many as there may be at most.
func (p *InProgress) Begin(caller string, most int) bool {
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

// End counts the end of a call that Begin has counted.
func (p *InProgress) End(caller string) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if p.calls[caller]--; p.calls[caller] == 0 {
		delete(p.calls, caller)
	}
}
