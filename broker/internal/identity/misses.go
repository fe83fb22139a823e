package identity

import (
	"maps"
	"sync"
	"time"
)

const (
	// missPeriod is the time for which a registration that did not match is not read live
	// again.
	missPeriod = 5 * time.Second
	// maxMisses is the maximum number of misses that are kept.
	maxMisses = 4096
)

// miss is a registration that did not exist with a key.
type miss struct{ clusterID, key string }

// misses are the recent ones, so that a revoked cluster does not cost a read of the API
// server with each of its calls.
type misses struct {
	mutex sync.Mutex
	at    map[miss]time.Time
}

func (m *misses) recent(of miss, now time.Time) bool {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	at, known := m.at[of]
	return known && now.Sub(at) < missPeriod
}

func (m *misses) add(of miss, now time.Time) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	if len(m.at) >= maxMisses {
		maps.DeleteFunc(m.at, func(_ miss, at time.Time) bool { return now.Sub(at) >= missPeriod })
	}
	if m.at == nil || len(m.at) >= maxMisses {
		m.at = map[miss]time.Time{}
	}
	m.at[of] = now
}

// forget removes the misses of a cluster that has joined.
func (m *misses) forget(clusterID string) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	maps.DeleteFunc(m.at, func(of miss, _ time.Time) bool { return of.clusterID == clusterID })
}
