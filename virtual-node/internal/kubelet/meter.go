package kubelet

import (
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// leastCPU is where a container's counter begins, in core-seconds. What runs has
// used some CPU, and those who read the counters take 0 for "not measured" and
// drop the whole pod.
const leastCPU = 0.001

// container names one container of one incarnation of a pod.
type container struct {
	pod  types.UID
	name string
}

// sample is a mean use of CPU over a window.
type sample struct {
	// cores used on average over window, which ended at.
	cores  float64
	at     time.Time
	window time.Duration
	// started is when the container did; zero where that is not known.
	started time.Time
}

// reading is a counter as it stood at a time.
type reading struct {
	coreSeconds float64
	at          time.Time
}

// meter makes counters that only grow from samples of a rate. What a kubelet
// publishes are counters, and what the provider's metrics API gives are rates.
// Its counters begin anew with the process and with a container's restart, as
// those who read them expect of counters.
type meter struct {
	mutex    sync.Mutex
	counters map[container]counter
	// total of all that was ever added, those who are gone included.
	total reading
}

type counter struct {
	reading
	started time.Time
}

func newMeter() *meter { return &meter{counters: map[container]counter{}} }

// add counts a sample of c in and returns its counter. A sample that is not newer
// than the last adds nothing. Between the last and this one the container is taken
// to have used what it uses now, however long that was.
func (m *meter) add(c container, s sample) reading {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	last, known := m.counters[c]
	if known && !s.at.After(last.at) {
		return last.reading
	}
	var grown float64
	if known && s.started.Equal(last.started) {
		grown = max(0, s.cores) * s.at.Sub(last.at).Seconds()
	} else {
		grown = leastCPU + max(0, s.cores)*firstSpan(s).Seconds()
		last = counter{started: s.started}
	}
	last.coreSeconds += grown
	last.at = s.at
	m.counters[c] = last
	m.total.coreSeconds += grown
	if s.at.After(m.total.at) {
		m.total.at = s.at
	}
	return last.reading
}

// firstSpan is what the first sample of a container stands for: its window, or
// its whole life where that is not much longer, since those who read divide a
// young container's counter by its age.
func firstSpan(s sample) time.Duration {
	window := max(0, s.window)
	if s.started.IsZero() {
		return window
	}
	if age := s.at.Sub(s.started); age <= 2*window {
		return max(0, age)
	}
	return window
}

// keep forgets the counters of all containers but these.
func (m *meter) keep(these map[container]bool) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	for c := range m.counters {
		if !these[c] {
			delete(m.counters, c)
		}
	}
}

// all is the counter of everything together. Its time is zero before the first
// sample.
func (m *meter) all() reading {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	return m.total
}
