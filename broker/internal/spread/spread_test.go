package spread

import (
	"testing"

	"pgregory.net/rapid"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// TestFill: up to how many pods domains get.
func TestFill(t *testing.T) {
	full := func(held, room int64) Domain { return Domain{Held: held, Room: room, Counts: true} }
	for name, c := range map[string]struct {
		domains []Domain
		pods    int64
		maxSkew int32
		want    int64
	}{
		"evenly":                     {[]Domain{full(0, 9), full(0, 9), full(0, 9)}, 6, 1, 2},
		"with a rest":                {[]Domain{full(0, 9), full(0, 9), full(0, 9)}, 7, 1, 3},
		"beside what is held":        {[]Domain{full(5, 9), full(0, 9), full(1, 9)}, 3, 1, 2},
		"one is full":                {[]Domain{full(0, 9), full(0, 2)}, 9, 1, 3},
		"one is full, and more skew": {[]Domain{full(0, 9), full(0, 2)}, 9, 4, 6},
		"one without room":           {[]Domain{full(0, 9), full(0, 0)}, 9, 1, 1},
		"one that does not count":    {[]Domain{full(0, 9), {}}, 9, 1, 9},
		"a single one":               {[]Domain{full(2, 9)}, 4, 1, 6},
		"nothing":                    {[]Domain{full(2, 9)}, 0, 1, 0},
		"none":                       {nil, 4, 1, 4},
	} {
		d := Division{Spread: broker.Spread{MaxSkew: c.maxSkew}, Domains: c.domains}
		if d.Fill(c.pods); d.level != c.want {
			t.Errorf("%s: up to %d, want %d", name, d.level, c.want)
		}
	}
}

// TestFillAsOneByOne: the domains get what they would get if each pod went to the one that has fewest, as
// long as it stays within maxSkew of those that count: first those, then others.
func TestFillAsOneByOne(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		d := Division{Spread: broker.Spread{MaxSkew: rapid.Int32Range(1, 3).Draw(t, "max skew")}}
		for range rapid.IntRange(1, 5).Draw(t, "domains") {
			domain := Domain{Held: rapid.Int64Range(0, 5).Draw(t, "held"), Room: rapid.Int64Range(0, 5).Draw(t, "room")}
			domain.Counts = rapid.IntRange(0, 3).Draw(t, "counts") > 0
			d.Domains = append(d.Domains, domain)
		}
		pods := rapid.Int64Range(0, 20).Draw(t, "pods")
		want := make([]int64, len(d.Domains))
		placed, counting := int64(0), true
		for placed < pods {
			fewest, least := -1, int64(1<<30)
			for i, domain := range d.Domains {
				if domain.Counts == counting && want[i] < domain.Room && (fewest < 0 || domain.Held+want[i] < d.Domains[fewest].Held+want[fewest]) {
					fewest = i
				}
				if domain.Counts {
					least = min(least, domain.Held+want[i])
				}
			}
			if fewest < 0 || d.Domains[fewest].Held+want[fewest]+1 > least+int64(d.MaxSkew) {
				if !counting {
					break
				}
				counting = false
				continue
			}
			want[fewest]++
			placed++
		}
		d.Fill(pods)
		takes := int64(0)
		for i := range d.Domains {
			share := min(d.Share(&d.Domains[i]), d.Domains[i].Room)
			if takes += share; share < want[i] || share > want[i]+1 || share > want[i] && placed < pods {
				t.Fatalf("domain %d of %+v gets %d of %d pods, want %d, with a maxSkew of %d", i, d.Domains, share, pods, want[i], d.MaxSkew)
			}
		}
		if takes < placed || takes > placed && placed < pods {
			t.Fatalf("%+v take %d of %d pods, want %d", d.Domains, takes, pods, placed)
		}
	})
}
