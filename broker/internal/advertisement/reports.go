package advertisement

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/utils/clock"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/lease"
	"github.com/spillway-dev/spillway/broker/internal/store"
)

const (
	// concernedPerSecond is how many Reservations the changes of one cluster's reports may
	// concern: as many as it may write itself by default. concernedAtOnce is the number for
	// which a cluster has an allowance after a time without changes: a consumer's by default.
	concernedPerSecond, concernedAtOnce = 20, 1000
)

// Reports are what this process acts on of what clusters report about capacity that is held:
// which providers a consumer cannot connect to.
//
// A change of a report concerns every Reservation with a hold there: its status is written, or
// it is placed elsewhere. The quota of a cluster's writes does not include advertisements, so
// their changes have an allowance of their own, from which each Reservation takes one. A change
// counts at once while there is any left. Otherwise what the cluster reported last counts as
// soon as there is some again: a report that changes back and forth causes no more writes than
// the cluster may make itself.
type Reports struct {
	clock clock.PassiveClock

	mu sync.Mutex
	of map[string]*report
	// concerned are the names of the Reservations to reconcile because of changes.
	concerned map[string]bool
}

// report is that of one cluster.
type report struct {
	// unreachable is since when the cluster has reported each provider.
	unreachable map[string]time.Time
	// spent is when the allowance would be as large as after a time without changes.
	spent time.Time
}

func newReports(clock clock.PassiveClock) *Reports {
	return &Reports{clock: clock, of: map[string]*report{}, concerned: map[string]bool{}}
}

// due is when the next change may count.
func (r *report) due() time.Time {
	return r.spent.Add(-concernedAtOnce * time.Second / concernedPerSecond)
}

// spend takes a number of Reservations from the allowance. If that is more than is left, the
// next change waits longer.
func (r *report) spend(n int, now time.Time) {
	r.spent = lease.Later(r.spent, now).Add(time.Duration(n) * time.Second / concernedPerSecond)
}

// says reports whether an advertisement, nil for none, says the same.
func (r *report) says(ad *broker.ClusterAdvertisement) bool {
	if r == nil {
		return ad == nil
	}
	reported := unreachableOf(ad)
	return ad != nil && len(reported) == len(r.unreachable) &&
		!slices.ContainsFunc(reported, func(provider string) bool { _, known := r.unreachable[provider]; return !known })
}

// follow lets what a cluster's stored advertisement says count, if it may now, and reports
// whether anything has changed. It follows the store, which ignores events that come late.
func (r *Reports) follow(store *store.Store, cluster string) (changed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	// Read while no other event is followed, so that none follows what is older.
	ad, known, now := store.Advertisement(cluster), r.of[cluster], r.clock.Now()
	if known.says(ad) || known != nil && ad != nil && now.Before(known.due()) {
		return false
	}
	was := cmp.Or(known, &report{})
	next := &report{unreachable: map[string]time.Time{}, spent: was.spent}
	for _, provider := range unreachableOf(ad) {
		since, reported := was.unreachable[provider]
		if !reported {
			since = now
		}
		next.unreachable[provider] = since
	}
	names := heldWhereChanged(store, cluster, slices.Collect(maps.Keys(was.unreachable)), unreachableOf(ad))
	for _, name := range names {
		r.concerned[name] = true
	}
	if ad == nil {
		delete(r.of, cluster)
		return true
	}
	if known != nil {
		next.spend(len(names), now)
	}
	r.of[cluster] = next
	return true
}

// next is when what a cluster's stored advertisement says may count; zero if it does.
func (r *Reports) next(store *store.Store, cluster string) time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	known := r.of[cluster]
	if known.says(store.Advertisement(cluster)) || known == nil {
		return time.Time{}
	}
	return known.due()
}

// Allow spends a cluster's allowance for the Reservations that a function names, which it calls
// only if there is an allowance.
func (r *Reports) Allow(cluster string, names func() []string) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	known, now := r.of[cluster], r.clock.Now()
	if known == nil {
		return names()
	}
	if now.Before(known.due()) {
		return nil
	}
	allowed := names()
	known.spend(len(allowed), now)
	return allowed
}

// Take returns the names of the Reservations to reconcile, once.
func (r *Reports) Take() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	names := slices.Collect(maps.Keys(r.concerned))
	clear(r.concerned)
	return names
}

// Concern has a Reservation reconciled because of its consumer's own report about it.
func (r *Reports) Concern(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.concerned[name] = true
}

// Unreachable is since when a consumer has reported each provider as unreachable.
func (r *Reports) Unreachable(consumer string) map[string]time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	if known := r.of[consumer]; known != nil {
		return known.unreachable // it is replaced, and never changed
	}
	return nil
}

// Follow lets what a cluster's advertisement says of holds count, if it may now, and has the
// Reservations reconciled that it concerns.
func (c *Clusters) Follow(cluster string) {
	if c.Reports.follow(c.store, cluster) {
		c.Retry.Send()
	}
}

// unreachableOf are the providers that an advertisement reports; none for nil.
func unreachableOf(ad *broker.ClusterAdvertisement) []string {
	if ad == nil {
		return nil
	}
	return ad.Spec.Unreachable
}

// heldWhereChanged are the names of a consumer's Reservations with a hold at a provider of
// which it reports another reachability than before.
func heldWhereChanged(s *store.Store, consumer string, before, after []string) (names []string) {
	for _, provider := range slices.Concat(before, after) {
		ad := s.Advertisement(provider)
		if ad == nil || slices.Contains(before, provider) == slices.Contains(after, provider) {
			continue
		}
		for i := range ad.Status.Holds {
			if ad.Status.Holds[i].Requester == consumer {
				names = append(names, ad.Status.Holds[i].ReservationName)
			}
		}
	}
	return names
}
