package kubelet

import (
	"math"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestCPUCounters(t *testing.T) {
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	at := func(seconds int) time.Time { return start.Add(time.Duration(seconds) * time.Second) }
	const window = 15 * time.Second
	for name, c := range map[string]struct {
		reason  string
		samples []sample
		want    float64
		wantAt  time.Time
	}{
		"First": {
			"an old container's first sample stands for its window alone",
			[]sample{{cores: 2, at: at(1000), window: window, started: at(0)}}, 30 + initialCPU, at(1000),
		},
		"FirstOfYoungContainer": {
			"a young container's first sample stands for its age, by which readers divide",
			[]sample{{cores: 2, at: at(20), window: window, started: at(0)}}, 40 + initialCPU, at(20),
		},
		"FirstWithoutStartTime": {
			"without a start time the first sample stands for its window",
			[]sample{{cores: 1, at: at(20), window: window}}, 15 + initialCPU, at(20),
		},
		"Next": {
			"the later sample's usage counts for the time between two samples",
			[]sample{{cores: 1, at: at(100), window: window}, {cores: 3, at: at(110), window: window}}, 15 + 30 + initialCPU, at(110),
		},
		"Repeated": {
			"frequent scrapes return the same sample",
			[]sample{{cores: 1, at: at(100), window: window}, {cores: 1, at: at(100), window: window}}, 15 + initialCPU, at(100),
		},
		"Older": {
			"an older sample changes nothing",
			[]sample{{cores: 1, at: at(100), window: window}, {cores: 9, at: at(90), window: window}}, 15 + initialCPU, at(100),
		},
		"Gap": {
			"the sample after a long gap counts for the gap, without its window",
			[]sample{{cores: 1, at: at(100), window: window}, {cores: 2, at: at(200), window: window}}, 15 + 200 + initialCPU, at(200),
		},
		"Restarted": {
			"the counter of a restarted container starts again",
			[]sample{{cores: 5, at: at(100), window: window, started: at(0)}, {cores: 1, at: at(220), window: window, started: at(210)}}, 10 + initialCPU, at(220),
		},
		"Idle": {
			"the counter of an idle container is not 0, which means not measured",
			[]sample{{at: at(100), window: window}}, initialCPU, at(100),
		},
		"Negative": {
			"negative usage is ignored",
			[]sample{{cores: 1, at: at(100), window: window}, {cores: -5, at: at(110), window: window}}, 15 + initialCPU, at(110),
		},
	} {
		t.Run(name, func(t *testing.T) {
			counters := newCPUCounters()
			var got reading
			for _, s := range c.samples {
				got = counters.add(container{pod: "p", name: "c"}, s)
			}
			if math.Abs(got.coreSeconds-c.want) > 1e-9 || !got.at.Equal(c.wantAt) {
				t.Errorf("%s: got %v at %v, want %v at %v", c.reason, got.coreSeconds, got.at, c.want, c.wantAt)
			}
		})
	}
}

// A container's counter does not decrease while the container exists; the total
// never decreases.
func TestCPUCountersAreMonotonic(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		counters := newCPUCounters()
		names := []string{"a", "b", "c"}
		last := map[container]reading{}
		var total float64
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			c := container{pod: "p", name: rapid.SampledFrom(names).Draw(t, "name")}
			if rapid.IntRange(0, 9).Draw(t, "act") == 0 {
				counters.retain(map[container]bool{c: true})
				for other := range last {
					if other != c {
						delete(last, other)
					}
				}
				continue
			}
			got := counters.add(c, sample{
				cores:  rapid.Float64Range(-1, 64).Draw(t, "cores"),
				at:     time.Unix(rapid.Int64Range(0, 1000).Draw(t, "at"), 0),
				window: time.Duration(rapid.IntRange(0, 60).Draw(t, "window")) * time.Second,
			})
			if got.coreSeconds < last[c].coreSeconds || got.at.Before(last[c].at) {
				t.Fatalf("%s decreased from %v to %v", c.name, last[c], got)
			}
			last[c] = got
			sum := counters.total().coreSeconds
			if sum < total {
				t.Fatalf("the total decreased from %v to %v", total, sum)
			}
			total = sum
		}
	})
}
