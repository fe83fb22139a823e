// Package queue orders the Reservations that wait for capacity, by priority and then by
// age. A later one must leave free what an earlier one waits for, at every provider that
// could take it one day: those that could be placed nowhere hold back no other. It is
// pure.
package queue

import (
	"cmp"
	"slices"
	"strings"
	"sync"
	"time"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/types"

	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/decide"
)

// Entry is a Reservation and the capacity that it lacks.
type Entry struct {
	Name     string
	UID      types.UID
	Priority int32
	// Since is when it was created, or when it last queued again because its request has grown,
	// by the clock of the API server.
	Since time.Time
	// Request is what it waits for.
	Request decide.Request
	// Placeable is whether the clusters could take it if they held nothing for others, and
	// its term has not ended (KeepsFree). Capacity is kept free only for what could be placed
	// one day.
	Placeable bool
	// requests of its pods.
	requests []capacity.Vector
}

func (e *Entry) same(as *Entry) bool {
	return e.UID == as.UID && e.Priority == as.Priority && e.Since.Equal(as.Since) && e.Placeable == as.Placeable &&
		apiequality.Semantic.DeepEqual(e.Request, as.Request)
}

// compare orders entries: the higher priority first, then the older.
func compare(a, b *Entry) int {
	return cmp.Or(cmp.Compare(b.Priority, a.Priority), a.Since.Compare(b.Since), strings.Compare(string(a.UID), string(b.UID)))
}

// Queue holds the entries in order. It is safe for concurrent use.
type Queue struct {
	mutex sync.RWMutex
	// sorted are all entries, placeable those that could be placed.
	sorted, placeable []*Entry
	byName            map[string]*Entry
	// last is the entry behind which Next goes on.
	last *Entry
	// terms of the entries by name; ended is when one of each requester last ended.
	terms map[string]*term
	ended map[string]time.Time
}

// New returns an empty Queue.
func New() *Queue {
	return &Queue{byName: map[string]*Entry{}, terms: map[string]*term{}, ended: map[string]time.Time{}}
}

// Set adds an entry or replaces the one of the same name, which stays if it is the same.
// The queue keeps the entry, which must not be changed any more.
func (q *Queue) Set(entry Entry) {
	q.mutex.Lock()
	defer q.mutex.Unlock()
	if known := q.byName[entry.Name]; known != nil && known.same(&entry) {
		return
	}
	q.remove(entry.Name)
	entry.requests = capacity.Requests(entry.Request.Want)
	q.byName[entry.Name] = &entry
	q.sorted = insert(q.sorted, &entry)
	if entry.Placeable {
		q.placeable = insert(q.placeable, &entry)
	}
}

func insert(sorted []*Entry, entry *Entry) []*Entry {
	at, _ := slices.BinarySearchFunc(sorted, entry, compare)
	return slices.Insert(sorted, at, entry)
}

// Remove removes the entry of that name, and reports whether there was one.
func (q *Queue) Remove(name string) bool {
	q.mutex.Lock()
	defer q.mutex.Unlock()
	delete(q.terms, name)
	return q.remove(name)
}

func (q *Queue) remove(name string) bool {
	entry := q.byName[name]
	if entry == nil {
		return false
	}
	delete(q.byName, name)
	q.sorted, q.placeable = without(q.sorted, entry), without(q.placeable, entry)
	return true
}

func without(sorted []*Entry, entry *Entry) []*Entry {
	if at, found := slices.BinarySearchFunc(sorted, entry, compare); found {
		return slices.Delete(sorted, at, at+1)
	}
	return sorted
}

// Position is the place of an entry among the others: 1 is the first. That of the same name
// does not count.
func (q *Queue) Position(entry Entry) int {
	q.mutex.RLock()
	defer q.mutex.RUnlock()
	at, _ := slices.BinarySearchFunc(q.sorted, &entry, compare)
	if known := q.byName[entry.Name]; known != nil && compare(known, &entry) < 0 {
		at--
	}
	return at + 1
}

// Len is the number of entries.
func (q *Queue) Len() int {
	q.mutex.RLock()
	defer q.mutex.RUnlock()
	return len(q.sorted)
}

// Ahead lists the entries before another one that could be placed, in order: those for
// which capacity is kept free. That of the same name does not count.
func (q *Queue) Ahead(of Entry) []*Entry {
	q.mutex.RLock()
	defer q.mutex.RUnlock()
	at, _ := slices.BinarySearchFunc(q.placeable, &of, compare)
	return slices.DeleteFunc(slices.Clone(q.placeable[:at]), func(e *Entry) bool { return e.Name == of.Name })
}

// Next lists up to n entries for which the function returns true: one half from the first
// on, in order. The other half goes on behind the last one that an earlier call has
// listed, so that each gets its turn even if those before it get nothing.
func (q *Queue) Next(n int, match func(*Entry) bool) []*Entry {
	q.mutex.RLock()
	sorted, last := slices.Clone(q.sorted), q.last
	q.mutex.RUnlock()
	var out []*Entry
	list := func(from, to, most int) (next int) {
		for ; from < to && len(out) < most; from++ {
			if match(sorted[from]) {
				out = append(out, sorted[from])
			}
		}
		return from
	}
	front := list(0, len(sorted), (n+1)/2)
	turn := front
	if last != nil {
		at, found := slices.BinarySearchFunc(sorted, last, compare)
		if found {
			at++
		}
		turn = max(at, front)
	}
	inOrder := len(out)
	list(turn, len(sorted), n)
	list(front, turn, n)
	if len(out) > inOrder {
		q.mutex.Lock()
		q.last = out[len(out)-1]
		q.mutex.Unlock()
	}
	return out
}

// Profits reports whether the entry could get at least a part of what it waits for from
// that much available capacity. The entry is one of a queue.
func (e *Entry) Profits(available capacity.Vector) bool {
	return slices.ContainsFunc(e.requests, func(request capacity.Vector) bool { return request.FitsIn(available) > 0 })
}
