package hold

import (
	"encoding/binary"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// Promise is a hold of a consumer.
type Promise struct {
	// Label is what label broker.LabelHold of a guest says that uses it.
	Label string
	Held  broker.HeldCapacity
}

// promiseOf is what an instruction promises.
func promiseOf(instruction *broker.ProviderInstruction, held broker.HeldCapacity) Promise {
	return Promise{Label: demand.HoldLabel(instruction.Spec.ReservationName), Held: held}
}

// Unused is the part of a consumer's promises that its guests do not use yet, promise by
// promise. A guest uses the promise that its label names: a pod with the same requests, or else
// the smallest that is at least as large, or a part of the divisible total. If there is no such
// one left, it uses any promise, in the same order. The consumer writes the label, and chooses
// only among its own promises with it. What guests use beyond that, since a quota bounds sums and
// not shapes, they use of the promised pods in common: as many of these are not unused.
func Unused(promises []Promise, guests []inventory.Guest) []broker.HeldCapacity {
	u := newUsage(promises)
	for _, guest := range guests {
		u.add(guest)
	}
	return u.unused()
}

// usage is what the guests of a consumer use of its promises. Guests with the same requests and
// label are counted as one kind: the cost of what is left does not grow with their number.
type usage struct {
	promises []Promise
	// named are the promises by their labels. With strict, guests of one of them use no other.
	named  map[string]int
	strict bool
	// sets of all promises, the smallest pods first; all are their indices, and own those of each
	// promise.
	sets []promisedSet
	all  []int
	own  [][]int
	// kinds in the order in which they were added first.
	kinds []kind
	index map[kindKey]int
}

// promisedSet is a pod set of a promise: promises[of].Held.PodSets[at].
type promisedSet struct {
	of, at   int
	key      string
	requests corev1.ResourceList
}

// anyPromise is the promise of a guest whose label names none.
const anyPromise = -1

// kind is a number of guests of a promise, or of any, with the same requests.
type kind struct {
	kindKey
	requests corev1.ResourceList
	guests   int32
}

type kindKey struct {
	of  int
	key string
}

// left is what guests leave: of each set the number of pods, in the order of usage.sets. parts
// is what guests request of the divisible promise that their label names, which is not more than
// it has, and divisible what others request that match no set, by the promise that their label
// names, or anyPromise.
type left struct {
	counts           []int32
	parts, divisible map[int]corev1.ResourceList
}

func newUsage(promises []Promise) *usage {
	u := &usage{promises: promises, named: map[string]int{}, own: make([][]int, len(promises)), index: map[kindKey]int{}}
	var sizes []capacity.Vector
	var order []int
	var sets []promisedSet
	for i, p := range promises {
		if p.Label != "" {
			u.named[p.Label] = i
		}
		for j := range p.Held.PodSets {
			requests := p.Held.PodSets[j].Requests.List()
			order, sizes = append(order, len(sets)), append(sizes, capacity.Ceil(requests))
			sets = append(sets, promisedSet{i, j, keyOf(requests), requests})
		}
	}
	slices.SortStableFunc(order, func(a, b int) int { return capacity.Compare(sizes[a], sizes[b]) })
	for _, at := range order {
		u.own[sets[at].of] = append(u.own[sets[at].of], len(u.sets))
		u.all = append(u.all, len(u.sets))
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
func (u *usage) add(guest inventory.Guest) { u.count(guest, 1) }

// remove undoes add.
func (u *usage) remove(guest inventory.Guest) { u.count(guest, -1) }

func (u *usage) count(guest inventory.Guest, n int32) {
	key := kindKey{anyPromise, keyOf(guest.Requests)}
	if of, known := u.named[guest.Hold]; known {
		key.of = of
	}
	i, known := u.index[key]
	if !known {
		i = len(u.kinds)
		u.index[key] = i
		u.kinds = append(u.kinds, kind{kindKey: key, requests: guest.Requests})
	}
	u.kinds[i].guests += n
}

// left is what the guests leave.
func (u *usage) left() left {
	out := left{counts: make([]int32, len(u.sets)), parts: map[int]corev1.ResourceList{}, divisible: map[int]corev1.ResourceList{}}
	for i, s := range u.sets {
		out.counts[i] = u.promises[s.of].Held.PodSets[s.at].Count
	}
	rest := make([]int32, len(u.kinds))
	for i, k := range u.kinds {
		rest[i] = k.guests
	}
	u.useOwn(&out, rest)
	for i, k := range u.kinds {
		if u.strict && k.of != anyPromise {
			rest[i] = 0
		}
		rest[i] = u.use(&out, u.all, rest[i], k.same)
	}
	for i, k := range u.kinds {
		if rest[i] = u.use(&out, u.all, rest[i], k.fits); rest[i] > 0 {
			out.divisible[k.of] = broker.AddTo(out.divisible[k.of], broker.Times(k.requests, rest[i]))
		}
	}
	return out
}

// useOwn makes guests use the promises that their labels name, and leaves in rest how many find
// nothing there.
func (u *usage) useOwn(out *left, rest []int32) {
	for i, k := range u.kinds {
		if k.of != anyPromise {
			rest[i] = u.use(out, u.own[k.of], rest[i], k.same)
		}
	}
	for i, k := range u.kinds {
		if k.of == anyPromise {
			continue
		}
		if rest[i] = u.use(out, u.own[k.of], rest[i], k.fits); rest[i] == 0 || len(u.promises[k.of].Held.PodSets) > 0 {
			continue
		}
		if n := fitting(u.promises[k.of].Held.Totals.List(), out.parts[k.of], k.requests, rest[i]); n > 0 {
			out.parts[k.of] = broker.AddTo(out.parts[k.of], broker.Times(k.requests, n))
			rest[i] -= n
		}
	}
}

// use makes n guests use pods of those sets that match, the smallest first, and returns how many
// find none.
func (u *usage) use(out *left, sets []int, n int32, matches func(promisedSet) bool) (rest int32) {
	for _, i := range sets {
		if n <= 0 {
			break
		}
		if out.counts[i] > 0 && matches(u.sets[i]) {
			used := min(n, out.counts[i])
			out.counts[i] -= used
			n -= used
		}
	}
	return n
}

// same reports whether the pods of a set have the requests of the guests.
func (k kind) same(s promisedSet) bool { return s.key == k.key }

// fits reports whether they have at least as large ones.
func (k kind) fits(s promisedSet) bool { return covers(s.requests, k.requests) }

// fitting returns how many of n guests fit a total of which a part is used, in what the total
// has of.
func fitting(total, used, requests corev1.ResourceList, n int32) int32 {
	of := corev1.ResourceList{}
	for name, amount := range requests {
		if _, has := total[name]; has {
			of[name] = amount
		}
	}
	if len(of) == 0 {
		return 0
	}
	return int32(min(int64(n), capacity.Ceil(of).FitsIn(capacity.Floor(capacity.Subtract(maps.Clone(total), used)))))
}

// totals are what is left of the divisible promises, nil for those of pod sets. beyond is what
// guests that match no set use beside these promises.
func (u *usage) totals(used left) (out []corev1.ResourceList, beyond corev1.ResourceList) {
	out = make([]corev1.ResourceList, len(u.promises))
	for _, requests := range used.divisible {
		beyond = broker.AddTo(beyond, requests)
	}
	for i := range u.promises {
		if held := u.promises[i].Held; len(held.PodSets) == 0 {
			free := capacity.Subtract(held.Totals.List(), used.parts[i])
			out[i] = capacity.Subtract(maps.Clone(free), beyond)
			beyond = capacity.Subtract(beyond, free)
		}
	}
	return out, beyond
}

// unused are the promises less what the guests use.
func (u *usage) unused() []broker.HeldCapacity {
	used, totals := u.inCommon()
	out := make([]broker.HeldCapacity, len(u.promises))
	for i := range u.promises {
		out[i] = *u.promises[i].Held.DeepCopy()
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

// inCommon is left, with what guests use in common, and what is left of the divisible promises.
func (u *usage) inCommon() (used left, totals []corev1.ResourceList) {
	used = u.left()
	totals, beyond := u.totals(used)
	u.useInCommon(used, totals, beyond)
	return used, totals
}

// worth is how many promised pods of each set a guest that is counted uses in common with the
// others.
func (u *usage) worth(guest inventory.Guest) map[share]int32 {
	with, _ := u.inCommon()
	u.remove(guest)
	without, _ := u.inCommon()
	u.add(guest)
	out := map[share]int32{}
	for i, set := range u.sets {
		if n := without.counts[i] - with.counts[i]; n > 0 {
			out[share{of: set.of, at: set.at}] += n
		}
	}
	return out
}

// useInCommon lowers what is left by what guests use beyond the promises that they match: the
// totals by what guests use of resources that their own total has not, and the pod sets by what
// is beyond all totals, those of the promise that a guest's label names first. Otherwise the
// consumer would have a place for each promised pod beside guests that use all of its grant.
func (u *usage) useInCommon(used left, totals []corev1.ResourceList, beyond corev1.ResourceList) {
	for i, parts := range used.parts {
		beyond = broker.AddTo(beyond, capacity.Subtract(maps.Clone(parts), u.promises[i].Held.Totals.List()))
	}
	for i := range totals {
		free := maps.Clone(totals[i])
		totals[i] = capacity.Subtract(totals[i], beyond)
		beyond = capacity.Subtract(beyond, free)
	}
	if len(beyond) == 0 {
		return
	}
	rest := capacity.Ceil(beyond)
	for i := range u.promises {
		if requests := used.divisible[i]; len(requests) > 0 && len(u.own[i]) > 0 {
			others := rest.Minus(capacity.Ceil(requests), 1)
			rest = u.lower(used.counts, u.own[i], rest.Minus(others, 1))
			rest.Add(others, 1)
		}
	}
	u.lower(used.counts, u.all, rest)
}

// lower lowers the numbers of pods of sets, the smallest first, by as many as request an amount
// of each resource together, and returns what they do not. A larger amount lowers none of them
// by less: guests that come and go move no other places.
func (u *usage) lower(counts []int32, sets []int, amount capacity.Vector) (rest capacity.Vector) {
	for _, i := range sets {
		requests, n := capacity.Floor(u.sets[i].requests), int64(0)
		for name, needed := range amount {
			if each := requests[name]; needed > 0 && each > 0 {
				n = max(n, (needed-1)/each+1)
			}
		}
		n = min(n, int64(counts[i]))
		counts[i] -= int32(n)
		amount = amount.Minus(requests, n)
	}
	return amount
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
	if ok || len(after.divisible) == 0 && len(after.parts) == 0 {
		return s, ok
	}
	was, _ := u.totals(before)
	is, _ := u.totals(after)
	for i := range was {
		if was[i] != nil && compare(was[i], is[i]) != 0 {
			return share{of: i, divisible: true}, true
		}
	}
	return share{}, false
}
