package store

import (
	"context"
	"fmt"

	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Watch follows the objects of a namespace in a cache, and ClusterRegistrations only for its
// observers: they are called for each event, after the store has it, with the versions before
// and after it, nil for none.
func (s *Store) Watch(informers cache.Cache, namespace string, observers ...func(before, after client.Object)) error {
	handle := func(before, after client.Object) {
		object := after
		if object == nil {
			object = before
		}
		if object.GetNamespace() != namespace {
			return
		}
		s.Note(object, after == nil)
		for _, observe := range observers {
			observe(before, after)
		}
	}
	// Authentication reads registrations from the cache: they are synced with the store.
	for _, kind := range []client.Object{&broker.Reservation{}, &broker.ClusterAdvertisement{}, &broker.ClusterRegistration{}, &broker.BrokerConfig{}} {
		informer, err := informers.GetInformer(context.Background(), kind, cache.BlockUntilSynced(false))
		if err != nil {
			return fmt.Errorf("watching %T: %w", kind, err)
		}
		registration, err := informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
			AddFunc:    func(now any) { handle(nil, now.(client.Object)) },
			UpdateFunc: func(last, now any) { handle(last.(client.Object), now.(client.Object)) },
			DeleteFunc: func(last any) {
				if missed, ok := last.(toolscache.DeletedFinalStateUnknown); ok {
					last = missed.Obj
				}
				handle(last.(client.Object), nil)
			},
		})
		if err != nil {
			return fmt.Errorf("watching %T: %w", kind, err)
		}
		s.watches = append(s.watches, registration.HasSynced)
	}
	return nil
}

// WaitSynced waits until the store has all that the caches of Watch had at first, and reports
// false if the context ends before.
func (s *Store) WaitSynced(ctx context.Context) bool {
	return toolscache.WaitForCacheSync(ctx.Done(), s.watches...)
}

// Events is a number that is another one once the store has changed by an event.
func (s *Store) Events() uint64 { return s.events.Load() }

// Note takes note of an event of a watch: of the object as it is now, or was before it was
// deleted. Each watch notes its own, since those of others may come later.
func (s *Store) Note(object client.Object, deleted bool) {
	defer s.events.Add(1)
	switch o := object.(type) {
	case *broker.Reservation:
		if deleted {
			s.RemoveReservation(o)
		} else {
			s.PutReservation(o)
		}
	case *broker.ClusterAdvertisement:
		if deleted {
			s.RemoveAdvertisement(o)
		} else {
			s.PutAdvertisement(o)
		}
	case *broker.BrokerConfig:
		s.mu.Lock()
		defer s.mu.Unlock()
		if deleted {
			s.configs.remove(o)
		} else if s.configs.news(o) {
			s.configs.known[o.Name] = o
		}
	}
}
