// Package queue orders the Reservations that wait for capacity, by priority and then by
// age. Later ones must leave free what the first one waits for, at every provider that
// could take it one day: those that could be placed nowhere hold back no other. It is
// pure.
package queue

import (
	"cmp"
	"math/big"
	"slices"
	"strings"
	"sync"
	"time"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/conversion"
	"k8s.io/apimachinery/pkg/types"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
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
	// KeepFree is whether capacity is kept free for it when it is the first.
	KeepFree bool
	// requests of its pods.
	requests []capacity.Vector
}

func (e *Entry) same(as *Entry) bool {
	return e.UID == as.UID && e.Priority == as.Priority && e.Since.Equal(as.Since) && e.KeepFree == as.KeepFree &&
		equal.DeepEqual(e.Request, as.Request)
}

var equal = func() conversion.Equalities {
	equalities := apiequality.Semantic.Copy()
	if err := equalities.AddFunc(func(a, b *big.Rat) bool { return a == b || a != nil && b != nil && a.Cmp(b) == 0 }); err != nil {
		panic(err)
	}
	return equalities
}()

// compare orders entries: the higher priority first, then the older.
func compare(a, b *Entry) int {
	return cmp.Or(cmp.Compare(b.Priority, a.Priority), a.Since.Compare(b.Since), strings.Compare(string(a.UID), string(b.UID)))
}

// Since is the time by which a Reservation is ordered in the queue: that of its creation, if
// none is given.
func Since(reservation *broker.Reservation, queueTime *metav1.MicroTime) time.Time {
	if queueTime != nil {
		return queueTime.Time
	}
	return reservation.CreationTimestamp.Time
}

// Queue holds the entries in order. It is safe for concurrent use.
type Queue struct {
	mutex  sync.RWMutex
	sorted []*Entry
	byName map[string]*Entry
	// last is the entry behind which Next goes on.
	last *Entry
}

// New returns an empty Queue.
func New() *Queue {
	return &Queue{byName: map[string]*Entry{}}
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
	at, _ := slices.BinarySearchFunc(q.sorted, &entry, compare)
	q.sorted = slices.Insert(q.sorted, at, &entry)
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
	at, _ := slices.BinarySearchFunc(q.sorted, entry, compare)
	q.sorted = slices.Delete(q.sorted, at, at+1)
	return true
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

// First is the first entry before another one for which capacity is kept free; nil if there
// is none. That of the same name does not count.
func (q *Queue) First(before Entry) *Entry {
	q.mutex.RLock()
	defer q.mutex.RUnlock()
	for _, entry := range q.sorted {
		switch {
		case compare(entry, &before) >= 0:
			return nil
		case entry.KeepFree && entry.Name != before.Name:
			return entry
		}
	}
	return nil
}

// Entries are all, in order.
func (q *Queue) Entries() []*Entry {
	q.mutex.RLock()
	defer q.mutex.RUnlock()
	return slices.Clone(q.sorted)
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
