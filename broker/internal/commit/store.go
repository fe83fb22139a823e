package commit

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/decide"
	"github.com/spillway-dev/spillway/broker/internal/lease"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
	"github.com/spillway-dev/spillway/broker/internal/queue"
)

// Store is what this broker knows of the ClusterAdvertisements and Reservations: from
// the watch, and from its own writes before the watch repeats them. Its indexes find
// what a change concerns without a list. The objects in it are shared and read-only.
type Store struct {
	mu             sync.Mutex
	advertisements map[string]*broker.ClusterAdvertisement
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
	holders      map[string]map[string]bool
	reservations map[string]*broker.Reservation
	// newest is the latest time by which a Reservation is ordered in the queue.
	newest time.Time
	clock  clock.PassiveClock
	// gone are the objects that were removed lately: an event or a cache may still have an
	// earlier version. removals are the same in their order.
	gone     map[types.UID]time.Time
	removals []removal
}

// removal is when an object was removed.
type removal struct {
	uid types.UID
	at  time.Time
}

// goneFor is how long a cache may still have an object that is gone.
const goneFor = 30 * time.Second

func newStore(clock clock.PassiveClock) *Store {
	return &Store{
		clock:          clock,
		gone:           map[types.UID]time.Time{},
		advertisements: map[string]*broker.ClusterAdvertisement{},
		crowded:        map[string]ledger.Size{},
		unwritable:     map[string]bool{},
		holders:        map[string]map[string]bool{},
		reservations:   map[string]*broker.Reservation{},
	}
}

// older reports whether an object is an older version than another one, or the same.
func older(object, than client.Object) bool {
	order, err := resourceversion.CompareResourceVersion(object.GetResourceVersion(), than.GetResourceVersion())
	return err == nil && order <= 0
}

// PutAdvertisement adds a version of an advertisement, unless it knows a newer one. The
// caller does not change it any more.
func (s *Store) PutAdvertisement(ad *broker.ClusterAdvertisement) {
	// An agent in the hub keeps a copy of its advertisement in the same namespace, under
	// another name: it is not a second offer.
	if ad.Name != ad.Spec.ClusterID {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	known := s.advertisements[ad.Name]
	if known != nil && older(ad, known) || s.isGone(ad.UID) {
		return
	}
	s.advertisements[ad.Name], s.sorted = ad, nil
	s.clusters.Upsert(&ad.Spec, ad.Status.Holds)
	delete(s.crowded, ad.Name)
	delete(s.unwritable, ad.Name)
	if size := ledger.SizeOf(&ad.Spec, ad.Status.Holds); size.Crowded() {
		s.crowded[ad.Name] = size
	}
	s.indexHolds(ad.Name, known, ad)
}

// RemoveAdvertisement forgets a deleted advertisement, and no newer one of its name.
func (s *Store) RemoveAdvertisement(ad *broker.ClusterAdvertisement) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.noteGone(ad.UID)
	if known := s.advertisements[ad.Name]; known != nil && known.UID == ad.UID {
		delete(s.advertisements, ad.Name)
		s.sorted = nil
		s.clusters.Remove(ad.Name)
		delete(s.crowded, ad.Name)
		delete(s.unwritable, ad.Name)
		s.indexHolds(ad.Name, known, nil)
	}
}

// indexHolds replaces the holds of a cluster's last version in the index.
func (s *Store) indexHolds(cluster string, before, after *broker.ClusterAdvertisement) {
	now := map[string]bool{}
	if after != nil {
		for i := range after.Status.Holds {
			name := after.Status.Holds[i].ReservationName
			now[name] = true
			if s.holders[name] == nil {
				s.holders[name] = map[string]bool{}
			}
			s.holders[name][cluster] = true
		}
	}
	if before == nil {
		return
	}
	for i := range before.Status.Holds {
		if name := before.Status.Holds[i].ReservationName; !now[name] {
			delete(s.holders[name], cluster)
			if len(s.holders[name]) == 0 {
				delete(s.holders, name)
			}
		}
	}
}

// Advertisement is nil if the store knows none of that name.
func (s *Store) Advertisement(name string) *broker.ClusterAdvertisement {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.advertisements[name]
}

// Advertisements are sorted by cluster ID.
func (s *Store) Advertisements() []*broker.ClusterAdvertisement {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sorted == nil {
		s.sorted = make([]*broker.ClusterAdvertisement, 0, len(s.advertisements))
		for _, ad := range s.advertisements {
			s.sorted = append(s.sorted, ad)
		}
		slices.SortFunc(s.sorted, func(a, b *broker.ClusterAdvertisement) int { return cmp.Compare(a.Name, b.Name) })
	}
	return s.sorted
}

