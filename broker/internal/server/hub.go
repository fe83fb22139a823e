package server

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/api/equality"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// maxStreams is how many streams one cluster may have open. Over it the oldest
// ends: a connection that broke unseen must not keep its successor out.
const maxStreams = 16

// hub tells the open streams that what they show may have changed.
type hub struct {
	mutex sync.Mutex
	// subscriptions by cluster, oldest first.
	subscriptions map[string][]*subscription
}

// subscription is one open stream.
type subscription struct {
	cluster string
	role    protocol.Role
	// changed holds one token if something may have changed.
	changed chan struct{}
	// dropped is closed when the stream is to end.
	dropped chan struct{}
}

func newHub() *hub { return &hub{subscriptions: map[string][]*subscription{}} }

func (h *hub) subscribe(cluster string, role protocol.Role) *subscription {
	added := &subscription{cluster: cluster, role: role, changed: make(chan struct{}, 1), dropped: make(chan struct{})}
	h.mutex.Lock()
	defer h.mutex.Unlock()
	open := append(h.subscriptions[cluster], added)
	if len(open) > maxStreams {
		close(open[0].dropped)
		open = open[1:]
	}
	h.subscriptions[cluster] = open
	return added
}

func (h *hub) unsubscribe(gone *subscription) {
	h.mutex.Lock()
	left := slices.DeleteFunc(h.subscriptions[gone.cluster], func(s *subscription) bool { return s == gone })
	if len(left) == 0 {
		delete(h.subscriptions, gone.cluster)
	} else {
		h.subscriptions[gone.cluster] = left
	}
	h.mutex.Unlock()
	// What the newest would have shown is now another's to show.
	h.notify(gone.cluster, gone.role)
}

// newest reports whether no younger stream of its cluster and role is open.
func (h *hub) newest(of *subscription) bool {
	h.mutex.Lock()
	defer h.mutex.Unlock()
	for _, open := range slices.Backward(h.subscriptions[of.cluster]) {
		if open.role == of.role {
			return open == of
		}
	}
	return false
}

// notify wakes the streams of one cluster and role.
func (h *hub) notify(cluster string, role protocol.Role) {
	h.mutex.Lock()
	defer h.mutex.Unlock()
	for _, open := range h.subscriptions[cluster] {
		if open.role == role {
			open.wake()
		}
	}
}

func (h *hub) notifyAll() {
	h.mutex.Lock()
	defer h.mutex.Unlock()
	for _, streams := range h.subscriptions {
		for _, open := range streams {
			open.wake()
		}
	}
}

func (s *subscription) wake() {
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

// follow wakes streams on what the cache sees change.
func (h *hub) follow(informers cache.Cache) error {
	watch := func(object client.Object, handler toolscache.ResourceEventHandler) error {
		informer, err := informers.GetInformer(context.Background(), object, cache.BlockUntilSynced(false))
		if err != nil {
			return fmt.Errorf("watching %T: %w", object, err)
		}
		if _, err := informer.AddEventHandler(handler); err != nil {
			return fmt.Errorf("watching %T: %w", object, err)
		}
		return nil
	}
	reservation := func(object any) {
		if reservation, ok := known[*broker.Reservation](object); ok {
			h.notify(reservation.Spec.RequesterID, protocol.RoleRequester)
		}
	}
	// How a cluster is reached shows in other clusters' views; what is held there
	// in its own.
	advertisement := func(object any) {
		if _, ok := known[*broker.ClusterAdvertisement](object); ok {
			h.notifyAll()
		}
	}
	updated := func(before, after any) {
		old, _ := known[*broker.ClusterAdvertisement](before)
		now, ok := known[*broker.ClusterAdvertisement](after)
		switch {
		case !ok:
		case old == nil, old.Spec.PeerKey != now.Spec.PeerKey, old.Spec.EndpointURL != now.Spec.EndpointURL:
			h.notifyAll()
		case !equality.Semantic.DeepEqual(old.Status.Holds, now.Status.Holds):
			h.notify(now.Name, protocol.RoleProvider)
		}
	}
	if err := watch(&broker.Reservation{}, toolscache.ResourceEventHandlerFuncs{AddFunc: reservation, DeleteFunc: reservation, UpdateFunc: func(before, after any) {
		reservation(before)
		reservation(after)
	}}); err != nil {
		return err
	}
	if err := watch(&broker.ClusterAdvertisement{}, toolscache.ResourceEventHandlerFuncs{AddFunc: advertisement, DeleteFunc: advertisement, UpdateFunc: updated}); err != nil {
		return err
	}
	// Calls look registrations up: the cache is to know them before the first.
	return watch(&broker.ClusterRegistration{}, toolscache.ResourceEventHandlerFuncs{})
}

// known is the object of an informer's event, also of one that was missed.
func known[T any](object any) (T, bool) {
	if missed, ok := object.(toolscache.DeletedFinalStateUnknown); ok {
		object = missed.Obj
	}
	typed, ok := object.(T)
	return typed, ok
}
