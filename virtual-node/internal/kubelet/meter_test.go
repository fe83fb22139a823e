package kubelet

import (
	"math"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestMeterCountsWhatSamplesStandFor(t *testing.T) {
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
			[]sample{{cores: 2, at: at(1000), window: window, started: at(0)}}, 30 + leastCPU, at(1000),
		},
		"FirstOfYoung": {
			"a young container's first sample stands for its life, by which readers divide",
			[]sample{{cores: 2, at: at(20), window: window, started: at(0)}}, 40 + leastCPU, at(20),
		},
		"FirstOfUnknownAge": {
			"where the start is not known the window is all there is",
			[]sample{{cores: 1, at: at(20), window: window}}, 15 + leastCPU, at(20),
		},
		"Next": {
			"the time between two samples counts at the later one's rate",
			[]sample{{cores: 1, at: at(100), window: window}, {cores: 3, at: at(110), window: window}}, 15 + 30 + leastCPU, at(110),
		},
		"Repeated": {
			"who scrapes often sees one sample several times",
			[]sample{{cores: 1, at: at(100), window: window}, {cores: 1, at: at(100), window: window}}, 15 + leastCPU, at(100),
		},
		"Older": {
			"a sample from before the last adds nothing and takes nothing back",
			[]sample{{cores: 1, at: at(100), window: window}, {cores: 9, at: at(90), window: window}}, 15 + leastCPU, at(100),
		},
		"Gap": {
			"a long gap counts at the rate seen after it, and no window on top",
			[]sample{{cores: 1, at: at(100), window: window}, {cores: 2, at: at(200), window: window}}, 15 + 200 + leastCPU, at(200),
		},
		"Restarted": {
			"a container that began again counts from the start",
			[]sample{{cores: 5, at: at(100), window: window, started: at(0)}, {cores: 1, at: at(220), window: window, started: at(210)}}, 10 + leastCPU, at(220),
		},
		"Idle": {
			"the counter of an idle container is not 0, which readers take for not measured",
			[]sample{{at: at(100), window: window}}, leastCPU, at(100),
		},
		"Negative": {
			"a rate below 0 is nonsense and takes nothing back",
			[]sample{{cores: 1, at: at(100), window: window}, {cores: -5, at: at(110), window: window}}, 15 + leastCPU, at(110),
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMeter()
			var got reading
			for _, s := range c.samples {
				got = m.add(container{pod: "p", name: "c"}, s)
			}
			if math.Abs(got.coreSeconds-c.want) > 1e-9 || !got.at.Equal(c.wantAt) {
				t.Errorf("%s: got %v at %v, want %v at %v", c.reason, got.coreSeconds, got.at, c.want, c.wantAt)
			}
		})
	}
}

// Whatever is sampled, a container's counter never shrinks within its life, and
// the total never at all, pods that go included.
func TestMeterOnlyGrows(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newMeter()
		names := []string{"a", "b", "c"}
		last := map[container]reading{}
		var total float64
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			c := container{pod: "p", name: rapid.SampledFrom(names).Draw(t, "name")}
			if rapid.IntRange(0, 9).Draw(t, "act") == 0 {
				m.keep(map[container]bool{c: true})
				for other := range last {
					if other != c {
						delete(last, other)
					}
				}
				continue
			}
			got := m.add(c, sample{
				cores:  rapid.Float64Range(-1, 64).Draw(t, "cores"),
				at:     time.Unix(rapid.Int64Range(0, 1000).Draw(t, "at"), 0),
				window: time.Duration(rapid.IntRange(0, 60).Draw(t, "window")) * time.Second,
			})
			if got.coreSeconds < last[c].coreSeconds || got.at.Before(last[c].at) {
				t.Fatalf("%s went from %v to %v", c.name, last[c], got)
			}
			last[c] = got
			if all := m.all(); all.coreSeconds < total {
				t.Fatalf("the total went from %v to %v", total, all.coreSeconds)
			} else {
				total = all.coreSeconds
			}
		}
	})
}
