package usage

import (
	"cmp"
	"encoding/binary"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// Promise is what one Reservation of a consumer holds here.
type Promise struct {
	// UID and Name are its Reservation's: they stay the same if the instruction is replaced. Label
	// broker.LabelHold of a guest that uses it says the name.
	UID  types.UID
	Name string
	Held broker.HeldCapacity
}

// PromiseOf is what an instruction promises.
func PromiseOf(instruction *broker.ProviderInstruction, held broker.HeldCapacity) Promise {
	return Promise{UID: cmp.Or(instruction.Spec.ReservationUID, instruction.UID), Name: instruction.Spec.ReservationName, Held: held}
}

// divisible reports whether guests of any shape may use a promise.
func (p Promise) divisible() bool { return len(p.Held.PodSets) == 0 && !p.Held.Empty() }

// Unused is the part of a consumer's promises that its guests do not use yet, promise by
// promise. A guest uses the promise that its label names: a pod with the same requests, or else
// the smallest that is at least as large, or a part of the divisible total. If there is no such
// one left, it uses any promise, in the same order. The consumer writes the label, and chooses
// only among its own promises with it. A guest that finds none uses nothing: where placeholders keep
// the places, it waits.
func Unused(promises []Promise, guests []inventory.Guest) []broker.HeldCapacity {
	u := New(promises)
	for _, guest := range guests {
		u.Add(guest)
	}
	return u.Unused()
}

// Usage is what the guests of a consumer use of its promises. Guests with the same requests and
// label are counted as one kind: the cost of what is left does not grow with their number.
type Usage struct {
	// Strict: guests whose label names a promise use no other.
	Strict   bool
	promises []Promise
	// named are the promises by their labels.
	named map[string]int
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

// Left is what guests leave: of each set the number of pods, in the order of Usage.sets. parts
// is what guests request of the divisible promises, and unplaced the number of guests for which
// nothing is left.
type Left struct {
	counts   []int32
	parts    map[int]corev1.ResourceList
	unplaced int32
}

// New returns the Usage of promises that no guest uses.
func New(promises []Promise) *Usage {
	u := &Usage{promises: promises, named: map[string]int{}, own: make([][]int, len(promises)), index: map[kindKey]int{}}
	var sizes []capacity.Vector
	var order []int
	var sets []promisedSet
	for i, p := range promises {
		if p.Name != "" {
			u.named[demand.HoldLabel(p.Name)] = i
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

// Add counts a guest.
func (u *Usage) Add(guest inventory.Guest) { u.count(guest, 1) }

// Remove undoes Add.
func (u *Usage) Remove(guest inventory.Guest) { u.count(guest, -1) }

func (u *Usage) count(guest inventory.Guest, n int32) {
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

// Left is what the guests leave.
func (u *Usage) Left() Left {
	out := Left{counts: make([]int32, len(u.sets)), parts: map[int]corev1.ResourceList{}}
	for i, s := range u.sets {
		out.counts[i] = u.promises[s.of].Held.PodSets[s.at].Count
	}
	rest := make([]int32, len(u.kinds))
	for i, k := range u.kinds {
		rest[i] = k.guests
	}
	u.useOwn(&out, rest)
	for i, k := range u.kinds {
		if u.Strict && k.of != anyPromise {
			out.unplaced += rest[i]
			rest[i] = 0
		}
		rest[i] = u.use(&out, u.all, rest[i], k.same)
	}
	for i, k := range u.kinds {
		rest[i] = u.use(&out, u.all, rest[i], k.fits)
		for of := range u.promises {
			rest[i] = u.usePart(&out, of, k.requests, rest[i])
		}
		out.unplaced += rest[i]
	}
	return out
}

// useOwn makes guests use the promises that their labels name, and leaves in rest how many find
// nothing there.
func (u *Usage) useOwn(out *Left, rest []int32) {
	for i, k := range u.kinds {
		if k.of != anyPromise {
			rest[i] = u.use(out, u.own[k.of], rest[i], k.same)
		}
	}
	for i, k := range u.kinds {
		if k.of != anyPromise {
			rest[i] = u.use(out, u.own[k.of], rest[i], k.fits)
			rest[i] = u.usePart(out, k.of, k.requests, rest[i])
		}
	}
}

// use makes n guests use pods of those sets that match, the smallest first, and returns how many
// find none.
func (u *Usage) use(out *Left, sets []int, n int32, matches func(promisedSet) bool) (rest int32) {
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
func (k kind) fits(s promisedSet) bool { return Covers(s.requests, k.requests) }

// usePart makes n guests use a promise if it is divisible, and returns how many do not fit it.
func (u *Usage) usePart(out *Left, of int, requests corev1.ResourceList, n int32) (rest int32) {
	if n <= 0 || !u.promises[of].divisible() {
		return n
	}
	fits := int32(min(int64(n), capacity.Ceil(requests).FitsIn(capacity.Floor(u.unusedPart(*out, of)))))
	if fits > 0 {
		out.parts[of] = broker.AddTo(out.parts[of], broker.Times(requests, fits))
	}
	return n - fits
}

// unusedPart is what is left of a divisible promise.
func (u *Usage) unusedPart(used Left, of int) corev1.ResourceList {
	return capacity.Subtract(u.promises[of].Held.Totals.List(), used.parts[of])
}

// Unused are the promises less what the guests use.
func (u *Usage) Unused() []broker.HeldCapacity {
	used := u.Left()
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
			out[i].Totals = broker.FromList(u.unusedPart(used, i))
		}
	}
	return out
}

// Share is the part of a promise that a guest uses: a pod of a set, or of a divisible total.
type Share struct {
	Of, At    int
	Divisible bool
}

// ShareOf is the share of a guest that is used after and was left before: of a divisible promise
// also if the guest requests nothing. ok is false if there is none for it, or only that of a guest
// which is counted already.
func (u *Usage) ShareOf(before, after Left) (s Share, ok bool) {
	if after.unplaced > before.unplaced {
		return s, false
	}
	for i, set := range u.sets {
		if after.counts[i] < before.counts[i] && (!ok || set.of < s.Of || set.of == s.Of && set.at < s.At) {
			s, ok = Share{Of: set.of, At: set.at}, true
		}
	}
	if ok {
		return s, true
	}
	of := slices.IndexFunc(u.promises, Promise.divisible)
	for i := range u.promises {
		if capacity.Compare(capacity.Ceil(before.parts[i]), capacity.Ceil(after.parts[i])) != 0 {
			of = i
			break
		}
	}
	return Share{Of: of, Divisible: true}, true
}

// Covers reports whether a has at least each amount of b.
func Covers(a, b corev1.ResourceList) bool {
	for name, amount := range b {
		if have := a[name]; have.Cmp(amount) < 0 {
			return false
		}
	}
	return true
}
