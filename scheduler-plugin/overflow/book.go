package overflow

import (
	"maps"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/api/meta"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// book is what the Reservations let pods use, by key: what the scheduling cycle
// reads instead of Reservations. Safe for concurrent use.
type book struct {
	mu      sync.RWMutex
	entries map[demand.Key]map[string]entry
	// namespaces counts the keys of each namespace, to answer for most pods
	// without computing their key.
	namespaces map[string]int
}

// entry is what one Reservation says to the pods of its key.
type entry struct {
	// id at the broker: the value for the pods' hold label.
	id string
	// places that can be used now, by provider.
	places map[string]int32
	// queued: nobody has room for (the rest of) it.
	queued bool
	// failed: it can never be met as it is written.
	failed bool
}

func (e entry) equal(other entry) bool {
	return e.id == other.id && e.queued == other.queued && e.failed == other.failed && maps.Equal(e.places, other.places)
}

// grants is what the pods of one key may use.
type grants struct {
	key demand.Key
	// places by provider.
	places map[string]int32
	// holds names the reservation to charge, by provider.
	holds map[string]string
}

// equal tells whether two say the same; either may be nil.
func (g *grants) equal(other *grants) bool {
	if g == nil || other == nil {
		return g == other
	}
	return g.key == other.key && maps.Equal(g.places, other.places) && maps.Equal(g.holds, other.holds)
}

func newBook() *book {
	return &book{entries: map[demand.Key]map[string]entry{}, namespaces: map[string]int{}}
}

// entryOf reads a Reservation. One that is being deleted takes no new pods.
func entryOf(r *broker.Reservation) entry {
	e := entry{
		id:     r.Status.ID,
		places: map[string]int32{},
		queued: meta.IsStatusConditionTrue(r.Status.Conditions, broker.ConditionQueued),
		failed: r.Status.Phase == broker.ReservationFailed,
	}
	if r.DeletionTimestamp != nil || r.Status.ID == "" {
		return e
	}
	// A count that was lowered binds at once, also before the broker has
	// followed.
	asked := podsAsked(r)
	for _, a := range r.Status.Allocations {
		if places := min(a.Usable(), asked); places > 0 {
			e.places[a.Cluster] = places
		}
	}
	return e
}

// podsAsked is how many pods a Reservation asks room for.
func podsAsked(r *broker.Reservation) int32 {
	var n int32
	for _, set := range r.Spec.PodSets {
		n += set.Count
	}
	return n
}

// put records a Reservation and tells whether it says anything new to its pods.
func (b *book) put(r *broker.Reservation) (key demand.Key, changed bool) {
	key, ok := demand.KeyOfReservation(r)
	if !ok {
		return key, false
	}
	e := entryOf(r)
	b.mu.Lock()
	defer b.mu.Unlock()
	byName := b.entries[key]
	if byName == nil {
		byName = map[string]entry{}
		b.entries[key] = byName
		b.namespaces[key.Namespace]++
	}
	before, known := byName[r.Name]
	byName[r.Name] = e
	return key, !known || !before.equal(e)
}

// drop removes a Reservation.
func (b *book) drop(r *broker.Reservation) (key demand.Key, changed bool) {
	key, ok := demand.KeyOfReservation(r)
	if !ok {
		return key, false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	byName := b.entries[key]
	if _, known := byName[r.Name]; !known {
		return key, false
	}
	delete(byName, r.Name)
	if len(byName) == 0 {
		delete(b.entries, key)
		if b.namespaces[key.Namespace]--; b.namespaces[key.Namespace] == 0 {
			delete(b.namespaces, key.Namespace)
		}
	}
	return key, true
}

// any tells whether a namespace has any Reservation for pods.
func (b *book) any(namespace string) bool {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return b.namespaces[namespace] > 0
}

// grants sums up what a key may use; nil if nothing.
func (b *book) grants(key demand.Key) *grants {
	b.mu.RLock()
	defer b.mu.RUnlock()
	var g *grants
	byName := b.entries[key]
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		for cluster, n := range byName[name].places {
			if g == nil {
				g = &grants{key: key, places: map[string]int32{}, holds: map[string]string{}}
			}
			g.places[cluster] += n
			if g.holds[cluster] == "" {
				g.holds[cluster] = byName[name].id
			}
		}
	}
	return g
}

// refused tells whether a key has been asked for in vain: all of its
// Reservations are queued or failed.
func (b *book) refused(key demand.Key) bool {
	b.mu.RLock()
	defer b.mu.RUnlock()
	for _, e := range b.entries[key] {
		if !e.queued && !e.failed {
			return false
		}
	}
	return len(b.entries[key]) > 0
}
