package views

import (
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/utils/clock"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// Index has the Reservations and ClusterAdvertisements of the cache by the keys that
// views and quotas need, so that no call and no event lists them all. The objects are
// shared with the cache and must not be changed.
type Index struct {
	clock          clock.PassiveClock
	mutex          sync.RWMutex
	reservations   map[string]*broker.Reservation
	advertisements map[string]*broker.ClusterAdvertisement
	// byRequester and byProvider have the names of Reservations.
	byRequester, byProvider names
	// admitted has, by requester, the Reservations that are being created and that the
	// watch has not shown yet.
	admitted map[string]map[string]time.Time
}

// names are sets of names by key.
type names map[string]map[string]struct{}

func (n names) add(key, name string) {
	if n[key] == nil {
		n[key] = map[string]struct{}{}
	}
	n[key][name] = struct{}{}
}

func (n names) remove(key, name string) {
	if delete(n[key], name); len(n[key]) == 0 {
		delete(n, key)
	}
}

// NewIndex returns an empty Index.
func NewIndex(clock clock.PassiveClock) *Index {
	return &Index{
		clock:          clock,
		reservations:   map[string]*broker.Reservation{},
		advertisements: map[string]*broker.ClusterAdvertisement{},
		byRequester:    names{},
		byProvider:     names{},
		admitted:       map[string]map[string]time.Time{},
	}
}

// Viewer is a cluster in a role.
type Viewer struct {
	Cluster string
	Role    protocol.Role
}

// Changes are the IDs of the views that may have changed, by who sees them.
type Changes map[Viewer][]string

func (c Changes) add(cluster string, role protocol.Role, ids ...string) {
	if cluster != "" && len(ids) > 0 {
		key := Viewer{cluster, role}
		c[key] = append(c[key], ids...)
	}
}

// PutReservation stores the current object of a name, nil if it was deleted, and returns
// the one before and what changed.
func (x *Index) PutReservation(name string, now *broker.Reservation) (before *broker.Reservation, changed Changes) {
	x.mutex.Lock()
	defer x.mutex.Unlock()
	changed = Changes{}
	before = x.reservations[name]
	if before != nil {
		x.byRequester.remove(before.Spec.RequesterID, name)
		for _, provider := range providersOf(before) {
			x.byProvider.remove(provider, name)
		}
		changed.add(before.Spec.RequesterID, protocol.RoleRequester, name)
	}
	if now == nil {
		delete(x.reservations, name)
		return before, changed
	}
	x.reservations[name] = now
	x.byRequester.add(now.Spec.RequesterID, name)
	for _, provider := range providersOf(now) {
		x.byProvider.add(provider, name)
	}
	if before == nil || before.Spec.RequesterID != now.Spec.RequesterID {
		changed.add(now.Spec.RequesterID, protocol.RoleRequester, name)
	}
	x.unadmitLocked(now.Spec.RequesterID, name)
	return before, changed
}

// providersOf are the clusters that hold or may hold capacity for a Reservation.
func providersOf(reservation *broker.Reservation) []string {
	clusters := slices.Concat(reservation.Status.Attempt.Clusters, reservation.FirstAsked())
	for _, allocation := range reservation.Status.Allocations {
		if !slices.Contains(clusters, allocation.Cluster) {
			clusters = append(clusters, allocation.Cluster)
		}
	}
	return clusters
}

// PutAdvertisement stores the current advertisement of a cluster, nil if it was deleted,
// and returns what changed. A cluster's endpoint and key are in the views of the
// Reservations that it provides for, its key in the views of the providers that hold
// capacity for it, and its holds in its own.
func (x *Index) PutAdvertisement(cluster string, now *broker.ClusterAdvertisement) Changes {
	x.mutex.Lock()
	defer x.mutex.Unlock()
	changed := Changes{}
	before := orEmpty(x.advertisements[cluster])
	if now == nil {
		delete(x.advertisements, cluster)
	} else {
		x.advertisements[cluster] = now
	}
	after := orEmpty(now)
	if before.Spec.EndpointURL != after.Spec.EndpointURL || before.Spec.PeerKey != after.Spec.PeerKey {
		for name := range x.byProvider[cluster] {
			changed.add(x.reservations[name].Spec.RequesterID, protocol.RoleRequester, name)
		}
	}
	if before.Spec.PeerKey != after.Spec.PeerKey {
		for name := range x.byRequester[cluster] {
			for _, provider := range providersOf(x.reservations[name]) {
				changed.add(provider, protocol.RoleProvider, name)
			}
		}
	}
	changed.add(cluster, protocol.RoleProvider, changedHolds(before.Status.Holds, after.Status.Holds)...)
	return changed
}

func orEmpty(advertisement *broker.ClusterAdvertisement) *broker.ClusterAdvertisement {
	if advertisement == nil {
		return &broker.ClusterAdvertisement{}
	}
	return advertisement
}

// changedHolds are the Reservations of the holds that differ.
func changedHolds(before, after []broker.Hold) []string {
	var changed []string
	old := make(map[string]*broker.Hold, len(before))
	for i := range before {
		if i < len(after) && ledger.SameVersion(&before[i], &after[i]) {
			continue
		}
		old[before[i].ReservationName+"/"+string(before[i].ReservationUID)] = &before[i]
	}
	for i := range after {
		if i < len(before) && ledger.SameVersion(&before[i], &after[i]) {
			continue
		}
		key := after[i].ReservationName + "/" + string(after[i].ReservationUID)
		if then, was := old[key]; !was || !ledger.SameVersion(then, &after[i]) {
			changed = append(changed, after[i].ReservationName)
		}
		delete(old, key)
	}
	for _, gone := range old {
		changed = append(changed, gone.ReservationName)
	}
	return changed
}

// advertisement is a cluster's advertisement, an empty one if there is none.
func (x *Index) advertisement(cluster string) *broker.ClusterAdvertisement {
	x.mutex.RLock()
	defer x.mutex.RUnlock()
	return orEmpty(x.advertisements[cluster])
}

// Reservation is the Reservation of a name and requester, nil if there is none.
func (x *Index) Reservation(requester, name string) *broker.Reservation {
	x.mutex.RLock()
	defer x.mutex.RUnlock()
	if found := x.reservations[name]; found != nil && found.Spec.RequesterID == requester {
		return found
	}
	return nil
}

// reservationsOf are the Reservations of a requester, sorted by name.
func (x *Index) reservationsOf(requester string) []*broker.Reservation {
	x.mutex.RLock()
	defer x.mutex.RUnlock()
	var all []*broker.Reservation
	for _, name := range slices.Sorted(maps.Keys(x.byRequester[requester])) {
		all = append(all, x.reservations[name])
	}
	return all
}
