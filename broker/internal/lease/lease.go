// Package lease measures how long Reservations have been in a state: held, waiting for
// capacity, waiting for a provider's answer. Its Book records when this process first
// saw each of them, by one clock. So no decision compares the clocks of two machines,
// and a broker that becomes the leader starts all durations again. It is pure: the
// caller passes the time.
package lease

import (
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// Seen is the state of a Reservation as the caller has read it, maybe from a cache.
type Seen struct {
	// Held is whether the ledger holds capacity for it.
	Held bool
	// Waiting is the generation of its spec if it is queued, otherwise 0.
	Waiting int64
	// Asked has the attempt of each provider that has not answered yet.
	Asked map[string]int64
	// Deleted is whether it is being deleted.
	Deleted bool
	// Unannounced is whether its status does not say yet how long its lease is. Its consumer
	// cannot know then how often to renew it.
	Unannounced bool
}

// Times are when this process first saw the current state of a Reservation. A zero time
// stands for a state that it is not in.
type Times struct {
	// FirstSeen is when the Reservation itself was first seen.
	FirstSeen time.Time
	// Held is when a hold of it was first seen since it last had none.
	Held time.Time
	// Waiting is when it was first seen queued with its generation.
	Waiting time.Time
	// Asked is when the pending attempt of each provider was first seen.
	Asked map[string]time.Time
	// Deleted is when it was first seen being deleted.
	Deleted time.Time
	// Renewed is when its lease was last renewed.
	Renewed time.Time
	// Written is when its status was last written.
	Written time.Time
}

// Start is when the lease started: with the first hold, or with its last renewal.
// Zero without a hold.
func (t Times) Start() time.Time {
	if t.Held.IsZero() {
		return t.Held
	}
	return Later(t.Held, t.Renewed)
}

// Later is the later of two times.
func Later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// Book records Times by the name of the Reservation. It is safe for concurrent use.
type Book struct {
	mutex   sync.Mutex
	records map[string]*record
}

type record struct {
	Times
	uid      types.UID
	waiting  int64
	attempts map[string]int64
}

// NewBook returns an empty Book.
func NewBook() *Book { return &Book{records: map[string]*record{}} }

// Observe records what was seen now. An attempt that is older than one seen before is
// outdated and changes nothing. Another UID is another Reservation.
func (b *Book) Observe(name string, uid types.UID, seen Seen, now time.Time) {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	b.records[name] = b.next(name, uid, seen, now)
}

// Times is since when the state that was seen now has been seen. It records nothing.
func (b *Book) Times(name string, uid types.UID, seen Seen, now time.Time) Times {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	return b.next(name, uid, seen, now).Times
}

// next is the record of a Reservation after what was seen now.
func (b *Book) next(name string, uid types.UID, seen Seen, now time.Time) *record {
	r := &record{uid: uid, Times: Times{FirstSeen: now}}
	if known := b.records[name]; known != nil && known.uid == uid {
		*r = *known
	}
	if seen.Unannounced {
		r.Renewed = now
	}
	switch {
	case !seen.Held:
		r.Held = time.Time{}
	case r.Held.IsZero():
		r.Held = now
	}
	if seen.Deleted && r.Deleted.IsZero() {
		r.Deleted = now
	}
	switch {
	case seen.Waiting == 0:
		r.Waiting = time.Time{}
	case r.Waiting.IsZero() || r.waiting < seen.Waiting:
		r.Waiting = now
	}
	r.waiting = seen.Waiting
	asked, attempts := make(map[string]time.Time, len(seen.Asked)), make(map[string]int64, len(seen.Asked))
	for cluster, attempt := range seen.Asked {
		asked[cluster], attempts[cluster] = now, attempt
		if before, known := r.attempts[cluster]; known && attempt <= before {
			asked[cluster], attempts[cluster] = r.Asked[cluster], before
		}
	}
	r.Asked, r.attempts = asked, attempts
	return r
}

// AskedAt is when the attempt of a provider that has not answered yet was first seen; zero
// if there is none.
func (b *Book) AskedAt(name string, uid types.UID, cluster string) time.Time {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	if r := b.records[name]; r != nil && r.uid == uid {
		return r.Asked[cluster]
	}
	return time.Time{}
}

// Renew starts the lease again. It reports false if the Reservation has not been
// observed: then its lease starts when it is.
func (b *Book) Renew(name string, uid types.UID, now time.Time) bool {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	r := b.records[name]
	if r == nil || r.uid != uid {
		return false
	}
	r.Renewed = now
	return true
}

// Written records that the Reservation's status was written.
func (b *Book) Written(name string, uid types.UID, now time.Time) {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	if r := b.records[name]; r != nil && r.uid == uid {
		r.Written = now
	}
}

// Forget drops the record of a Reservation that does not exist any more.
func (b *Book) Forget(name string) {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	delete(b.records, name)
}
