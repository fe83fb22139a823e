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

// Clock tells the time. k8s.io/utils/clock has real and fake ones.
type Clock interface{ Now() time.Time }

// Windows of a Batcher.
type Windows struct {
	// Quiet is how long nothing new must have been noted for a key before it is
	// asked for, so that a burst becomes one ask.
	Quiet time.Duration
	// Longest is how long a key may wait for quiet.
	Longest time.Duration
}

// Ask is what one key needs in all.
type Ask struct {
	Key   Key
	Owner metav1.OwnerReference
	// PodSet with the total count: pods that were turned away, pods that the
	// scheduler has not come to yet, and pods that run in other clusters already.
	PodSet broker.PodSet
	// Waiting pods, by UID.
	Waiting []types.UID
}

// Batcher gathers pods that found no room into asks. An ask is a total, so
// noting a pod again, or asking again, is harmless. Safe for concurrent use.
type Batcher struct {
	clock   Clock
	windows Windows

	mu    sync.Mutex
	lots  map[Key]*lot
	keyOf map[types.UID]Key
}

// lot is the pods of one key that wait.
type lot struct {
	owner metav1.OwnerReference
	set   broker.PodSet
	pods  map[types.UID]bool
	// due is when to ask; zero when there is nothing new to say. deadline caps
	// how far further notes may push it.
	due, deadline time.Time
}

// NewBatcher makes an empty Batcher.
func NewBatcher(clock Clock, windows Windows) *Batcher {
	return &Batcher{clock: clock, windows: windows, lots: map[Key]*lot{}, keyOf: map[types.UID]Key{}}
}

// Note records that a pod found no room. Its key becomes due.
func (b *Batcher) Note(pod types.UID, key Key, owner metav1.OwnerReference, set broker.PodSet) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if before, known := b.keyOf[pod]; known && before != key {
		b.forget(pod)
	}
	l := b.lots[key]
	if l == nil {
		l = &lot{pods: map[types.UID]bool{}}
		b.lots[key] = l
	}
	l.owner, l.set = owner, set
	l.pods[pod] = true
	b.keyOf[pod] = key
	now := b.clock.Now()
	if l.deadline.IsZero() {
		l.deadline = now.Add(b.windows.Longest)
	}
	l.due = now.Add(b.windows.Quiet)
	if l.due.After(l.deadline) {
		l.due = l.deadline
	}
}

// Forget drops a pod: it was bound, has ended, or is gone.
func (b *Batcher) Forget(pod types.UID) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.forget(pod)
}

func (b *Batcher) forget(pod types.UID) {
	key, known := b.keyOf[pod]
	if !known {
		return
	}
	delete(b.keyOf, pod)
	l := b.lots[key]
	delete(l.pods, pod)
	if len(l.pods) == 0 {
		delete(b.lots, key)
	}
}

// Again makes a key due after a delay, or sooner if it is due sooner. Nothing
// happens if none of its pods waits.
func (b *Batcher) Again(key Key, after time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	l := b.lots[key]
	if l == nil {
		return
	}
	due := b.clock.Now().Add(after)
	if l.due.IsZero() || due.Before(l.due) {
		l.due = due
	}
}

// Waiting lists the pods noted for a key, in a stable order.
func (b *Batcher) Waiting(key Key) []types.UID {
	b.mu.Lock()
	defer b.mu.Unlock()
	if l := b.lots[key]; l != nil {
		return slices.Sorted(maps.Keys(l.pods))
	}
	return nil
}

// Due yields the asks whose time has come, each once. others counts the pods of a
// key that need a place beside those that were noted; it must not call the
// Batcher.
func (b *Batcher) Due(others func(Key) int32) []Ask {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.clock.Now()
	var asks []Ask
	for key, l := range b.lots {
		if l.due.IsZero() || l.due.After(now) {
			continue
		}
		l.due, l.deadline = time.Time{}, time.Time{}
		ask := Ask{Key: key, Owner: l.owner, PodSet: l.set, Waiting: slices.Sorted(maps.Keys(l.pods))}
		ask.PodSet.Count = int32(len(l.pods)) + others(key)
		asks = append(asks, ask)
	}
	slices.SortFunc(asks, func(x, y Ask) int { return x.Key.compare(y.Key) })
	return asks
}

// Next is when Due will yield something; ok is false if nothing is on its way.
func (b *Batcher) Next() (at time.Time, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, l := range b.lots {
		if !l.due.IsZero() && (!ok || l.due.Before(at)) {
			at, ok = l.due, true
		}
	}
	return at, ok
}
