package demand

import (
	"maps"
	"slices"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Clock returns the current time. k8s.io/utils/clock has real and fake ones.
type Clock interface{ Now() time.Time }

// Windows of a Batcher.
type Windows struct {
	// Quiet is how long no pod must have been added to a key before its request is
	// due, so that a burst of pods becomes one request.
	Quiet time.Duration
	// Longest is how long further pods may delay a request.
	Longest time.Duration
}

// Request is the capacity that one key needs in total.
type Request struct {
	Key   Key
	Owner metav1.OwnerReference
	// PodSet with the total count: unschedulable pods, pods that the scheduler has
	// not tried yet, and pods that run in other clusters already.
	PodSet broker.PodSet
	// Priority is the highest one of the pending pods. It is set when the request is made.
	Priority int32
	// MinAvailable is the number of pods below which the capacity is of no use; 0 unless
	// the pods are a gang. It is set when the request is made.
	MinAvailable int32
	// Pending pods, by UID.
	Pending []types.UID
}

// Batcher groups unschedulable pods into requests. A request is a total, so
// adding a pod or requesting again is idempotent. Safe for concurrent use.
type Batcher struct {
	clock   Clock
	windows Windows

	mu     sync.Mutex
	groups map[Key]*group
	keyOf  map[types.UID]Key
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
	return &Batcher{clock: clock, windows: windows, groups: map[Key]*group{}, keyOf: map[types.UID]Key{}}
}

// Add records an unschedulable pod and schedules a request for its key.
func (b *Batcher) Add(pod types.UID, key Key, owner metav1.OwnerReference, set broker.PodSet) {
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
		g.deadline = now.Add(b.windows.Longest)
	}
	g.due = now.Add(b.windows.Quiet)
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
// key any more are dropped from it. others counts the pods of a key that need capacity
// beside the pending ones. Neither must call the Batcher.
func (b *Batcher) Due(valid func(types.UID, Key) bool, others func(Key, metav1.OwnerReference) int32) []Request {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.clock.Now()
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
		request := Request{Key: key, Owner: g.owner, PodSet: g.set, Pending: slices.Sorted(maps.Keys(g.pods))}
		request.PodSet.Count = int32(len(g.pods)) + others(key, g.owner)
		requests = append(requests, request)
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
