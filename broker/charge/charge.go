package charge

import (
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"strings"
)

// Label returns the value of label broker.LabelHold of the pods that use a Reservation with an ID
// at the broker: the ID itself, or a prefix and a hash of one that is too long for a label.
func Label(id string) string {
	const maxLength = 63
	if len(id) <= maxLength {
		return id
	}
	sum := sha256.Sum256([]byte(id))
	return strings.TrimRight(id[:maxLength-17], "-.") + "-" + hex.EncodeToString(sum[:])[:16]
}

// Pod is what decides which hold a pod uses. K identifies the pods that one Reservation is for.
type Pod[K comparable] struct {
	Namespace string
	// Label is the value of label broker.LabelHold, empty if it has none.
	Label string
	// Key of the pod; Keyed is false if its owner is not known, or not any more.
	Key   K
	Keyed bool
}

// Holds finds the holds of one consumer.
type Holds[K comparable, H any] interface {
	// ByHand returns the one with a label that was made by hand.
	ByHand(label string) (H, bool)
	// OfKey returns the one for the pods of a key: of several, the one with the label if it is
	// among them.
	OfKey(key K, label string) (H, bool)
	// Named returns the one with a label whose Reservation is in a namespace.
	Named(namespace, label string) (H, bool)
}

// Of returns the hold that a pod uses: the one made by hand that its label names, or else that of
// its key, or else the one of its namespace that the label names. A pod uses what it was bound
// for, also when that serves its namespace or labels no more: its label does not change. But a
// Reservation that has replaced the one of the label is its key's.
func Of[K comparable, H any](pod Pod[K], holds Holds[K, H]) (hold H, ok bool) {
	if pod.Label != "" {
		if hold, ok = holds.ByHand(pod.Label); ok {
			return hold, true
		}
	}
	if pod.Keyed {
		if hold, ok = holds.OfKey(pod.Key, pod.Label); ok {
			return hold, true
		}
	}
	if pod.Label != "" {
		return holds.Named(pod.Namespace, pod.Label)
	}
	return hold, false
}

// Hold is what Index knows of a hold.
type Hold[K comparable] struct {
	// Namespace of its Reservation, and the label of the pods that were bound for it.
	Namespace, Label string
	ByHand           bool
	// Key of the pods that it is for, which is not zero; zero if it is for no owner's.
	Key K
}

// Index is the Holds of a list; each is found by its place in the list. Of several that are alike
// it finds the first.
type Index[K comparable] struct {
	all      []Hold[K]
	labelled map[string][]int
	keyed    map[K][]int
}

// NewIndex returns the Index of a list.
func NewIndex[K comparable](all []Hold[K]) *Index[K] {
	x := &Index[K]{all: all, labelled: map[string][]int{}, keyed: map[K][]int{}}
	for i, h := range all {
		x.labelled[h.Label] = append(x.labelled[h.Label], i)
		x.keyed[h.Key] = append(x.keyed[h.Key], i)
	}
	return x
}

func (x *Index[K]) first(of []int, is func(Hold[K]) bool) (i int, ok bool) {
	if at := slices.IndexFunc(of, func(i int) bool { return is(x.all[i]) }); at >= 0 {
		return of[at], true
	}
	return 0, false
}

// ByHand implements Holds.
func (x *Index[K]) ByHand(label string) (i int, ok bool) {
	return x.first(x.labelled[label], func(h Hold[K]) bool { return h.ByHand })
}

// OfKey implements Holds.
func (x *Index[K]) OfKey(key K, label string) (i int, ok bool) {
	if i, ok = x.first(x.keyed[key], func(h Hold[K]) bool { return h.Label == label }); ok {
		return i, true
	}
	return x.first(x.keyed[key], func(Hold[K]) bool { return true })
}

// Named implements Holds.
func (x *Index[K]) Named(namespace, label string) (i int, ok bool) {
	return x.first(x.labelled[label], func(h Hold[K]) bool { return h.Namespace == namespace })
}
