package podindex

import (
	"maps"
	"sync"
	"time"

	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// paceInterval is the minimum time between two reconciles of one object for events of pods.
const paceInterval = 500 * time.Millisecond

// maxPaced is the number of objects above which those without recent events are forgotten.
const maxPaced = 1024

// pace is when each object was, or is to be, reconciled for the last time. A pod's event makes
// it due at once, and then at most once in paceInterval, however many events come: a reconcile
// takes account of all events before it.
type pace struct {
	clock clock.PassiveClock

	mu  sync.Mutex
	due map[reconcile.Request]time.Time
}

// next returns after which time to reconcile an object for an event. It is the same for all
// events before that time, and each of them is to be added: the queue has one timer for an
// object, which something else, such as a retry, may have moved to before the event.
func (p *pace) next(request reconcile.Request) (wait time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.clock.Now()
	last, known := p.due[request]
	if last.After(now) {
		return last.Sub(now)
	}
	if len(p.due) >= maxPaced && !known {
		maps.DeleteFunc(p.due, func(_ reconcile.Request, due time.Time) bool { return !now.Before(due.Add(paceInterval)) })
	}
	wait = max(0, last.Add(paceInterval).Sub(now))
	p.due[request] = now.Add(wait)
	return wait
}
