package overflow

import (
	"maps"
	"reflect"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/utils/clock"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// grantCache has the capacity that Reservations grant, by key: the scheduling
// cycle reads it instead of Reservations. Safe for concurrent use.
type grantCache struct {
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
	// slots are the pods that can run now, by provider, and most at all of them together: a
	// lowered count is effective at once, also before the broker has observed it.
	slots map[string]int32
	most  int32
	// expected is how many pods have capacity or, unless it is queued or failed, may get it.
	expected int32
	// queued: capacity for (the rest of) it is insufficient.
	queued bool
	// failed: it can never be granted as specified.
	failed bool
	// changedAt is when one of the above last changed.
	changedAt time.Time
}

// grants is the capacity granted to the pods of one key. It is not changed once
// made.
type grants struct {
	key demand.Key
	// slots by provider.
	slots map[string]int32
	// charges has the Reservations to charge, by provider, in the order of their names.
	charges map[string][]charge
	// most has the pods that may use each hold at all providers together, by label.
	most map[string]int32
	// changedAt is when the grants last changed.
	changedAt time.Time
}

// charge is the part of a grant that one Reservation has.
type charge struct {
	// label is the value of the hold label of the pods that use it.
	label string
	slots int32
}

// slotsAt returns the slots at a provider; 0 for nil grants.
func (g *grants) slotsAt(provider string) int32 {
	if g == nil {
		return 0
	}
	return g.slots[provider]
}

func newGrantCache(clock clock.PassiveClock) *grantCache {
	return &grantCache{clock: clock, states: map[demand.Key]map[string]reservationState{}, namespaces: map[string]int{}, unasked: map[demand.Key]int32{}}
}

// stateOf reads a Reservation, for the pods of the set with a name or, if that is empty, for
// all. One that is being deleted has no slots.
func stateOf(r *broker.Reservation, set string) reservationState {
	s := reservationState{
		id:     r.Status.ID,
		slots:  map[string]int32{},
		queued: meta.IsStatusConditionTrue(r.Status.Conditions, broker.ConditionQueued),
		failed: r.Status.Phase == broker.ReservationFailed,
	}
	if r.DeletionTimestamp != nil {
		return s
	}
	requested := podsOf(r.Spec.PodSets, set)
	if !s.queued && !s.failed {
		s.expected = requested
	}
	if r.Status.ID == "" {
		return s
	}
	for i := range r.Status.Allocations {
		a := &r.Status.Allocations[i]
		if a.Accepted && (s.queued || s.failed) {
			s.expected = min(s.expected+podsOf(a.PodSets, set), requested)
		}
		if slots := min(usableBy(a, set), requested); slots > 0 {
			s.slots[a.Cluster] = slots
			s.most = min(s.most+slots, requested)
		}
	}
	return s
}

// usableBy returns how many pods of a set may use an allocation, or of all if set is empty.
// None while a virtual node provides part of it: that may be for other sets.
func usableBy(a *broker.Allocation, set string) int32 {
	usable, of := a.Usable(), podsOf(a.PodSets, set)
	if of < podsOf(a.PodSets, "") && usable < podsOf(a.PodSets, "") {
		return 0
	}
	return min(usable, of)
}

// podsOf is the number of pods of the set with a name, or of all if that is empty.
func podsOf(sets []broker.PodSet, name string) (n int32) {
	for _, set := range sets {
		if name == "" || set.Name == name {
			n += set.Count
		}
	}
	return n
}

// requestedPods returns how many pods a Reservation requests capacity for.
func requestedPods(r *broker.Reservation) int32 { return podsOf(r.Spec.PodSets, "") }

// set records a Reservation. changed is true if the change concerns its pods; key, that of
// the Reservation, is zero if it serves no pods.
func (c *grantCache) set(r *broker.Reservation) (key demand.Key, changed bool) {
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
		state := stateOf(r, set)
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

// delete removes a Reservation, with the results of set.
func (c *grantCache) delete(r *broker.Reservation) (key demand.Key, changed bool) {
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

// hasNamespace reports whether a namespace has any Reservation that serves pods.
func (c *grantCache) hasNamespace(namespace string) bool {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.namespaces[namespace] > 0
}

// get sums up the grants of a key; nil if there are none.
func (c *grantCache) get(key demand.Key) *grants {
	c.mu.RLock()
	defer c.mu.RUnlock()
	var g *grants
	byName := c.states[key]
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		for cluster, n := range byName[name].slots {
			if g == nil {
				g = &grants{key: key, slots: map[string]int32{}, charges: map[string][]charge{}, most: map[string]int32{}}
			}
			g.slots[cluster] += n
			label := demand.HoldLabel(byName[name].id)
			g.charges[cluster] = append(g.charges[cluster], charge{label, n})
			g.most[label] = byName[name].most
			if at := byName[name].changedAt; at.After(g.changedAt) {
				g.changedAt = at
			}
		}
	}
	return g
}

// setUnasked records whether capacity for a key is not, or not entirely, requested, and for
// how many pods it is.
func (c *grantCache) setUnasked(key demand.Key, unasked bool, but int32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if unasked {
		c.unasked[key.OfReservation()] = but
	} else {
		delete(c.unasked, key.OfReservation())
	}
}

// keepUnasked forgets what setUnasked recorded for other keys than those to keep.
func (c *grantCache) keepUnasked(keep func(demand.Key) bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	maps.DeleteFunc(c.unasked, func(key demand.Key, _ int32) bool { return !keep(key) })
}

// unaskedBut returns what setUnasked recorded.
func (c *grantCache) unaskedBut(key demand.Key) (pods int32, unasked bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	pods, unasked = c.unasked[key.OfReservation()]
	return pods, unasked
}

// isUnasked reports whether capacity for a key is not, or not entirely, requested.
func (c *grantCache) isUnasked(key demand.Key) bool {
	_, unasked := c.unaskedBut(key)
	return unasked
}

// expected returns how many pods of a key have capacity in other clusters, or may get it by
// what is requested already, or is about to be.
func (c *grantCache) expected(key demand.Key) (pods int32) {
	requested, _ := c.unaskedBut(key)
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

// refused reports whether a key has Reservations and all of them are queued or
// failed.
func (c *grantCache) refused(key demand.Key) bool {
	c.mu.RLock()
	defer c.mu.RUnlock()
	for _, s := range c.states[key] {
		if !s.queued && !s.failed {
			return false
		}
	}
	return len(c.states[key]) > 0
}
