package decide

import (
	"cmp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
)

// Activity has the clusters that advertise (active), each with whether its last advertisement is
// recent enough for a new placement (fresh). Nil stands for all clusters, all fresh.
type Activity map[string]bool

func (a Activity) of(cluster string) (active, fresh bool) {
	if a == nil {
		return true, true
	}
	fresh, active = a[cluster]
	return active, fresh
}

// Store keeps what is known of all clusters ready for decisions. What depends on one
// cluster only is computed once for each change of that cluster, by the first decision
// that needs it. The zero value is an empty store. It is not safe for concurrent use; its
// Snapshots are.
type Store struct {
	catalog *capacity.Catalog
	// entries by cluster ID. Once shared with a Snapshot, they are copied before they
	// change.
	entries []*entry
	shared  bool
}

// Upsert adds or replaces a cluster. The caller must not change spec and holds
// afterwards.
func (s *Store) Upsert(spec *broker.ClusterAdvertisementSpec, holds []broker.Hold) {
	s.unshare()
	s.boundCatalog()
	s.entries = upsert(s.entries, s.catalog, spec, holds)
}

// Remove removes a cluster, if it is there.
func (s *Store) Remove(cluster string) {
	if at, found := find(s.entries, cluster); found {
		s.unshare()
		s.entries = slices.Delete(s.entries, at, at+1)
	}
}

func (s *Store) unshare() {
	if s.shared {
		s.entries, s.shared = slices.Clone(s.entries), false
	}
}

// boundCatalog begins a new catalog when most node classes of the old one are of
// earlier advertisements.
func (s *Store) boundCatalog() {
	// The API allows 64 classes for each cluster.
	if s.catalog != nil && s.catalog.Len() < 4096+128*len(s.entries) {
		return
	}
	s.catalog = &capacity.Catalog{}
	for i, e := range s.entries {
		s.entries[i] = newEntry(s.catalog, e.spec, e.holds)
	}
}

// Snapshot is what is known now. The activity must not change any more.
func (s *Store) Snapshot(activity Activity) Snapshot {
	s.shared = true
	return Snapshot{catalog: s.catalog, entries: s.entries, activity: activity}
}

// Snapshot is what is known of all clusters at one time. It is immutable.
type Snapshot struct {
	catalog *capacity.Catalog
	// entries by cluster ID.
	entries  []*entry
	activity Activity
}

// entry is what is known of one cluster. What is computed from it does not change any
// more.
type entry struct {
	spec    *broker.ClusterAdvertisementSpec
	holds   []broker.Hold
	catalog *capacity.Catalog
	// rates of the cluster. If it is pricedByClass, those of a request depend on its pods.
	rates         rates
	pricedByClass bool

	// before is what an earlier version of the cluster had free, nil if not known.
	before *free
	// claim is kept free besides the holds. parent is the same without it, nil if not known.
	claim  broker.HeldCapacity
	parent *entry
	// beside is the entry with the claim that was computed last.
	beside atomic.Pointer[keptFree]

	prepared atomic.Bool
	once     sync.Once
	free     *free
	// room is what the nodes have free after all that holds may still claim there.
	room    *capacity.Room
	account capacity.Account
	// allocatable and available are those of the account, as amounts of the room.
	allocatable, available []int64
}

func newEntry(catalog *capacity.Catalog, spec *broker.ClusterAdvertisementSpec, holds []broker.Hold) *entry {
	return &entry{spec: spec, holds: holds, catalog: catalog, rates: ratesOf(spec.Cost), pricedByClass: capacity.PricedByClass(spec)}
}

// free is what node classes have free. Most changes of a cluster are about its holds
// and leave it as it is.
type free struct {
	classes []broker.NodeClass
	room    *capacity.Room
}

// next is the entry for another version of the cluster.
func (e *entry) next(spec *broker.ClusterAdvertisementSpec, holds []broker.Hold) *entry {
	n := newEntry(e.catalog, spec, holds)
	n.claim = e.claim
	if n.before = e.before; e.prepared.Load() {
		n.before = e.free
	}
	return n
}

// claimed is the entry with a claim.
func (e *entry) claimed(claim broker.HeldCapacity) *entry {
	n := newEntry(e.catalog, e.spec, e.holds)
	n.claim, n.parent = claim, e
	return n
}

