package answers

import (
	"maps"
	"math"
	"time"
)

// recordHalfLife is the time after which a promise counts half as much in a Record, recordedFor that
// after the last one in which there is a Record.
const recordHalfLife, recordedFor = time.Hour, 24 * time.Hour

// Record is how many of its promises a provider has kept of late: what it accepted counts as one
// that is kept, until it is withdrawn; what it refused, withdrew or did not answer as one that is not.
type Record struct {
	promised, kept float64
	// at is the time of the last one.
	at time.Time
}

// Share of the promises that are kept, 1 without any.
func (r Record) Share() float64 {
	if r.promised == 0 {
		return 1
	}
	return r.kept / r.promised
}

// Reliability is the share if one more is kept: a single failure says little, and less as time
// passes.
func (r Record) Reliability() float64 { return (r.kept + 1) / (r.promised + 1) }

// with is the record at a later time.
func (r Record) with(now time.Time) Record {
	if passed := now.Sub(r.at); passed > 0 {
		left := math.Exp2(-passed.Hours() / recordHalfLife.Hours())
		r.promised, r.kept, r.at = r.promised*left, r.kept*left, now
	}
	return r
}

// broken is the record without a promise that was kept: it counts as another one, that is not.
func (r Record) broken() Record {
	gone := min(r.kept, 1)
	r.promised, r.kept = r.promised-gone, r.kept-gone
	return r
}

// record counts a promise. The caller holds the lock.
func (m *Memory) record(cluster string, kept bool, now time.Time) {
	r := m.records[cluster].with(now)
	r.promised++
	if kept {
		r.kept++
	}
	m.records[cluster] = r
}

// Records are those of all providers that were asked of late.
func (m *Memory) Records(now time.Time) map[string]Record {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	records := make(map[string]Record, len(m.records))
	maps.DeleteFunc(m.records, func(_ string, r Record) bool { return now.Sub(r.at) >= recordedFor })
	for cluster, r := range m.records {
		records[cluster] = r.with(now)
	}
	return records
}
