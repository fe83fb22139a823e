package store

import "time"

// Receipt is when this process last received a cluster's advertisement or a beat, by its own
// clock; zero if it has received none, as after a restart.
type Receipt struct {
	At time.Time
	// Sequence is the highest of those that were received, including those that were not
	// written.
	Sequence int64
}

// Receipt of a cluster.
func (s *Store) Receipt(cluster string) Receipt {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.receipts[cluster]
}

// Receive records that a cluster is heard now, with a sequence, and returns the receipts before
// and after that.
func (s *Store) Receive(cluster string, sequence int64) (before, now Receipt) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before = s.receipts[cluster]
	now = Receipt{At: s.clock.Now(), Sequence: max(before.Sequence, sequence)}
	s.receipts[cluster] = now
	return before, now
}

// Unreceive restores the receipt before another one, if no later one has replaced that.
func (s *Store) Unreceive(cluster string, before, now Receipt) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.receipts[cluster] != now:
	case before.At.IsZero():
		delete(s.receipts, cluster)
	default:
		s.receipts[cluster] = before
	}
}
