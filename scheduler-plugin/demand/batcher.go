package demand

import (
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// Clock returns the current time. k8s.io/utils/clock has real and fake ones.
type Clock interface{ Now() time.Time }

// Windows of a Batcher.
type Windows struct {
	// Quiet is how long no pod of a key must have arrived before its request is due, so that
	// a burst of pods becomes one request.
	Quiet time.Duration
	// Longest is how long further pods may delay a request, and the least time between two
	// requests that the same pods make due.
	Longest time.Duration
}

// Request is the capacity that the pods of one Reservation need in total.
type Request struct {
	// Key of the Reservation.
	Key   Key
	Owner metav1.OwnerReference
	// PodSets with the total counts: unschedulable pods, pods that the scheduler has
	// not tried yet, and pods that run in other clusters already. Several for a gang only.
	PodSets []broker.PodSet
	// Priority is the highest one of the pending pods. It is set when the request is made.
	Priority int32
	// MinAvailable is the number of pods below which the capacity is of no use; 0 unless
	// the pods are a gang. It is set when the request is made.
	MinAvailable int32
	// Pending pods, by UID.
	Pending []types.UID
}

// Pods is the number of pods of a request.
func (r *Request) Pods() int32 { return broker.HeldCapacity{PodSets: r.PodSets}.Pods() }

// Unit returns what can be requested at least, and how many of it are: one pod, or all pods
// of a gang of several shapes.
func (r *Request) Unit() (each corev1.ResourceList, n int32) {
	if len(r.PodSets) == 1 {
		return r.PodSets[0].Requests.List(), r.PodSets[0].Count
	}
	return capacity.OfPodSets(r.PodSets).Totals.List(), 1
}

// Limited returns the request for n of its units.
func (r Request) Limited(n int32) Request {
	switch {
	case len(r.PodSets) == 1:
		r.PodSets = slices.Clone(r.PodSets)
		r.PodSets[0].Count = n
	case n == 0:
		r.PodSets = nil
	}
	return r
}

// Batcher groups unschedulable pods into requests, by the keys of Reservations. A request is a total, so
// adding a pod or requesting again is idempotent. Safe for concurrent use.
type Batcher struct {
	clock   Clock
	windows Windows

	mu     sync.Mutex
	groups map[Key]*group
	keyOf  map[types.UID]Key
	// requestedAt is when a key was requested last, for Longest: also if its pods are gone
	// meanwhile.
	requestedAt map[Key]time.Time
}

// group is the pending pods of one key.
type group struct {
	owner metav1.OwnerReference
	set   broker.PodSet
	pods  map[types.UID]bool
	// due is when to request; zero if nothing has changed since the last request.
	// deadline limits how far further pods may postpone it.
	due, deadline time.Time
}

// NewBatcher returns an empty Batcher.
func NewBatcher(clock Clock, windows Windows) *Batcher {
	return &Batcher{clock: clock, windows: windows, groups: map[Key]*group{}, keyOf: map[types.UID]Key{}, requestedAt: map[Key]time.Time{}}
}

// Add records an unschedulable pod and schedules a request for its key. The pod has arrived at
// a time, from which on totals have counted it: one that was there long before it was found to
// be unschedulable delays no request.
func (b *Batcher) Add(pod types.UID, key Key, owner metav1.OwnerReference, set broker.PodSet, arrived time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if before, known := b.keyOf[pod]; known && before != key {
		b.remove(pod)
	}
	g := b.groups[key]
	if g == nil {
		g = &group{pods: map[types.UID]bool{}}
		b.groups[key] = g
	}
	g.owner, g.set = owner, set
	g.pods[pod] = true
	b.keyOf[pod] = key
	now := b.clock.Now()
	if g.deadline.IsZero() {
		g.deadline, g.due = now.Add(b.windows.Longest), now
	}
	again := b.windows.Quiet
	requestedAt := b.requestedAt[key]
	if arrived.Before(requestedAt) {
		again = b.windows.Longest // the last request has counted it
	}
	for _, earliest := range []time.Time{arrived.Add(b.windows.Quiet), requestedAt.Add(again)} {
		if earliest.After(g.due) {
			g.due = earliest
		}
	}
	if g.due.After(g.deadline) {
		g.due = g.deadline
	}
}

// Remove drops a pod that was bound, has terminated or was deleted.
func (b *Batcher) Remove(pod types.UID) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.remove(pod)
}

func (b *Batcher) remove(pod types.UID) {
	key, known := b.keyOf[pod]
	if !known {
		return
	}
	delete(b.keyOf, pod)
	g := b.groups[key]
	delete(g.pods, pod)
	if len(g.pods) == 0 {
		delete(b.groups, key)
	}
}

// RequeueAfter makes a key due after a delay, or earlier if it is due earlier.
// It has no effect on a key without pending pods.
func (b *Batcher) RequeueAfter(key Key, delay time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	g := b.groups[key]
	if g == nil {
		return
	}
	due := b.clock.Now().Add(delay)
	if g.due.IsZero() || due.Before(g.due) {
		g.due = due
	}
}

// Has reports whether a key has pending pods.
func (b *Batcher) Has(key Key) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.groups[key] != nil
}

// Pending returns the pods of a key, sorted.
func (b *Batcher) Pending(key Key) []types.UID {
	b.mu.Lock()
	defer b.mu.Unlock()
	if g := b.groups[key]; g != nil {
		return slices.Sorted(maps.Keys(g.pods))
	}
	return nil
}

// Due returns the requests that are due, each once. Pods that are not valid for their
// key any more are dropped from it. total returns the pod sets of a request with their
// total counts; it is given the set of the pod that was added last, with the number of the
// pending pods. Neither must call the Batcher.
func (b *Batcher) Due(valid func(types.UID, Key) bool, total func(Key, broker.PodSet) []broker.PodSet) []Request {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.clock.Now()
	maps.DeleteFunc(b.requestedAt, func(_ Key, at time.Time) bool { return now.Sub(at) > b.windows.Longest })
	var requests []Request
	for key, g := range b.groups {
		if g.due.IsZero() || g.due.After(now) {
			continue
		}
		g.due, g.deadline = time.Time{}, time.Time{}
		for pod := range g.pods {
			if !valid(pod, key) {
				b.remove(pod)
			}
		}
		if len(g.pods) == 0 {
			continue
		}
		b.requestedAt[key] = now
		pending := g.set
		pending.Count = int32(len(g.pods))
		requests = append(requests, Request{Key: key, Owner: g.owner, PodSets: total(key, pending), Pending: slices.Sorted(maps.Keys(g.pods))})
	}
	slices.SortFunc(requests, func(x, y Request) int { return x.Key.compare(y.Key) })
	return requests
}

// Next returns when the next request is due; ok is false if none is scheduled.
func (b *Batcher) Next() (at time.Time, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, g := range b.groups {
		if !g.due.IsZero() && (!ok || g.due.Before(at)) {
			at, ok = g.due, true
		}
	}
	return at, ok
}
