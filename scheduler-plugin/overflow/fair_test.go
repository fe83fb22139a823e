package overflow

import (
	"fmt"
	"maps"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"
	"pgregory.net/rapid"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestFairShares(t *testing.T) {
	// What is requested is neither granted nor used, unless a claim says so.
	cpus := func(name string, cpu string, has, want int32) claim {
		return claim{name: name, each: expect.Resources("cpu", cpu), has: has, want: want, least: min(1, has), floor: min(1, has)}
	}
	granted := func(c claim, n int32) claim {
		c.floor = n
		return c
	}
	gang := func(c claim, whole int32) claim {
		if c.whole = whole; c.has >= whole {
			c.floor, c.least = max(c.floor, whole), whole
		}
		return c
	}
	cases := map[string]struct {
		reason string
		limit  string
		others string
		claims []claim
		want   map[string]int32
	}{
		"enough for all":           {reason: "none is limited", limit: "10", claims: []claim{cpus("a", "1", 0, 3), cpus("b", "1", 0, 4)}, want: map[string]int32{"a": 3, "b": 4}},
		"one wants more":           {reason: "both get the same", limit: "10", claims: []claim{cpus("a", "1", 0, 1000), cpus("b", "1", 0, 1000)}, want: map[string]int32{"a": 5, "b": 5}},
		"one wants little":         {reason: "what it leaves is the other's", limit: "10", claims: []claim{cpus("a", "1", 0, 1000), cpus("b", "1", 0, 2)}, want: map[string]int32{"a": 8, "b": 2}},
		"left over":                {reason: "the first by name gets it", limit: "5", claims: []claim{cpus("b", "1", 0, 9), cpus("a", "1", 0, 9)}, want: map[string]int32{"a": 3, "b": 2}},
		"left over, requested":     {reason: "it changes hands only if it has to", limit: "5", claims: []claim{cpus("b", "1", 3, 9), cpus("a", "1", 2, 9)}, want: map[string]int32{"a": 2, "b": 3}},
		"one has requested all":    {reason: "nothing of it is granted, and both need it", limit: "10", claims: []claim{cpus("a", "1", 10, 20), cpus("b", "1", 0, 10)}, want: map[string]int32{"a": 5, "b": 5}},
		"all is needed":            {reason: "who was first does not matter", limit: "10", claims: []claim{cpus("a", "1", 10, 10), cpus("b", "1", 0, 5)}, want: map[string]int32{"a": 5, "b": 5}},
		"one has been granted all": {reason: "nothing of it is taken back", limit: "10", claims: []claim{granted(cpus("a", "1", 10, 20), 10), cpus("b", "1", 0, 5)}, want: map[string]int32{"a": 10, "b": 0}},
		"one has been granted a part": {reason: "the other gets what is left, and the first no more", limit: "10",
			claims: []claim{granted(cpus("a", "1", 10, 20), 7), cpus("b", "1", 0, 5)}, want: map[string]int32{"a": 7, "b": 3}},
		"one has been granted less than its share": {reason: "both get the same", limit: "10",
			claims: []claim{granted(cpus("a", "1", 10, 20), 2), granted(cpus("b", "1", 1, 20), 1)}, want: map[string]int32{"a": 5, "b": 5}},
		"more is granted than the limit": {reason: "it was lowered", limit: "4", claims: []claim{granted(cpus("a", "1", 6, 6), 6), cpus("b", "1", 2, 2)}, want: map[string]int32{"a": 6, "b": 1}},
		"the limit was lowered":          {reason: "nothing is granted yet", limit: "4", claims: []claim{cpus("a", "1", 6, 6)}, want: map[string]int32{"a": 4}},
		"small and large":                {reason: "the small one takes what the large one cannot", limit: "10", claims: []claim{cpus("large", "4", 0, 9), cpus("small", "1", 0, 9)}, want: map[string]int32{"large": 2, "small": 2}},
		"others":                         {reason: "what has no pending pods stays", limit: "10", others: "8", claims: []claim{cpus("a", "1", 0, 9), cpus("b", "1", 0, 9)}, want: map[string]int32{"a": 1, "b": 1}},
		"no limited resource":            {reason: "it gets what it wants", limit: "0", claims: []claim{{name: "a", each: expect.Resources("memory", "1Gi"), want: 7}}, want: map[string]int32{"a": 7}},
		"a gang":                         {reason: "it gets what makes it whole beside the other's first", limit: "10", claims: []claim{gang(cpus("a", "1", 0, 8), 8), cpus("b", "1", 0, 20)}, want: map[string]int32{"a": 8, "b": 2}},
		"a gang that was first":          {reason: "it is never lowered below what makes it whole", limit: "10", claims: []claim{gang(cpus("a", "1", 10, 10), 8), cpus("b", "1", 0, 20)}, want: map[string]int32{"a": 8, "b": 2}},
		"a gang that is small":           {reason: "it has as many pods as the other", limit: "10", claims: []claim{gang(cpus("a", "1", 10, 10), 3), cpus("b", "1", 0, 20)}, want: map[string]int32{"a": 5, "b": 5}},
		"a gang that does not fit":       {reason: "a part of it is of no use", limit: "10", claims: []claim{gang(cpus("a", "1", 0, 10), 10), cpus("b", "1", 0, 20)}, want: map[string]int32{"a": 0, "b": 10}},
		"a gang that needs the entire limit, and was first": {reason: "it stays whole", limit: "10",
			claims: []claim{gang(cpus("a", "1", 10, 10), 10), cpus("b", "1", 0, 20)}, want: map[string]int32{"a": 10, "b": 0}},
		"a gang of which a part is granted": {reason: "what it lacks does not fit once the other has more than it", limit: "10",
			claims: []claim{gang(granted(cpus("a", "1", 4, 8), 4), 6), cpus("b", "1", 0, 20)}, want: map[string]int32{"a": 4, "b": 6}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			others := corev1.ResourceList{}
			if tc.others != "" {
				others = expect.Resources("cpu", tc.others)
			}
			got := fairShares(broker.ResourceQuantities{CPU: ptr.To(resource.MustParse(tc.limit))}, others, tc.claims)
			if !maps.Equal(got, tc.want) {
				t.Errorf("got %v, want %v, because %s", got, tc.want, tc.reason)
			}
		})
	}
}

