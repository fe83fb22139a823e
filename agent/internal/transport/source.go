package transport

import (
	"context"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// ResyncAll is the request that a Source enqueues after a Relist: the controller
// then enqueues every object that it keeps, since the broker may no longer have
// some of them.
var ResyncAll = reconcile.Request{}

// Source enqueues a request for each view of a Mirror that changes. It implements
// the source.Source of controller-runtime.
type Source[View any] struct {
	// Mirror to follow.
	Mirror *Mirror[View]
	// Key of the object to reconcile for a view; views with an empty name are
	// skipped.
	Key func(View) types.NamespacedName
	// Relisted, if set, is called after each Relist, before ResyncAll is enqueued.
	Relisted func()

	mu    sync.Mutex
	queue workqueue.TypedRateLimitingInterface[reconcile.Request]
}

// Start subscribes to the mirror. It does not block.
func (s *Source[View]) Start(_ context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
	s.mu.Lock()
	s.queue = queue
	s.mu.Unlock()
	s.Mirror.Subscribe(func(change Change[View]) {
		for _, view := range change.Views {
			s.Enqueue(s.Key(view))
		}
		if change.Relisted {
			if s.Relisted != nil {
				s.Relisted()
			}
			queue.Add(ResyncAll)
		}
	})
	return nil
}

// Enqueue adds a request for an object, unless its name is empty. The source must
// have been started.
func (s *Source[View]) Enqueue(key types.NamespacedName) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if key.Name != "" {
		s.queue.Add(reconcile.Request{NamespacedName: key})
	}
}
