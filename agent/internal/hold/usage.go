package hold

import (
	"encoding/binary"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// Unused is the part of a consumer's promises that its guests do not use yet,
// promise by promise. A guest uses a promised pod with the same requests, or else
// the smallest that is at least as large. Guests that match none use divisible
// totals, as far as they go.
func Unused(held []broker.HeldCapacity, guests []corev1.ResourceList) []broker.HeldCapacity {
	u := newUsage(held)
	for _, guest := range guests {
		u.add(guest)
	}
	return u.unused()
}

// usage is what the guests of a consumer use of its promises. Guests with the same
// requests are counted as one kind: the cost of what is left does not grow with their
// number.
type usage struct {
	held []broker.HeldCapacity
	// sets of all promises, the smallest pods first.
	sets []promisedSet
	// kinds in the order in which they were added first.
	kinds []kind
	index map[string]int
}

// promisedSet is a pod set of a promise: held[of].PodSets[at].
type promisedSet struct {
	of, at   int
	key      string
	requests corev1.ResourceList
}

// kind is a number of guests with the same requests.
type kind struct {
	key      string
	requests corev1.ResourceList
	guests   int32
}

// left is what guests leave: of each set the number of pods, in the order of usage.sets, and
// divisible is what guests that match no set request.
type left struct {
	counts    []int32
	divisible corev1.ResourceList
}

func newUsage(held []broker.HeldCapacity) *usage {
	u := &usage{held: held, index: map[string]int{}}
	var sizes []capacity.Vector
	var order []int
	var sets []promisedSet
	for i := range held {
		for j := range held[i].PodSets {
			requests := held[i].PodSets[j].Requests.List()
			order, sizes = append(order, len(sets)), append(sizes, capacity.Ceil(requests))
			sets = append(sets, promisedSet{i, j, keyOf(requests), requests})
		}
	}
	slices.SortStableFunc(order, func(a, b int) int { return capacity.Compare(sizes[a], sizes[b]) })
	for _, at := range order {
		u.sets = append(u.sets, sets[at])
	}
	return u
}

// keyOf is the same for amounts that capacity.Compare finds equal, and only for these.
func keyOf(requests corev1.ResourceList) string {
	amounts := capacity.Ceil(requests)
	var key []byte
	for _, name := range slices.Sorted(maps.Keys(amounts)) {
		if amounts[name] != 0 {
			key = append(binary.AppendUvarint(key, uint64(len(name))), name...)
			key = binary.AppendVarint(key, amounts[name])
		}
	}
	return string(key)
}

// add counts a guest.
func (u *usage) add(requests corev1.ResourceList) { u.count(keyOf(requests), requests, 1) }

// remove undoes add.
func (u *usage) remove(requests corev1.ResourceList) { u.count(keyOf(requests), requests, -1) }

func (u *usage) count(key string, requests corev1.ResourceList, n int32) {
	i, known := u.index[key]
	if !known {
		i = len(u.kinds)
		u.index[key] = i
		u.kinds = append(u.kinds, kind{key: key, requests: requests})
	}
	u.kinds[i].guests += n
}

// left is what the guests leave.
func (u *usage) left() left {
	out := left{counts: make([]int32, len(u.sets)), divisible: corev1.ResourceList{}}
	for i, s := range u.sets {
		out.counts[i] = u.held[s.of].PodSets[s.at].Count
	}
	others := make([]int32, len(u.kinds))
	use := func(n int32, matches func(promisedSet) bool) (rest int32) {
		for i := range u.sets {
			if n > 0 && out.counts[i] > 0 && matches(u.sets[i]) {
				used := min(n, out.counts[i])
				out.counts[i] -= used
				n -= used
			}
		}
		return n
	}
	for i, k := range u.kinds {
		others[i] = use(k.guests, func(s promisedSet) bool { return s.key == k.key })
	}
	for i, k := range u.kinds {
		if rest := use(others[i], func(s promisedSet) bool { return covers(s.requests, k.requests) }); rest > 0 {
			broker.AddTo(out.divisible, broker.Times(k.requests, rest))
		}
	}
	return out
}

// totals are what is left of the divisible promises, nil for those of pod sets.
func (u *usage) totals(used left) []corev1.ResourceList {
	out, divisible := make([]corev1.ResourceList, len(u.held)), maps.Clone(used.divisible)
	for i := range u.held {
		if len(u.held[i].PodSets) == 0 {
			out[i] = capacity.Subtract(u.held[i].Totals.List(), divisible)
			divisible = capacity.Subtract(divisible, u.held[i].Totals.List())
		}
	}
	return out
}

// unused are the promises less what the guests use.
func (u *usage) unused() []broker.HeldCapacity {
	used := u.left()
	out, totals := make([]broker.HeldCapacity, len(u.held)), u.totals(used)
	for i := range u.held {
		out[i] = *u.held[i].DeepCopy()
	}
	for i, s := range u.sets {
		out[s.of].PodSets[s.at].Count = used.counts[i]
	}
	for i := range out {
		if len(out[i].PodSets) > 0 {
			out[i].Totals = capacity.OfPodSets(out[i].PodSets).Totals
		} else {
			out[i].Totals = broker.FromList(totals[i])
		}
	}
	return out
}

// share is the part of a promise that a guest uses: a pod of a set, or of a divisible total.
type share struct {
	of, at    int
	divisible bool
}

// shareOf is the share that is used after and was left before; ok is false if there is none.
func (u *usage) shareOf(before, after left) (s share, ok bool) {
	for i, set := range u.sets {
		if after.counts[i] < before.counts[i] && (!ok || set.of < s.of || set.of == s.of && set.at < s.at) {
			s, ok = share{of: set.of, at: set.at}, true
		}
	}
	if ok || len(after.divisible) == 0 {
		return s, ok
	}
	was, is := u.totals(before), u.totals(after)
	for i := range was {
		if was[i] != nil && compare(was[i], is[i]) != 0 {
			return share{of: i, divisible: true}, true
		}
	}
	return share{}, false
}
