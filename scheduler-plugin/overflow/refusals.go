package overflow

import (
	"maps"
	"sync"
	"time"

	"k8s.io/utils/clock"

	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// Kinds of refusals.
const (
	// refusedWrite: the API server does not accept the Reservation as it is, there, now.
	refusedWrite = "refused"
	// failedWrite: the API server cannot process the request.
	failedWrite = "failed"
)

// keepRefusals is how long a refusal counts that is not repeated: longer than a request for
// pods that wait is retried.
const keepRefusals = 4 * blockedRetryAfter

// refusals remembers since when the API server has not accepted Reservations. A refusal is
// believed once it has lasted for refusalLasts: while the API server starts, it refuses also
// what it will allow. Where one was believed lately, those of other keys are believed at once:
// a quota or an admission policy of the namespace holds for all. Safe for concurrent use.
type refusals struct {
	clock clock.PassiveClock

	mu       sync.Mutex
	byKey    map[demand.Key]refusal
	believed map[refusalsOf]time.Time
}

// refusal is the last of some in a row of one kind.
type refusal struct {
	kind      string
	since, at time.Time
}

type refusalsOf struct{ namespace, kind string }

func newRefusals(clock clock.PassiveClock) *refusals {
	return &refusals{clock: clock, byKey: map[demand.Key]refusal{}, believed: map[refusalsOf]time.Time{}}
}

// add records a refusal, and returns in what time it is believed if it lasts; zero if it is.
func (r *refusals) add(key demand.Key, kind string) (believedIn time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.clock.Now()
	maps.DeleteFunc(r.byKey, func(_ demand.Key, last refusal) bool { return now.Sub(last.at) > keepRefusals })
	maps.DeleteFunc(r.believed, func(_ refusalsOf, at time.Time) bool { return now.Sub(at) > keepRefusals })
	last, known := r.byKey[key]
	if !known || last.kind != kind {
		last = refusal{kind: kind, since: now}
	}
	last.at = now
	r.byKey[key] = last
	of := refusalsOf{key.Namespace, kind}
	if _, lately := r.believed[of]; !lately && now.Sub(last.since) < refusalLasts {
		return refusalLasts - now.Sub(last.since)
	}
	r.believed[of] = now
	return 0
}

// end records that a Reservation was written, or that the API server has not answered.
func (r *refusals) end(key demand.Key) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.byKey, key)
}
