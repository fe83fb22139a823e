package kubelet

import (
	"maps"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// initialCPU is the first value of a container's counter, in core-seconds. Readers
// such as metrics-server take 0 for "not measured" and drop the pod.
const initialCPU = 0.001

// container identifies a container of a pod.
type container struct {
	pod  types.UID
	name string
}

// sample is the average CPU usage over a window.
type sample struct {
	// cores is the average usage over window, which ended at.
	cores  float64
	at     time.Time
	window time.Duration
	// started is when the container started; zero if unknown.
	started time.Time
}

// reading is the value of a counter at a time.
type reading struct {
	coreSeconds float64
	at          time.Time
}

// cpuCounters integrates samples of CPU usage, which is what the provider's metrics
// API serves, into monotonic counters, which is what a kubelet serves. Counters
// start again with this program and with the container, as readers expect.
type cpuCounters struct {
	mu       sync.Mutex
	counters map[container]counter
	// sum includes deleted containers.
	sum reading
}

type counter struct {
	reading
	started time.Time
}

func newCPUCounters() *cpuCounters { return &cpuCounters{counters: map[container]counter{}} }

// add adds a sample and returns the container's counter. The usage since the
// previous sample is assumed to be that of the new one. A sample that is not newer
// adds nothing.
func (c *cpuCounters) add(id container, s sample) reading {
	c.mu.Lock()
	defer c.mu.Unlock()
	last, known := c.counters[id]
	if known && !s.at.After(last.at) {
		return last.reading
	}
	var increase float64
	if known && s.started.Equal(last.started) {
		increase = max(0, s.cores) * s.at.Sub(last.at).Seconds()
	} else {
		increase = initialCPU + max(0, s.cores)*firstPeriod(s).Seconds()
		last = counter{started: s.started}
	}
	last.coreSeconds += increase
	last.at = s.at
	c.counters[id] = last
	c.sum.coreSeconds += increase
	if s.at.After(c.sum.at) {
		c.sum.at = s.at
	}
	return last.reading
}

// firstPeriod returns the period that a container's first sample stands for: its
// window, or the container's age if that is at most twice the window, since readers
// divide the counter of a young container by its age.
func firstPeriod(s sample) time.Duration {
	window := max(0, s.window)
	if s.started.IsZero() {
		return window
	}
	if age := s.at.Sub(s.started); age <= 2*window {
		return max(0, age)
	}
	return window
}

// retain deletes the counters of all other containers.
func (c *cpuCounters) retain(containers map[container]bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	maps.DeleteFunc(c.counters, func(id container, _ counter) bool { return !containers[id] })
}

// total returns the counter of all containers; its time is zero before the first
// sample.
func (c *cpuCounters) total() reading {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sum
}
