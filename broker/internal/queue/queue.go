// Package queue orders the Reservations that wait for capacity, by priority and then
// by age, and decides who may pass whom: a later one must leave free what an earlier one
// waits for, at every provider that could take it. It is pure.
package queue

import (
	"cmp"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/decide"
)

// maxClaims is the maximum number of earlier Reservations for which a provider's
// capacity is kept free.
const maxClaims = 64

// Entry is a Reservation and the capacity that it lacks.
type Entry struct {
	Name     string
	UID      types.UID
	Priority int32
	// Created is its creation time, by the clock of the API server.
	Created time.Time
	// Request is what it waits for.
	Request decide.Request
}

// compare orders entries: the higher priority first, then the older.
func compare(a, b *Entry) int {
	return cmp.Or(cmp.Compare(b.Priority, a.Priority), a.Created.Compare(b.Created), strings.Compare(string(a.UID), string(b.UID)))
}

// Queue holds the entries in order. It is safe for concurrent use.
type Queue struct {
	mutex  sync.RWMutex
	sorted []*Entry
	byName map[string]*Entry
}

// New returns an empty Queue.
func New() *Queue { return &Queue{byName: map[string]*Entry{}} }

// Set adds an entry or replaces the one of the same name. The queue keeps the entry,
// which must not be changed any more.
func (q *Queue) Set(entry Entry) {
	q.mutex.Lock()
	defer q.mutex.Unlock()
	q.remove(entry.Name)
	at, _ := slices.BinarySearchFunc(q.sorted, &entry, compare)
	q.sorted = slices.Insert(q.sorted, at, &entry)
	q.byName[entry.Name] = &entry
}

// Remove removes the entry of that name, and reports whether there was one.
func (q *Queue) Remove(name string) bool {
	q.mutex.Lock()
	defer q.mutex.Unlock()
	return q.remove(name)
}

func (q *Queue) remove(name string) bool {
	entry := q.byName[name]
	if entry == nil {
		return false
	}
	delete(q.byName, name)
	at, found := slices.BinarySearchFunc(q.sorted, entry, compare)
	if found {
		q.sorted = slices.Delete(q.sorted, at, at+1)
	}
	return true
}

// Position is the place of an entry among the others: 1 is the first. The entry itself
// need not be in the queue.
func (q *Queue) Position(entry Entry) int {
	q.mutex.RLock()
	defer q.mutex.RUnlock()
	at, _ := slices.BinarySearchFunc(q.sorted, &entry, compare)
	return at + 1
}

// Len is the number of entries.
func (q *Queue) Len() int {
	q.mutex.RLock()
	defer q.mutex.RUnlock()
	return len(q.sorted)
}

// Ahead lists the entries before another one in order, up to the number of which
// Claims considers.
func (q *Queue) Ahead(of Entry) []*Entry {
	q.mutex.RLock()
	defer q.mutex.RUnlock()
	at, _ := slices.BinarySearchFunc(q.sorted, &of, compare)
	return slices.Clone(q.sorted[:at])
}

// First lists up to n entries for which the function returns true, in order.
func (q *Queue) First(n int, match func(*Entry) bool) []*Entry {
	q.mutex.RLock()
	sorted := slices.Clone(q.sorted)
	q.mutex.RUnlock()
	var out []*Entry
	for _, entry := range sorted {
		if len(out) == n {
			break
		}
		if match(entry) {
			out = append(out, entry)
		}
	}
	return out
}

// Claims is the capacity of a cluster that must stay free for entries that are ahead of
// another one, as holds. What a cluster could take if it were empty is kept free there;
// it does not matter that it has less now. The claims end when no part of want, which is
// behind them all, fits into what is available any more. eligible reports whether the
// cluster may be chosen for an entry at all.
func Claims(ahead []*Entry, spec *broker.ClusterAdvertisementSpec, available capacity.Vector, want broker.HeldCapacity, eligible func(*Entry, *broker.ClusterAdvertisementSpec) bool) []broker.Hold {
	var claims []broker.Hold
	for _, entry := range ahead {
		if len(claims) == maxClaims || !Profits(want, available) {
			break
		}
		if !eligible(entry, spec) {
			continue
		}
		if claim := CouldTake(entry.Request.Want, spec); !claim.Empty() {
			claims = append(claims, broker.Hold{
				ReservationUID:  "queued:" + entry.UID,
				ReservationName: entry.Name,
				Requester:       entry.Request.Requester,
				Promised:        claim,
			})
			available = available.Minus(capacity.Ceil(claim.Totals.List()), 1)
		}
	}
	return claims
}

// CouldTake is the part of a capacity that a cluster could take if nothing ran there.
func CouldTake(want broker.HeldCapacity, spec *broker.ClusterAdvertisementSpec) broker.HeldCapacity {
	allocatable := capacity.Floor(spec.Resources.Allocatable.List())
	matches := func(set broker.PodSet) bool {
		return slices.ContainsFunc(spec.NodeClasses, func(class broker.NodeClass) bool { return capacity.Matches(&class, set) })
	}
	if len(want.PodSets) == 0 {
		if capacity.Ceil(want.Totals.List()).FitsIn(allocatable) == 0 || !matches(broker.PodSet{}) {
			return broker.HeldCapacity{}
		}
		return want
	}
	var sets []broker.PodSet
	for _, set := range want.PodSets {
		fits := min(capacity.Ceil(set.Requests.List()).FitsIn(allocatable), math.MaxInt32)
		if set.Count = min(set.Count, int32(fits)); set.Count > 0 && matches(set) {
			sets = append(sets, set)
		}
	}
	return capacity.OfPodSets(sets)
}

// Profits reports whether an entry could get at least a part of what it waits for from
// that much available capacity.
func Profits(want broker.HeldCapacity, available capacity.Vector) bool {
	if len(want.PodSets) == 0 {
		return capacity.Ceil(want.Totals.List()).FitsIn(available) > 0
	}
	return slices.ContainsFunc(want.PodSets, func(set broker.PodSet) bool {
		return set.Count > 0 && capacity.Ceil(set.Requests.List()).FitsIn(available) > 0
	})
}
