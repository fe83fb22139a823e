package charge

import (
	"cmp"
	"encoding/binary"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// Promise is what one Reservation of a consumer holds at a provider.
type Promise struct {
	// UID and Name are its Reservation's: they stay the same if the instruction is replaced. The
	// label of a guest that uses it says the name.
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

// Guest is what a guest requests, and the value of its label broker.LabelHold.
type Guest struct {
	Requests corev1.ResourceList
	Label    string
}

// Unused is the part of a consumer's promises that its guests do not use yet, promise by
// promise. A guest uses the promise that its label names: a pod with the same requests, or else
// the smallest that is at least as large, or a part of the divisible total. If there is no such
// one left, it uses any promise, in the same order. The consumer writes the label, and chooses
// only among its own promises with it. A guest that finds none uses nothing: where placeholders keep
// the places, it waits.
func Unused(promises []Promise, guests []Guest) []broker.HeldCapacity {
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
	// named finds the promises by their labels. Nothing is known of the owners of guests.
	named *Index[unknown]
	// sets of all promises, the smallest pods first; all are their indices, and own those of each
	// promise.
	sets []promisedSet
	all  []int
	own  [][]int
	// kinds in the order in which they were added first.
	kinds []kind
	index map[kindKey]int
	// now is what is left, nil if it is to be computed again, and before what was before the last
	// Take.
	now, before *left
}

type unknown struct{}

// promisedSet is a pod set of a promise: promises[of].Held.PodSets[at].
type promisedSet struct {
	of, at int
	key    string
	size   capacity.Vector
}

// anyPromise is the promise of a guest whose label names none.
const anyPromise = -1

// kind is a number of guests of a promise, or of any, with the same requests.
type kind struct {
	kindKey
	size   capacity.Vector
	guests int32
}

type kindKey struct {
	of  int
	key string
}

// left is what guests leave: of each set the number of pods, in the order of Usage.sets. parts
// is what guests request of the divisible promises, and unplaced the number of guests for which
// nothing is left.
type left struct {
	counts   []int32
	parts    map[int]capacity.Vector
	unplaced int32
}

// New returns the Usage of promises that no guest uses.
func New(promises []Promise) *Usage {
	u := &Usage{promises: promises, own: make([][]int, len(promises)), index: map[kindKey]int{}}
	holds := make([]Hold[unknown], len(promises))
	for i, p := range promises {
		holds[i] = Hold[unknown]{Label: Label(p.Name), ByHand: true}
		for j := range p.Held.PodSets {
			size := capacity.Ceil(p.Held.PodSets[j].Requests.List())
			u.sets = append(u.sets, promisedSet{i, j, keyOf(size), size})
		}
	}
	u.named = NewIndex(holds)
	slices.SortStableFunc(u.sets, func(a, b promisedSet) int { return capacity.Compare(a.size, b.size) })
	for i, s := range u.sets {
		u.own[s.of], u.all = append(u.own[s.of], i), append(u.all, i)
	}
	return u
}

// keyOf is the same for amounts that capacity.Compare finds equal, and only for these.
func keyOf(size capacity.Vector) string {
	var key []byte
	for _, name := range slices.Sorted(maps.Keys(size)) {
		if size[name] != 0 {
			key = append(binary.AppendUvarint(key, uint64(len(name))), name...)
			key = binary.AppendVarint(key, size[name])
		}
	}
	return string(key)
}

// Add counts a guest, whether or not anything is left for it.
func (u *Usage) Add(guest Guest) { u.count(guest, 1) }

func (u *Usage) count(guest Guest, n int32) {
	size := capacity.Ceil(guest.Requests)
	key := kindKey{anyPromise, keyOf(size)}
	if of, known := Of(Pod[unknown]{Label: guest.Label}, u.named); known {
		key.of = of
	}
	i, known := u.index[key]
	if !known {
		i = len(u.kinds)
		u.index[key] = i
		u.kinds = append(u.kinds, kind{kindKey: key, size: size})
	}
	u.kinds[i].guests += n
	u.now = nil
}

// Take counts a guest if a share of a promise is left for it beside those that are counted, and
// returns that.
func (u *Usage) Take(guest Guest) (share Share, ok bool) {
	u.before = u.left()
	u.count(guest, 1)
	if share, ok = u.shareOf(u.before, u.left()); !ok {
		u.Return(guest)
	}
	return share, ok
}

// Fits reports whether a pod set is for guests that are as large.
func (u *Usage) Fits(guest Guest) bool {
	size := capacity.Ceil(guest.Requests)
	return slices.ContainsFunc(u.sets, func(s promisedSet) bool { return size.FitsIn(s.size) > 0 })
}

// Return undoes the last call, which is a Take of this guest.
func (u *Usage) Return(guest Guest) {
	u.count(guest, -1)
	u.now = u.before
}

// left is what the guests leave.
func (u *Usage) left() *left {
	if u.now != nil {
		return u.now
	}
	out := &left{counts: make([]int32, len(u.sets)), parts: map[int]capacity.Vector{}}
	for i, s := range u.sets {
		out.counts[i] = u.promises[s.of].Held.PodSets[s.at].Count
	}
	rest := make([]int32, len(u.kinds))
	for i, k := range u.kinds {
		rest[i] = k.guests
	}
	u.useOwn(out, rest)
	for i, k := range u.kinds {
		if u.Strict && k.of != anyPromise {
			out.unplaced += rest[i]
			rest[i] = 0
		}
		rest[i] = u.use(out, u.all, rest[i], k.same)
	}
	for i, k := range u.kinds {
		rest[i] = u.use(out, u.all, rest[i], k.fits)
		for of := range u.promises {
			rest[i] = u.usePart(out, of, k.size, rest[i])
		}
		out.unplaced += rest[i]
	}
	u.now = out
	return out
}

// useOwn makes guests use the promises that their labels name, and leaves in rest how many find
// nothing there.
func (u *Usage) useOwn(out *left, rest []int32) {
	for i, k := range u.kinds {
		if k.of != anyPromise {
			rest[i] = u.use(out, u.own[k.of], rest[i], k.same)
		}
	}
	for i, k := range u.kinds {
		if k.of != anyPromise {
			rest[i] = u.use(out, u.own[k.of], rest[i], k.fits)
			rest[i] = u.usePart(out, k.of, k.size, rest[i])
		}
	}
}

// use makes n guests use pods of those sets that match, the smallest first, and returns how many
// find none.
func (u *Usage) use(out *left, sets []int, n int32, matches func(promisedSet) bool) (rest int32) {
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
func (k kind) fits(s promisedSet) bool { return k.size.FitsIn(s.size) > 0 }

// usePart makes n guests use a promise if it is divisible, and returns how many do not fit it.
func (u *Usage) usePart(out *left, of int, size capacity.Vector, n int32) (rest int32) {
	if n <= 0 || !u.promises[of].divisible() {
		return n
	}
	fits := int32(min(int64(n), size.FitsIn(u.unusedPart(out, of))))
	if fits > 0 {
		if out.parts[of] == nil {
			out.parts[of] = capacity.Vector{}
		}
		out.parts[of].Add(size, int64(fits))
	}
	return n - fits
}

// unusedPart is what is left of a divisible promise.
func (u *Usage) unusedPart(used *left, of int) capacity.Vector {
	return capacity.Floor(u.promises[of].Held.Totals.List()).Minus(used.parts[of], 1)
}

// Unused are the promises less what the guests use.
func (u *Usage) Unused() []broker.HeldCapacity {
	used := u.left()
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
			out[i].Totals = broker.FromList(u.unusedPart(used, i).List())
		}
	}
	return out
}

// Share is the part of a promise that a guest uses: a pod of a set, or of a divisible total.
type Share struct {
	Of, At    int
	Divisible bool
}

// shareOf is the share of a guest that is used after and was left before: of a divisible promise
// also if the guest requests nothing. ok is false if there is none for it, or only that of a guest
// which is counted already.
func (u *Usage) shareOf(before, after *left) (s Share, ok bool) {
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
		if capacity.Compare(before.parts[i], after.parts[i]) != 0 {
			of = i
			break
		}
	}
	return Share{Of: of, Divisible: true}, true
}
