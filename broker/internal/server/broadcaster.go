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

// maxStreams is the maximum number of open streams of a cluster. One more ends the
// oldest, which may be a connection whose loss was not detected.
const maxStreams = 16

// broadcaster notifies the open streams of changes.
type broadcaster struct {
	mutex sync.Mutex
	// subscriptions by cluster, oldest first.
	subscriptions map[string][]*subscription
}

// subscription is one open stream.
type subscription struct {
	cluster string
	role    protocol.Role
	// changed has a token if objects may have changed.
	changed chan struct{}
	// dropped is closed to end the stream.
	dropped chan struct{}
}

func newBroadcaster() *broadcaster { return &broadcaster{subscriptions: map[string][]*subscription{}} }

func (b *broadcaster) subscribe(cluster string, role protocol.Role) *subscription {
	added := &subscription{cluster: cluster, role: role, changed: make(chan struct{}, 1), dropped: make(chan struct{})}
	b.mutex.Lock()
	defer b.mutex.Unlock()
	open := append(b.subscriptions[cluster], added)
	if len(open) > maxStreams {
		close(open[0].dropped)
		open = open[1:]
	}
	b.subscriptions[cluster] = open
	return added
}

func (b *broadcaster) unsubscribe(closed *subscription) {
	b.mutex.Lock()
	left := slices.DeleteFunc(b.subscriptions[closed.cluster], func(s *subscription) bool { return s == closed })
	if len(left) == 0 {
		delete(b.subscriptions, closed.cluster)
	} else {
		b.subscriptions[closed.cluster] = left
	}
	b.mutex.Unlock()
	// Another stream is the newest now.
	b.notify(closed.cluster, closed.role)
}

// newest reports whether a stream is the newest of its cluster and role.
func (b *broadcaster) newest(of *subscription) bool {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	for _, open := range slices.Backward(b.subscriptions[of.cluster]) {
		if open.role == of.role {
			return open == of
		}
	}
	return false
}

// notify notifies the streams of a cluster and role.
func (b *broadcaster) notify(cluster string, role protocol.Role) {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	for _, open := range b.subscriptions[cluster] {
		if open.role == role {
			open.notify()
		}
	}
}

func (b *broadcaster) notifyAll() {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	for _, streams := range b.subscriptions {
		for _, open := range streams {
			open.notify()
		}
	}
}

func (s *subscription) notify() {
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

// watch notifies the streams of the changes in the cache.
func (b *broadcaster) watch(informers cache.Cache) error {
	add := func(object client.Object, handler toolscache.ResourceEventHandler) error {
		informer, err := informers.GetInformer(context.Background(), object, cache.BlockUntilSynced(false))
		if err != nil {
			return fmt.Errorf("watching %T: %w", object, err)
		}
		if _, err := informer.AddEventHandler(handler); err != nil {
			return fmt.Errorf("watching %T: %w", object, err)
		}
		return nil
	}
	onReservation := func(object any) {
		if reservation, ok := eventObject[*broker.Reservation](object); ok {
			b.notify(reservation.Spec.RequesterID, protocol.RoleRequester)
		}
	}
	// A cluster's endpoint and key are in the views of other clusters, its holds in its
	// own.
	onAdvertisement := func(object any) {
		if _, ok := eventObject[*broker.ClusterAdvertisement](object); ok {
			b.notifyAll()
		}
	}
	onAdvertisementUpdate := func(before, after any) {
		old, _ := eventObject[*broker.ClusterAdvertisement](before)
		now, ok := eventObject[*broker.ClusterAdvertisement](after)
		switch {
		case !ok:
		case old == nil, old.Spec.PeerKey != now.Spec.PeerKey, old.Spec.EndpointURL != now.Spec.EndpointURL:
			b.notifyAll()
		case !equality.Semantic.DeepEqual(old.Status.Holds, now.Status.Holds):
			b.notify(now.Name, protocol.RoleProvider)
		}
	}
	if err := add(&broker.Reservation{}, toolscache.ResourceEventHandlerFuncs{AddFunc: onReservation, DeleteFunc: onReservation, UpdateFunc: func(before, after any) {
		onReservation(before)
		onReservation(after)
	}}); err != nil {
		return err
	}
	if err := add(&broker.ClusterAdvertisement{}, toolscache.ResourceEventHandlerFuncs{AddFunc: onAdvertisement, DeleteFunc: onAdvertisement, UpdateFunc: onAdvertisementUpdate}); err != nil {
		return err
	}
	// Authentication reads registrations from the cache: it is synced before the first call.
	return add(&broker.ClusterRegistration{}, toolscache.ResourceEventHandlerFuncs{})
}

// eventObject is the object of an informer's event, which may be a missed deletion.
func eventObject[T any](object any) (T, bool) {
	if missed, ok := object.(toolscache.DeletedFinalStateUnknown); ok {
		object = missed.Obj
	}
	typed, ok := object.(T)
	return typed, ok
}
