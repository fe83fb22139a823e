package stepwise

import (
	"slices"
	"sync"
	"time"

	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// queue is a controller's work queue. A worker gets a request when the scheduler says
// so; otherwise it is as the queues of client-go.
type queue struct {
	name    string
	limiter workqueue.TypedRateLimiter[reconcile.Request]

	mu         sync.Mutex
	ready      []reconcile.Request
	processing map[reconcile.Request]bool
	// again are requests that were added while they were processed.
	again map[reconcile.Request]bool
	// later are the times at which requests become ready.
	later    map[reconcile.Request]time.Time
	idle     int
	hand     chan reconcile.Request
	down     chan struct{}
	shutdown bool
}

var _ workqueue.TypedRateLimitingInterface[reconcile.Request] = &queue{}

func newQueue(name string, limiter workqueue.TypedRateLimiter[reconcile.Request]) *queue {
	return &queue{
		name: name, limiter: limiter,
		processing: map[reconcile.Request]bool{}, again: map[reconcile.Request]bool{}, later: map[reconcile.Request]time.Time{},
		hand: make(chan reconcile.Request), down: make(chan struct{}),
	}
}

// steps appends a step for each ready request, if a worker is idle.
func (q *queue) steps(steps []Step) []Step {
	q.mu.Lock()
	defer q.mu.Unlock()
	now := time.Now()
	for request, due := range q.later {
		if !now.Before(due) {
			delete(q.later, request)
			q.add(request)
		}
	}
	if q.shutdown || q.idle == 0 {
		return steps
	}
	for _, request := range q.ready {
		steps = append(steps, Step{Name: q.name + " takes " + request.String(), Do: func() { q.handOut(request) }})
	}
	return steps
}

func (q *queue) handOut(request reconcile.Request) {
	q.mu.Lock()
	q.ready = slices.DeleteFunc(q.ready, func(r reconcile.Request) bool { return r == request })
	q.processing[request] = true
	q.idle--
	q.mu.Unlock()
	q.hand <- request
}

// add adds a request; the caller holds the lock.
func (q *queue) add(request reconcile.Request) {
	switch {
	case q.shutdown || slices.Contains(q.ready, request):
	case q.processing[request]:
		q.again[request] = true
	default:
		q.ready = append(q.ready, request)
	}
}

// Add implements workqueue.TypedInterface.
func (q *queue) Add(request reconcile.Request) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.add(request)
}

// AddAfter implements workqueue.TypedDelayingInterface.
func (q *queue) AddAfter(request reconcile.Request, after time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if after <= 0 {
		q.add(request)
		return
	}
	due := time.Now().Add(after)
	if before, ok := q.later[request]; !ok || due.Before(before) {
		q.later[request] = due
	}
}

// AddRateLimited implements workqueue.TypedRateLimitingInterface.
func (q *queue) AddRateLimited(request reconcile.Request) {
	q.AddAfter(request, q.limiter.When(request))
}

// Forget implements workqueue.TypedRateLimitingInterface.
func (q *queue) Forget(request reconcile.Request) { q.limiter.Forget(request) }

// NumRequeues implements workqueue.TypedRateLimitingInterface.
func (q *queue) NumRequeues(request reconcile.Request) int { return q.limiter.NumRequeues(request) }

// Len implements workqueue.TypedInterface.
func (q *queue) Len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.ready)
}

// Get implements workqueue.TypedInterface.
func (q *queue) Get() (reconcile.Request, bool) {
	q.mu.Lock()
	q.idle++
	q.mu.Unlock()
	select {
	case request := <-q.hand:
		return request, false
	case <-q.down:
		return reconcile.Request{}, true
	}
}

// Done implements workqueue.TypedInterface.
func (q *queue) Done(request reconcile.Request) {
	q.mu.Lock()
	defer q.mu.Unlock()
	delete(q.processing, request)
	if q.again[request] {
		delete(q.again, request)
		q.add(request)
	}
}

// ShutDown implements workqueue.TypedInterface.
func (q *queue) ShutDown() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.shutdown {
		q.shutdown = true
		close(q.down)
	}
}

// ShutDownWithDrain implements workqueue.TypedInterface.
func (q *queue) ShutDownWithDrain() { q.ShutDown() }

// ShuttingDown implements workqueue.TypedInterface.
func (q *queue) ShuttingDown() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.shutdown
}
