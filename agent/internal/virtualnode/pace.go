package virtualnode

import (
	"context"
	"maps"
	"sync"
	"time"

	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// paceInterval is the minimum time between two reconciles of one object for events of pods.
const paceInterval = 500 * time.Millisecond

// maxPaced is the number of objects above which those without recent events are forgotten.
const maxPaced = 1024

// Paced returns a handler for the events of pods. It enqueues what a pod is mapped to at
// once, and then at most once in paceInterval, however many events come: a reconcile costs
// as much as there are pods, and takes account of all events before it.
func Paced(clock clock.PassiveClock, requestsFor handler.MapFunc) handler.EventHandler {
	p := &pace{clock: clock, due: map[reconcile.Request]time.Time{}}
	enqueue := func(ctx context.Context, q workqueue.TypedRateLimitingInterface[reconcile.Request], pods ...client.Object) {
		for _, pod := range pods {
			for _, request := range requestsFor(ctx, pod) {
				q.AddAfter(request, p.next(request))
			}
		}
	}
	type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]
	return handler.Funcs{
		CreateFunc:  func(ctx context.Context, e event.CreateEvent, q queue) { enqueue(ctx, q, e.Object) },
		UpdateFunc:  func(ctx context.Context, e event.UpdateEvent, q queue) { enqueue(ctx, q, e.ObjectOld, e.ObjectNew) },
		DeleteFunc:  func(ctx context.Context, e event.DeleteEvent, q queue) { enqueue(ctx, q, e.Object) },
		GenericFunc: func(ctx context.Context, e event.GenericEvent, q queue) { enqueue(ctx, q, e.Object) },
	}
}

// pace is when each object was, or is to be, reconciled for the last time.
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
