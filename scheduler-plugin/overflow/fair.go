package overflow

import (
	"cmp"
	"slices"
	"sort"

	corev1 "k8s.io/api/core/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// claim is one Reservation of a namespace whose OverflowPolicy limits their sum.
type claim struct {
	name string
	// each is what one pod requests.
	each corev1.ResourceList
	// has is the number of pods that it requests already, and want what its pods need.
	has, want int32
}

// fairShares returns how many pods each claim may request within a limit, beside what
// others request: as many for each claim, as far as they want them, and no fewer than
// they have. A pod that is left over goes to the first claim by name.
func fairShares(limit broker.ResourceQuantities, others corev1.ResourceList, claims []claim) map[string]int32 {
	claims = slices.Clone(claims)
	slices.SortFunc(claims, func(a, b claim) int { return cmp.Compare(a.name, b.name) })
	free := amounts{}
	used := amountsOf(others)
	shares := make(map[string]int32, len(claims))
	needs := make([]amounts, len(claims))
	for i, c := range claims {
		shares[c.name] = c.has
		needs[i] = amounts{}
		for name, n := range amountsOf(c.each) {
			if most := limitOf(limit, name); most != nil && n > 0 {
				needs[i][name] = n
				free[name] = amountsOf(corev1.ResourceList{name: *most})[name] - used[name]
			}
		}
	}
	for i, c := range claims {
		free.add(needs[i], -int64(c.has))
	}
	for {
		// Claims that could get one more pod rise together.
		var rising []int
		for i, c := range claims {
			if shares[c.name] < c.want && free.fits(needs[i]) {
				rising = append(rising, i)
			}
		}
		if len(rising) == 0 {
			return shares
		}
		var highest int32
		for _, i := range rising {
			highest = max(highest, claims[i].want)
		}
		// The highest level that fits.
		level := int32(sort.Search(int(highest), func(level int) bool {
			total := amounts{}
			for _, i := range rising {
				total.add(needs[i], int64(claims[i].upTo(int32(level)+1, shares)))
			}
			return !free.fits(total)
		}))
		for _, i := range rising {
			more := claims[i].upTo(level, shares)
			shares[claims[i].name] += more
			free.add(needs[i], -int64(more))
		}
		for _, i := range rising {
			if shares[claims[i].name] == level && level < claims[i].want && free.fits(needs[i]) {
				shares[claims[i].name]++
				free.add(needs[i], -1)
			}
		}
	}
}

// upTo returns how many more pods a claim gets if it may have as many as level.
func (c claim) upTo(level int32, shares map[string]int32) int32 {
	return max(0, min(level, c.want)-shares[c.name])
}
