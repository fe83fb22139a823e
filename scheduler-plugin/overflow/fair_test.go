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
	cpus := func(name string, cpu string, has, want int32) claim {
		return claim{name: name, each: expect.Resources("cpu", cpu), has: has, want: want}
	}
	cases := map[string]struct {
		reason string
		limit  string
		others string
		claims []claim
		want   map[string]int32
	}{
		"enough for all":      {reason: "none is limited", limit: "10", claims: []claim{cpus("a", "1", 0, 3), cpus("b", "1", 0, 4)}, want: map[string]int32{"a": 3, "b": 4}},
		"one wants more":      {reason: "both get the same", limit: "10", claims: []claim{cpus("a", "1", 0, 1000), cpus("b", "1", 0, 1000)}, want: map[string]int32{"a": 5, "b": 5}},
		"one wants little":    {reason: "what it leaves is the other's", limit: "10", claims: []claim{cpus("a", "1", 0, 1000), cpus("b", "1", 0, 2)}, want: map[string]int32{"a": 8, "b": 2}},
		"left over":           {reason: "the first by name gets it", limit: "5", claims: []claim{cpus("b", "1", 0, 9), cpus("a", "1", 0, 9)}, want: map[string]int32{"a": 3, "b": 2}},
		"one has all already": {reason: "no count is lowered", limit: "10", claims: []claim{cpus("a", "1", 10, 20), cpus("b", "1", 0, 5)}, want: map[string]int32{"a": 10, "b": 0}},
		"one has more":        {reason: "the other catches up first", limit: "10", claims: []claim{cpus("a", "1", 6, 20), cpus("b", "1", 0, 20)}, want: map[string]int32{"a": 6, "b": 4}},
		"small and large":     {reason: "the small one takes what the large one cannot", limit: "10", claims: []claim{cpus("large", "4", 0, 9), cpus("small", "1", 0, 9)}, want: map[string]int32{"large": 2, "small": 2}},
		"others":              {reason: "what has no pending pods stays", limit: "10", others: "8", claims: []claim{cpus("a", "1", 0, 9), cpus("b", "1", 0, 9)}, want: map[string]int32{"a": 1, "b": 1}},
		"no limited resource": {reason: "it gets what it wants", limit: "0", claims: []claim{{name: "a", each: expect.Resources("memory", "1Gi"), want: 7}}, want: map[string]int32{"a": 7}},
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

// TestFairSharesHold: shares are between has and want, and fit the limit unless what they
// have exceeds it. None could grow, and none has two pods more than one of the same
// requests that wants more, unless it had them.
func TestFairSharesHold(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := int64(rapid.IntRange(0, 40).Draw(t, "limit"))
		var claims []claim
		for i := range rapid.IntRange(1, 5).Draw(t, "claims") {
			c := claim{name: fmt.Sprint(i), each: expect.Resources("cpu", fmt.Sprint(rapid.IntRange(1, 3).Draw(t, "cpu")))}
			c.has = int32(rapid.IntRange(0, 5).Draw(t, "has"))
			c.want = c.has + int32(rapid.IntRange(0, 12).Draw(t, "more"))
			claims = append(claims, c)
		}
		shares := fairShares(broker.ResourceQuantities{CPU: resource.NewQuantity(limit, resource.DecimalSI)}, nil, claims)
		var used, had int64
		for _, c := range claims {
			cpu := c.each.Cpu().Value()
			used, had = used+cpu*int64(shares[c.name]), had+cpu*int64(c.has)
			if shares[c.name] < c.has || shares[c.name] > c.want {
				t.Fatalf("%+v gets %d", c, shares[c.name])
			}
		}
		if used > max(limit, had) {
			t.Fatalf("%d of %d are given: %v", used, limit, shares)
		}
		for _, c := range claims {
			if shares[c.name] < c.want && used+c.each.Cpu().Value() <= limit {
				t.Fatalf("%+v could have more than %d: %d of %d are given", c, shares[c.name], used, limit)
			}
			for _, other := range claims {
				if shares[c.name] < c.want && other.each.Cpu().Equal(*c.each.Cpu()) && shares[other.name] > max(shares[c.name]+1, other.has) {
					t.Fatalf("%+v gets %d and %+v gets %d", c, shares[c.name], other, shares[other.name])
				}
			}
		}
	})
}