// Clusters are the advertisements for a decision.
func (s *Store) Clusters(activity decide.Activity) decide.Snapshot {
	return s.clusters.Snapshot(activity)
}

// Full are the clusters whose ledgers have no room for a hold of that capacity, and why. Those that hold capacity for it already are judged by the growth.
func (s *Store) Full(want broker.HeldCapacity, holders []string) map[string]capacity.Rejection {
	s.mu.Lock()
	defer s.mu.Unlock()
	full := map[string]capacity.Rejection{}
	for cluster, size := range s.crowded {
		if slices.Contains(holders, cluster) {
			continue
		}
		if err := size.Room(want); err != nil {
			full[cluster] = capacity.Rejection{Reason: ledger.ReasonFull, Message: err.Error()}
		}
	}
	for cluster := range s.unwritable {
		full[cluster] = capacity.Rejection{Reason: ledger.ReasonFull, Message: errUnwritable.Error()}
	}
	return full
}

// errUnwritable means that a ledger is too large to be written.
var errUnwritable = &ledger.FullError{Message: "The API server refused the cluster's ledger because of its size. It is tried again when the cluster's advertisement or its holds change."}

// markUnwritable records that a ledger is too large to be written, unless the store knows
// a newer version than the one that was to be changed.
func (s *Store) markUnwritable(ad *broker.ClusterAdvertisement) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if known := s.advertisements[ad.Name]; known != nil && older(known, ad) {
		s.unwritable[ad.Name] = true
	}
}

// HoldersOf are the clusters with a hold of a Reservation of that name, sorted.
func (s *Store) HoldersOf(reservation string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var clusters []string
	for cluster := range s.holders[reservation] {
		clusters = append(clusters, cluster)
	}
	slices.Sort(clusters)
	return clusters
}

// PutReservation adds a version of a Reservation, unless it knows a newer one. The
// caller does not change it any more.
func (s *Store) PutReservation(r *broker.Reservation) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.newest = lease.Later(s.newest, queue.Since(r, r.Status.QueueTime))
	if known := s.reservations[r.Name]; known != nil && older(r, known) || s.isGone(r.UID) {
		return
	}
	s.reservations[r.Name] = r
}

// NoteReservation takes note of an event of a watch: the versions before and after it, nil for
// none.
func (s *Store) NoteReservation(before, after *broker.Reservation) {
	if after != nil {
		s.PutReservation(after)
	} else {
		s.RemoveReservation(before)
	}
}

// AfterAll is a time just after those by which all known Reservations are ordered in the
// queue.
func (s *Store) AfterAll() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.newest.Add(time.Microsecond)
}

// RemovedLately reports whether a Reservation is gone, although a cache has it.
func (s *Store) RemovedLately(r *broker.Reservation) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.isGone(r.UID)
}

// RemoveReservation forgets a Reservation that is gone, and no newer one of its name.
func (s *Store) RemoveReservation(r *broker.Reservation) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.noteGone(r.UID)
	if known := s.reservations[r.Name]; known != nil && known.UID == r.UID {
		delete(s.reservations, r.Name)
	}
}

// noteGone records that an object was removed. The caller holds the lock.
func (s *Store) noteGone(uid types.UID) {
	now := s.clock.Now()
	for len(s.removals) > 0 && now.Sub(s.removals[0].at) > goneFor {
		delete(s.gone, s.removals[0].uid)
		s.removals = s.removals[1:]
	}
	if _, known := s.gone[uid]; !known {
		s.gone[uid] = now
		s.removals = append(s.removals, removal{uid, now})
	}
}

// isGone reports whether an object was removed lately. The caller holds the lock.
func (s *Store) isGone(uid types.UID) bool {
	at, gone := s.gone[uid]
	return gone && s.clock.Since(at) <= goneFor
}

// Reservations are in no order.
func (s *Store) Reservations() []*broker.Reservation {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.reservations))
}

// Reservation is nil if the store knows none of that name.
func (s *Store) Reservation(name string) *broker.Reservation {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.reservations[name]
}

// Exists reports whether the store knows the Reservation with that name and UID.
func (s *Store) Exists(name string, uid types.UID) bool {
	r := s.Reservation(name)
	return r != nil && r.UID == uid
}
