package usage

import (
	"maps"
	"reflect"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/utils/clock"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/charge"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// GrantCache has the capacity that Reservations grant, by key: the scheduling
// cycle reads it instead of Reservations. Safe for concurrent use.
type GrantCache struct {
	clock clock.PassiveClock

	mu sync.RWMutex
	// states by key and Reservation name.
	states map[demand.Key]map[string]reservationState
	// namespaces counts the keys of each namespace, to answer for most pods
	// without computing their key.
	namespaces map[string]int
	// unasked has the keys of Reservations for which no capacity, or not all, is requested, and for
	// how many pods it is: a policy allows no more, or the API server rejects or refuses
	// the Reservation.
	unasked map[demand.Key]int32
}

// reservationState is the part of a Reservation that concerns its pods.
type reservationState struct {
	// id at the broker: the value of the pods' hold label.
	id string
	// Slots are the pods that can run now, by provider, and most at all of them together: a
	// lowered count is effective at once, also before the broker has observed it.
	Slots map[string]int32
	Most  int32
	// expected is how many pods have capacity or, unless it is queued or failed, may get it.
	expected int32
	// queued: capacity for (the rest of) it is insufficient.
	queued bool
	// failed: it can never be granted as specified.
	failed bool
	// changedAt is when one of the above last changed.
	changedAt time.Time
}

// Grants is the capacity granted to the pods of one key. It is not changed once
// made.
type Grants struct {
	Key demand.Key
	// Slots by provider.
	Slots map[string]int32
	// Charges has the Reservations to charge, by provider, in the order of their names.
	Charges map[string][]Charge
	// most has the pods that may use each hold at all providers together, by label.
	most map[string]int32
	// ChangedAt is when the grants last changed.
	ChangedAt time.Time
}

// Charge is the part of a grant that one Reservation has.
type Charge struct {
	// Label is the value of the hold label of the pods that use it.
	Label string
	slots int32
}

// SlotsAt returns the slots at a provider; 0 for nil grants.
func (g *Grants) SlotsAt(provider string) int32 {
	if g == nil {
		return 0
	}
	return g.Slots[provider]
}

// NewGrantCache returns a cache without grants.
func NewGrantCache(clock clock.PassiveClock) *GrantCache {
	return &GrantCache{clock: clock, states: map[demand.Key]map[string]reservationState{}, namespaces: map[string]int{}, unasked: map[demand.Key]int32{}}
}

// StateOf reads a Reservation, for the pods of the set with a name or, if that is empty, for
// all. One that is being deleted has no slots.
func StateOf(r *broker.Reservation, set string) reservationState {
	s := reservationState{
		id:     r.Status.ID,
		Slots:  map[string]int32{},
		queued: meta.IsStatusConditionTrue(r.Status.Conditions, broker.ConditionQueued),
		failed: r.Status.Phase == broker.ReservationFailed,
	}
	if r.DeletionTimestamp != nil {
		return s
	}
	requested := PodsOf(r.Spec.PodSets, set)
	if !s.queued && !s.failed {
		s.expected = requested
	}
	if r.Status.ID == "" {
		return s
	}
	for i := range r.Status.Allocations {
		a := &r.Status.Allocations[i]
		if a.Accepted && (s.queued || s.failed) {
			s.expected = min(s.expected+PodsOf(a.PodSets, set), requested)
		}
		if slots := min(usableBy(a, set), requested); slots > 0 {
			s.Slots[a.Cluster] = slots
			s.Most = min(s.Most+slots, requested)
		}
	}
	return s
}

// usableBy returns how many pods of a set may use an allocation, or of all if set is empty.
// None while a virtual node provides part of it: that may be for other sets.
func usableBy(a *broker.Allocation, set string) int32 {
	usable, of := a.Usable(), PodsOf(a.PodSets, set)
	if of < PodsOf(a.PodSets, "") && usable < PodsOf(a.PodSets, "") {
		return 0
	}
	return min(usable, of)
}

// PodsOf is the number of pods of the set with a name, or of all if that is empty.
func PodsOf(sets []broker.PodSet, name string) (n int32) {
	for _, set := range sets {
		if name == "" || set.Name == name {
			n += set.Count
		}
	}
	return n
}

// RequestedPods returns how many pods a Reservation requests capacity for.
func RequestedPods(r *broker.Reservation) int32 { return PodsOf(r.Spec.PodSets, "") }

// Set records a Reservation. changed is true if the change concerns its pods; key, that of
// the Reservation, is zero if it serves no pods.
func (c *GrantCache) Set(r *broker.Reservation) (key demand.Key, changed bool) {
	key, ok := demand.KeyOfReservation(r)
	if !ok {
		return demand.Key{}, false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, of := range demand.PodKeys(r) {
		set := ""
		if of != key {
			set = of.Shape
		}
		state := StateOf(r, set)
		byName := c.states[of]
		if byName == nil {
			byName = map[string]reservationState{}
			c.states[of] = byName
			c.namespaces[of.Namespace]++
		}
		before, known := byName[r.Name]
		state.changedAt = before.changedAt
		if known && reflect.DeepEqual(before, state) {
			continue
		}
		state.changedAt = c.clock.Now()
		byName[r.Name], changed = state, true
	}
	return key, changed
}

// Delete removes a Reservation, with the results of Set.
func (c *GrantCache) Delete(r *broker.Reservation) (key demand.Key, changed bool) {
	key, ok := demand.KeyOfReservation(r)
	if !ok {
		return demand.Key{}, false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, of := range demand.PodKeys(r) {
		byName := c.states[of]
		if _, known := byName[r.Name]; !known {
			continue
		}
		changed = true
		if delete(byName, r.Name); len(byName) > 0 {
			continue
		}
		delete(c.states, of)
		if c.namespaces[of.Namespace]--; c.namespaces[of.Namespace] == 0 {
			delete(c.namespaces, of.Namespace)
		}
	}
	return key, changed
}

// HasNamespace reports whether a namespace has any Reservation that serves pods.
func (c *GrantCache) HasNamespace(namespace string) bool {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.namespaces[namespace] > 0
}

// Get sums up the grants of a key; nil if there are none.
func (c *GrantCache) Get(key demand.Key) *Grants {
	c.mu.RLock()
	defer c.mu.RUnlock()
	var g *Grants
	byName := c.states[key]
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		for cluster, n := range byName[name].Slots {
			if g == nil {
				g = &Grants{Key: key, Slots: map[string]int32{}, Charges: map[string][]Charge{}, most: map[string]int32{}}
			}
			g.Slots[cluster] += n
			label := charge.Label(byName[name].id)
			g.Charges[cluster] = append(g.Charges[cluster], Charge{label, n})
			g.most[label] = byName[name].Most
			if at := byName[name].changedAt; at.After(g.ChangedAt) {
				g.ChangedAt = at
			}
		}
	}
	return g
}

// SetUnasked records whether capacity for a key is not, or not entirely, requested, and for
// how many pods it is.
func (c *GrantCache) SetUnasked(key demand.Key, unasked bool, but int32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if unasked {
		c.unasked[key.OfReservation()] = but
	} else {
		delete(c.unasked, key.OfReservation())
	}
}

// KeepUnasked forgets what SetUnasked recorded for other keys than those to keep.
func (c *GrantCache) KeepUnasked(keep func(demand.Key) bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	maps.DeleteFunc(c.unasked, func(key demand.Key, _ int32) bool { return !keep(key) })
}

// UnaskedBut returns what SetUnasked recorded.
func (c *GrantCache) UnaskedBut(key demand.Key) (pods int32, unasked bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	pods, unasked = c.unasked[key.OfReservation()]
	return pods, unasked
}

// IsUnasked reports whether capacity for a key is not, or not entirely, requested.
func (c *GrantCache) IsUnasked(key demand.Key) bool {
	_, unasked := c.UnaskedBut(key)
	return unasked
}

// Expected returns how many pods of a key have capacity in other clusters, or may get it by
// what is requested already, or is about to be.
func (c *GrantCache) Expected(key demand.Key) (pods int32) {
	requested, _ := c.UnaskedBut(key)
	c.mu.RLock()
	defer c.mu.RUnlock()
	undecided := len(c.states[key]) == 0
	for _, s := range c.states[key] {
		pods += s.expected
		undecided = undecided || !s.queued && !s.failed
	}
	if undecided {
		return max(pods, requested) // the cache may be older than the request
	}
	return pods
}

// Refused reports whether a key has Reservations and all of them are queued or
// failed.
func (c *GrantCache) Refused(key demand.Key) bool {
	c.mu.RLock()
	defer c.mu.RUnlock()
	for _, s := range c.states[key] {
		if !s.queued && !s.failed {
			return false
		}
	}
	return len(c.states[key]) > 0
}