// TestFairSharesHold: shares are between what is kept and what is wanted, and fit the limit
// unless what is kept exceeds it. None could grow. None has two pods more than one of the same
// requests that wants more, unless it keeps them; gangs, and others only beside gangs, may. A
// gang has what makes it whole, or no more than it keeps. What was changed to the shares stays.
func TestFairSharesHold(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := broker.ResourceQuantities{CPU: resource.NewQuantity(int64(rapid.IntRange(0, 40).Draw(t, "limit")), resource.DecimalSI)}
		most := limit.CPU.Value()
		var claims []claim
		needs := map[string]int32{}
		for i := range rapid.IntRange(1, 5).Draw(t, "claims") {
			c := claim{name: fmt.Sprint(i), each: expect.Resources("cpu", fmt.Sprint(rapid.IntRange(1, 3).Draw(t, "cpu")))}
			c.has = int32(rapid.IntRange(0, 12).Draw(t, "has"))
			needs[c.name] = int32(rapid.IntRange(0, 24).Draw(t, "needs"))
			c.want = max(c.has, needs[c.name])
			c.least = min(1, c.has)
			if rapid.IntRange(0, 3).Draw(t, "gang") == 0 {
				if c.whole = int32(rapid.IntRange(0, int(c.want)).Draw(t, "whole")); c.has >= c.whole {
					c.least = max(c.least, c.whole)
				}
			}
			c.floor = max(c.least, int32(rapid.IntRange(0, int(c.has)).Draw(t, "granted")))
			claims = append(claims, c)
		}
		shares := fairShares(limit, nil, claims)
		var used, kept int64
		for _, c := range claims {
			cpu := c.each.Cpu().Value()
			used, kept = used+cpu*int64(shares[c.name]), kept+cpu*int64(c.floor)
			if shares[c.name] < c.floor || shares[c.name] > c.want {
				t.Fatalf("%+v gets %d", c, shares[c.name])
			}
			if shares[c.name] < c.whole && shares[c.name] > c.floor {
				t.Fatalf("%+v gets %d, which is not the whole", c, shares[c.name])
			}
		}
		if used > max(most, kept) {
			t.Fatalf("%d of %d are given: %v", used, most, shares)
		}
		for _, c := range claims {
			notWhole := shares[c.name] < c.whole
			if !notWhole && shares[c.name] < c.want && used+c.each.Cpu().Value() <= most {
				t.Fatalf("%+v could have more than %d: %d of %d are given", c, shares[c.name], used, most)
			}
			for _, other := range claims {
				if !notWhole && shares[c.name] < c.want && other.each.Cpu().Equal(*c.each.Cpu()) && shares[other.name] > max(shares[c.name]+1, other.floor, other.whole) {
					t.Fatalf("%+v gets %d and %+v gets %d", c, shares[c.name], other, shares[other.name])
				}
			}
		}
		for i, c := range claims {
			share := shares[c.name]
			claims[i].has, claims[i].want = share, max(share, needs[c.name])
			if claims[i].least = min(1, share); share >= c.whole {
				claims[i].least = max(claims[i].least, c.whole)
			}
			claims[i].floor = max(c.floor, claims[i].least)
		}
		if again := fairShares(limit, nil, claims); !maps.Equal(again, shares) {
			t.Fatalf("%v is followed by %v", shares, again)
		}
	})
}
