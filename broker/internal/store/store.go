package store

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/decide"
	"github.com/spillway-dev/spillway/broker/internal/lease"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
	"github.com/spillway-dev/spillway/broker/internal/queue"
	"github.com/spillway-dev/spillway/broker/internal/settings"
)

// Store has the objects. They are shared and read-only: who adds one does not change it any
// more. It is safe for concurrent use.
type Store struct {
	clock clock.PassiveClock
	// watches report whether the store has what the caches had at first.
	watches []toolscache.InformerSynced
	// events is the number of those that were noted.
	events atomic.Uint64

	mu             sync.Mutex
	configs        objects[*broker.BrokerConfig]
	advertisements objects[*broker.ClusterAdvertisement]
	reservations   objects[*broker.Reservation]
	// receipts are when each cluster was last heard.
	receipts map[string]Receipt
	// sorted are all advertisements by name; nil if it must be made again. Readers may
	// keep it: it is never changed.
	sorted []*broker.ClusterAdvertisement
	// clusters are the same for decisions.
	clusters decide.Store
	// crowded are the ledgers in which a hold may find no room.
	crowded map[string]ledger.Size
	// unwritable are the ledgers whose last write was refused because of its size, until
	// they change.
	unwritable map[string]bool
	// holders are the clusters that have a hold of a Reservation, by its name: also
	// those with a hold of an earlier one of the same name.
	holders names
	// byRequester are the names of the Reservations of each cluster.
	byRequester names
	// creating are the names of those that are being created, and are not known yet.
	creating names
	// newest is the latest time by which a Reservation is ordered in the queue.
	newest time.Time
}

// New returns a Store that knows nothing.
func New(clock clock.PassiveClock) *Store {
	return &Store{
		clock:          clock,
		configs:        newObjects[*broker.BrokerConfig](clock),
		advertisements: newObjects[*broker.ClusterAdvertisement](clock),
		reservations:   newObjects[*broker.Reservation](clock),
		receipts:       map[string]Receipt{},
		crowded:        map[string]ledger.Size{},
		unwritable:     map[string]bool{},
		holders:        names{},
		byRequester:    names{},
		creating:       names{},
	}
}

// Settings are those of the BrokerConfig in use.
func (s *Store) Settings() settings.Settings {
	s.mu.Lock()
	config := s.configs.known[settings.Name]
	s.mu.Unlock()
	if config == nil {
		config = &broker.BrokerConfig{}
	}
	return settings.Of(&config.Spec)
}

// PutReservation adds a version of a Reservation, unless it knows a newer one.
func (s *Store) PutReservation(r *broker.Reservation) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.newest = lease.Later(s.newest, queue.Since(r, r.Status.QueueTime))
	if !s.reservations.news(r) {
		return
	}
	if before := s.reservations.known[r.Name]; before != nil {
		s.byRequester.remove(before.Spec.RequesterID, r.Name)
	}
	s.byRequester.add(r.Spec.RequesterID, r.Name)
	s.reservations.known[r.Name] = r
	s.creating.remove(r.Spec.RequesterID, r.Name)
}

// RemoveReservation forgets a Reservation that is gone, and no newer one of its name.
func (s *Store) RemoveReservation(r *broker.Reservation) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if known := s.reservations.known[r.Name]; s.reservations.remove(r) {
		s.byRequester.remove(known.Spec.RequesterID, r.Name)
	}
}

// Reservation is nil if the store knows none of that name.
func (s *Store) Reservation(name string) *broker.Reservation {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.reservations.known[name]
}

// Exists reports whether the store knows the Reservation with that name and UID.
func (s *Store) Exists(name string, uid types.UID) bool {
	r := s.Reservation(name)
	return r != nil && r.UID == uid
}

// Reservations are in no order.
func (s *Store) Reservations() []*broker.Reservation {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.reservations.known))
}

// ReservationNames are in no order.
func (s *Store) ReservationNames() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Keys(s.reservations.known))
}

// ReservationsOf are those of a requester, sorted by name.
func (s *Store) ReservationsOf(requester string) []*broker.Reservation {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []*broker.Reservation
	for _, name := range slices.Sorted(maps.Keys(s.byRequester[requester])) {
		all = append(all, s.reservations.known[name])
	}
	return all
}

// AfterAll is a time just after those by which all known Reservations are ordered in the
// queue.
func (s *Store) AfterAll() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.newest.Add(time.Microsecond)
}

// PutAdvertisement adds a version of an advertisement, unless it knows a newer one.
func (s *Store) PutAdvertisement(ad *broker.ClusterAdvertisement) {
	// An agent in the hub keeps a copy of its advertisement in the same namespace, under
	// another name: it is not a second offer.
	if ad.Name != ad.Spec.ClusterID || !s.isNews(ad) {
		return
	}
	size := ledger.SizeOf(&ad.Spec, ad.Status.Holds) // encodes the holds
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.advertisements.news(ad) {
		return
	}
	before := s.advertisements.known[ad.Name]
	s.advertisements.known[ad.Name] = ad
	s.clusters.Upsert(&ad.Spec, ad.Status.Holds)
	s.changed(ad.Name, before, ad)
	if size.Crowded() {
		s.crowded[ad.Name] = size
	}
}

func (s *Store) isNews(ad *broker.ClusterAdvertisement) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.advertisements.news(ad)
}

// RemoveAdvertisement forgets a deleted advertisement and when it was received, and no newer
// one of its name.
func (s *Store) RemoveAdvertisement(ad *broker.ClusterAdvertisement) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if known := s.advertisements.known[ad.Name]; s.advertisements.remove(ad) {
		delete(s.receipts, ad.Name)
		s.clusters.Remove(ad.Name)
		s.changed(ad.Name, known, nil)
	}
}

// changed brings up to date what follows from a cluster's advertisement, nil for none. The
// caller holds the lock.
func (s *Store) changed(cluster string, before, after *broker.ClusterAdvertisement) {
	s.sorted = nil
	delete(s.crowded, cluster)
	delete(s.unwritable, cluster)
	now := map[string]bool{}
	if after != nil {
		for i := range after.Status.Holds {
			name := after.Status.Holds[i].ReservationName
			now[name] = true
			s.holders.add(name, cluster)
		}
	}
	if before == nil {
		return
	}
	for i := range before.Status.Holds {
		if name := before.Status.Holds[i].ReservationName; !now[name] {
			s.holders.remove(name, cluster)
		}
	}
}

// Advertisement is nil if the store knows none of that name.
func (s *Store) Advertisement(name string) *broker.ClusterAdvertisement {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.advertisements.known[name]
}

// Advertisements are sorted by cluster ID.
func (s *Store) Advertisements() []*broker.ClusterAdvertisement {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sorted == nil {
		s.sorted = slices.AppendSeq(make([]*broker.ClusterAdvertisement, 0, len(s.advertisements.known)), maps.Values(s.advertisements.known))
		slices.SortFunc(s.sorted, func(a, b *broker.ClusterAdvertisement) int { return cmp.Compare(a.Name, b.Name) })
	}
	return s.sorted
}

// Clusters are the advertisements for a decision.
func (s *Store) Clusters(activity decide.Activity) decide.Snapshot {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.clusters.Snapshot(activity)
}

// HoldersOf are the clusters with a hold of a Reservation of that name, sorted.
func (s *Store) HoldersOf(reservation string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.holders[reservation]))
}