// prepare computes what decisions need of the cluster, the first time.
func (e *entry) prepare() {
	if e.prepared.Load() {
		return
	}
	e.once.Do(func() {
		if e.parent != nil {
			e.parent.prepare()
			e.account, e.free, e.room = e.parent.account, e.parent.free, e.parent.room
			e.keepFree(e.claim)
			e.allocatable, e.available = e.parent.allocatable, e.room.Amounts(e.account.Available)
			e.prepared.Store(true)
			return
		}
		_, available := ledger.Account(e.spec, &broker.ClusterAdvertisementStatus{Holds: e.holds})
		e.account = capacity.Account{
			Allocatable: capacity.Floor(e.spec.Resources.Allocatable.List()),
			Allocated:   capacity.Ceil(e.spec.Resources.Allocated.List()),
			Available:   capacity.Floor(available.List()),
		}
		e.account.Free = e.account.Available
		e.free = e.before
		classes := capacity.ClassesOf(e.spec)
		if e.free == nil || !capacity.SameClasses(e.free.classes, classes) || !e.free.room.Covers(e.account.Allocatable, e.account.Available) {
			e.free = &free{classes, e.catalog.Room(classes, e.account.Allocatable, e.account.Available)}
		}
		e.room = e.free.room.Less(unused(e.spec, e.holds))
		e.keepFree(e.claim)
		e.allocatable, e.available = e.room.Amounts(e.account.Allocatable), e.room.Amounts(e.account.Available)
		e.prepared.Store(true)
	})
}

// keepFree takes a claim from what is free.
func (e *entry) keepFree(claim broker.HeldCapacity) {
	if claim.Empty() {
		return
	}
	total := capacity.Ceil(claim.Totals.List())
	e.account.Available = e.account.Available.Minus(total, 1)
	if len(claim.PodSets) > 0 {
		total = capacity.Vector{}
	}
	e.room = e.room.Less(claim.PodSets, total)
}

func find(entries []*entry, cluster string) (at int, found bool) {
	return slices.BinarySearchFunc(entries, cluster, func(e *entry, id string) int { return strings.Compare(e.spec.ClusterID, id) })
}

// upsert changes entries in place.
func upsert(entries []*entry, catalog *capacity.Catalog, spec *broker.ClusterAdvertisementSpec, holds []broker.Hold) []*entry {
	at, found := find(entries, spec.ClusterID)
	if found {
		entries[at] = entries[at].next(spec, holds)
		return entries
	}
	return slices.Insert(entries, at, newEntry(catalog, spec, holds))
}

// unused is what holds are charged for and guests do not use yet: what guests
// use is not advertised as free.
func unused(spec *broker.ClusterAdvertisementSpec, all []broker.Hold) (sets []broker.PodSet, total capacity.Vector) {
	holds := slices.SortedStableFunc(slices.Values(all), func(a, b broker.Hold) int {
		return cmp.Or(cmp.Compare(a.Requester, b.Requester), cmp.Compare(a.ReservationName, b.ReservationName))
	})
	total = capacity.Vector{}
	for len(holds) > 0 {
		requester := holds[0].Requester
		var held []broker.PodSet
		divisible := capacity.Vector{}
		for ; len(holds) > 0 && holds[0].Requester == requester; holds = holds[1:] {
			charged := ledger.Charged(holds[0])
			if held = append(held, charged.PodSets...); len(charged.PodSets) == 0 {
				divisible.Add(capacity.Ceil(charged.Totals.List()), 1)
			}
		}
		held = capacity.Decreasing(held)
		running, unattributed := attribute(held, spec.ObservedHolds, requester)
		for i := range held {
			held[i].Count -= int32(running[i])
		}
		sets = append(sets, held...)
		total.Add(divisible.Minus(unattributed, 1), 1)
	}
	return sets, total
}

// attribute reports how many pods of each set (in decreasing order) are among a
// consumer's guests, of which only the number and the sum are known, and how
// much of what they use belongs to no set. If no attribution is exact, the guests
// are attributed to the smaller pods, so that the larger claims stay.
func attribute(sets []broker.PodSet, observed []broker.ObservedHold, requester string) (running []int64, rest capacity.Vector) {
	used, guests := capacity.Vector{}, int64(0)
	for _, hold := range observed {
		if hold.Requester == requester {
			guests += int64(hold.Pods)
			used.Add(capacity.Floor(hold.Used.List()), 1)
		}
	}
	try := func(order []int) (running []int64, rest capacity.Vector, exact bool) {
		running, rest = make([]int64, len(sets)), used
		left := guests
		for _, i := range order {
			request := capacity.Ceil(sets[i].Requests.List())
			n := min(left, int64(sets[i].Count), request.FitsIn(rest))
			running[i], rest, left = n, rest.Minus(request, n), left-n
		}
		return running, rest, left == 0 && rest.IsZero()
	}
	order := make([]int, len(sets))
	for i := range order {
		order[i] = i
	}
	if running, rest, exact := try(order); exact {
		return running, rest
	}
	slices.Reverse(order)
	running, rest, _ = try(order)
	return running, rest
}
