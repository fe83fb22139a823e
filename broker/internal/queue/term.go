package queue

import (
	"maps"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/spillway-dev/spillway/broker/capacity"
)

// measuresPerTerm is how often within a term it is measured what an entry could have.
const measuresPerTerm = 10

// term is how long capacity is kept free for an entry.
type term struct {
	uid types.UID
	// from is when it begins, or when more than before was last available.
	from time.Time
	// most is the most that was available.
	most     capacity.Vector
	measured time.Time
	ended    bool
}

// KeepsFree reports whether capacity is kept free for an entry: for the length of a term,
// which begins again whenever more of what the entry could have is available than ever
// before in it. Otherwise a request for all there is, of which a part is never free, would
// hold back all others beside idle capacity. Once the term has ended, a later entry of the
// same requester waits for as long before its own begins, so that a new request is no way
// around. A length of 0 is indefinite. It calls measure now and then for what is available
// to the entry. changed is whether the answer is another one than before.
func (q *Queue) KeepsFree(entry Entry, length time.Duration, now time.Time, measure func() capacity.Vector) (keeps, changed bool) {
	if length <= 0 {
		return true, false
	}
	q.mutex.Lock()
	t := q.terms[entry.Name]
	if t == nil || t.uid != entry.UID {
		t = &term{uid: entry.UID, from: now}
		if ended, known := q.ended[entry.Request.Requester]; known && now.Before(ended.Add(length)) {
			t.from = ended.Add(length)
		}
		q.terms[entry.Name] = t
	}
	due := t.ended || t.measured.IsZero() || now.Sub(t.measured) >= length/measuresPerTerm || now.Sub(t.from) >= length
	q.mutex.Unlock()
	var available capacity.Vector
	if due {
		available = measure()
	}
	q.mutex.Lock()
	defer q.mutex.Unlock()
	before := t.ended
	if due {
		t.measured = now
		if t.grows(available) && t.from.Before(now) {
			t.from, t.ended = now, false
		}
	}
	if !t.ended && now.Sub(t.from) >= length {
		t.ended = true
		maps.DeleteFunc(q.ended, func(_ string, at time.Time) bool { return now.Sub(at) >= length })
		q.ended[entry.Request.Requester] = now
	}
	return !t.ended && !now.Before(t.from), t.ended != before
}

// grows notes what is available, and reports whether it is more than ever before.
func (t *term) grows(available capacity.Vector) (more bool) {
	if t.most == nil {
		t.most = maps.Clone(available)
		return false
	}
	for name, amount := range available {
		if amount > t.most[name] {
			t.most[name] = amount
			more = true
		}
	}
	return more
}

// Placed removes the entry of that name, and reports whether there was one. What it has
// taken was never there for those behind it: their terms begin again.
func (q *Queue) Placed(name string, now time.Time) bool {
	q.mutex.Lock()
	defer q.mutex.Unlock()
	entry := q.byName[name]
	if entry == nil {
		return false
	}
	at, _ := slices.BinarySearchFunc(q.sorted, entry, compare)
	for _, behind := range q.sorted[at+1:] {
		if t := q.terms[behind.Name]; t != nil && t.uid == behind.UID && t.from.Before(now) {
			t.most, t.from, t.ended = nil, now, false
			t.measured = time.Time{}
		}
	}
	delete(q.terms, name)
	return q.remove(name)
}
