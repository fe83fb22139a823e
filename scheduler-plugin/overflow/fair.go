package overflow

import (
	"cmp"
	"math"
	"slices"
	"sort"

	corev1 "k8s.io/api/core/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// claim is one Reservation of a namespace whose OverflowPolicy limits their sum.
type claim struct {
	name string
	key  demand.Key
	// each is what one pod requests.
	each corev1.ResourceList
	// has is the number of pods that it requests now.
	has int32
	// want is the number of pods that need it, or has if that is more: the agent releases
	// what is not needed.
	want int32
	// floor is the number of pods that it keeps whatever others want: what providers have
	// accepted, and what pods use. least is what it would keep without either.
	floor, least int32
	// whole is the number of pods of a gang below which they are of no use.
	whole int32
	// hold is the label of the pods that use it if these may be limited; empty otherwise.
	hold string
}

// fairShares returns how many pods each claim may request within a limit, beside what
// others request: as many for each claim, as far as they want them, and no fewer than their
// floors. Of what is left over, claims get one pod each that request it already, then the
// first ones by name. A gang that is not whole is made whole once each of the others has more
// pods than it, if that fits; otherwise it gets no more.
func fairShares(limit broker.ResourceQuantities, others corev1.ResourceList, claims []claim) map[string]int32 {
	d := newDivision(limit, others, claims)
	for _, i := range d.notWhole() {
		d.raise(d.shares[i] + 1)
		if more := d.claims[i].whole - d.shares[i]; d.fits(i, more) {
			d.give(i, more)
		}
	}
	d.raise(math.MaxInt32)
	shares := make(map[string]int32, len(claims))
	for i, c := range d.claims {
		shares[c.name] = d.shares[i]
	}
	return shares
}

// levelShares returns what fairShares would be if providers had accepted nothing yet, and no
// pods used anything.
func levelShares(limit broker.ResourceQuantities, others corev1.ResourceList, claims []claim) map[string]int32 {
	claims = slices.Clone(claims)
	for i := range claims {
		claims[i].floor = claims[i].least
	}
	return fairShares(limit, others, claims)
}

// division is a limit that is being divided between claims.
type division struct {
	// claims by name.
	claims []claim
	// needs has what one pod of each claim takes of the limited resources, shares what each
	// has been given, and free is what is left.
	needs  []amounts
	shares []int32
	free   amounts
}

// newDivision gives each claim its floor.
func newDivision(limit broker.ResourceQuantities, others corev1.ResourceList, claims []claim) *division {
	d := &division{claims: slices.Clone(claims), needs: make([]amounts, len(claims)), shares: make([]int32, len(claims)), free: amounts{}}
	slices.SortFunc(d.claims, func(a, b claim) int { return cmp.Compare(a.name, b.name) })
	used := amountsOf(others)
	for i, c := range d.claims {
		d.needs[i] = amounts{}
		for name, n := range amountsOf(c.each) {
			if most := limitOf(limit, name); most != nil && n > 0 {
				d.needs[i][name] = n
				d.free[name] = amountsOf(corev1.ResourceList{name: *most})[name] - used[name]
			}
		}
	}
	for i, c := range d.claims {
		d.give(i, c.floor)
	}
	return d
}

func (d *division) give(i int, pods int32) {
	d.shares[i] += pods
	d.free.add(d.needs[i], -int64(pods))
}

// fits reports whether a claim can be given further pods.
func (d *division) fits(i int, pods int32) bool {
	need := amounts{}
	need.add(d.needs[i], int64(pods))
	return d.free.fits(need)
}

// notWhole returns the gangs that are not whole, those with the fewest pods first.
func (d *division) notWhole() (gangs []int) {
	for i, c := range d.claims {
		if d.shares[i] < c.whole {
			gangs = append(gangs, i)
		}
	}
	slices.SortStableFunc(gangs, func(i, j int) int { return cmp.Compare(d.shares[i], d.shares[j]) })
	return gangs
}

// raise gives claims that are whole further pods, until each has as many as it wants, or
// most, or as fit.
func (d *division) raise(most int32) {
	for {
		// Claims that can get one more pod rise together.
		var rising []int
		var highest int32
		for i, c := range d.claims {
			if d.shares[i] >= c.whole && d.upTo(i, most) > 0 && d.fits(i, 1) {
				rising = append(rising, i)
				highest = max(highest, min(c.want, most))
			}
		}
		if len(rising) == 0 {
			return
		}
		// The highest level that fits.
		level := int32(sort.Search(int(highest), func(level int) bool {
			total := amounts{}
			for _, i := range rising {
				total.add(d.needs[i], int64(d.upTo(i, int32(level)+1)))
			}
			return !d.free.fits(total)
		}))
		for _, i := range rising {
			d.give(i, d.upTo(i, level))
		}
		// What is left over changes hands only if it has to.
		hasMore := func(i int) int { return int(min(1, max(0, d.claims[i].has-level))) }
		slices.SortStableFunc(rising, func(i, j int) int { return hasMore(j) - hasMore(i) })
		for _, i := range rising {
			if d.shares[i] == level && d.upTo(i, most) > 0 && d.fits(i, 1) {
				d.give(i, 1)
			}
		}
	}
}

// upTo returns how many more pods a claim gets if it may have as many as level.
func (d *division) upTo(i int, level int32) int32 {
	return max(0, min(level, d.claims[i].want)-d.shares[i])
}
