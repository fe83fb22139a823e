package decide

import (
	"slices"
	"strings"
	"sync"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Activity reports whether a cluster advertises (active), and whether its last
// advertisement is recent enough for a new placement (fresh).
type Activity func(cluster string) (active, fresh bool)

// Store keeps what is known of all clusters ready for decisions. What depends on one
// cluster only is computed once for each change of that cluster. The zero value is
// an empty store. It is safe for concurrent use.
type Store struct {
	mu sync.Mutex
	// entries by cluster ID. Once shared with a Snapshot, they are copied before they
	// change.
	entries []*entry
	shared  bool
}

// Upsert adds or replaces a cluster. The caller must not change spec and holds
// afterwards.
func (s *Store) Upsert(spec *broker.ClusterAdvertisementSpec, holds []broker.Hold) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.unshare()
	s.entries = upsert(s.entries, newEntry(spec, holds))
}

// Remove removes a cluster, if it is there.
func (s *Store) Remove(cluster string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if at, found := search(s.entries, cluster); found {
		s.unshare()
		s.entries = slices.Delete(s.entries, at, at+1)
	}
}

func (s *Store) unshare() {
	if s.shared {
		s.entries, s.shared = slices.Clone(s.entries), false
	}
}

// Snapshot is what is known now. It does not change any more.
func (s *Store) Snapshot(activity Activity) Snapshot {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.shared = true
	return Snapshot{entries: s.entries, activity: activity}
}

// Snapshot is what is known of all clusters at one time. It is immutable; the answer
// to activity may change.
type Snapshot struct {
	// entries by cluster ID.
	entries  []*entry
	activity Activity
}

// Cluster returns what is known of a cluster; nil if it is unknown.
func (s Snapshot) Cluster(id string) (*broker.ClusterAdvertisementSpec, []broker.Hold) {
	at, found := search(s.entries, id)
	if !found {
		return nil, nil
	}
	return s.entries[at].spec, s.entries[at].holds
}

// With is a snapshot in which one cluster is added or replaced.
func (s Snapshot) With(spec *broker.ClusterAdvertisementSpec, holds []broker.Hold) Snapshot {
	s.entries = upsert(slices.Clone(s.entries), newEntry(spec, holds))
	return s
}

// entry is what is known of one cluster. It is immutable.
type entry struct {
	spec  *broker.ClusterAdvertisementSpec
	holds []broker.Hold
}

func newEntry(spec *broker.ClusterAdvertisementSpec, holds []broker.Hold) *entry {
	return &entry{spec: spec, holds: holds}
}

func search(entries []*entry, cluster string) (at int, found bool) {
	return slices.BinarySearchFunc(entries, cluster, func(e *entry, id string) int { return strings.Compare(e.spec.ClusterID, id) })
}

// upsert changes entries in place.
func upsert(entries []*entry, e *entry) []*entry {
	at, found := search(entries, e.spec.ClusterID)
	if found {
		entries[at] = e
		return entries
	}
	return slices.Insert(entries, at, e)
}

// cluster is what is known of one cluster now.
type cluster struct {
	Spec          *broker.ClusterAdvertisementSpec
	Holds         []broker.Hold
	Active, Fresh bool
}
