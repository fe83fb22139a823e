package store

import (
	"slices"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
)

// ErrUnwritable means that a ledger is too large to be written.
var ErrUnwritable = &ledger.FullError{Message: "The API server refused the cluster's ledger because of its size. It is tried again when the cluster's advertisement or its holds change."}

// Full are the clusters whose ledgers have no room for a hold of that capacity, and why. Those that hold capacity for it already are judged by the growth.
func (s *Store) Full(want broker.HeldCapacity, holders []string) map[string]capacity.Rejection {
	s.mu.Lock()
	defer s.mu.Unlock()
	full := map[string]capacity.Rejection{}
	for cluster, size := range s.crowded {
		if slices.Contains(holders, cluster) {
			continue
		}
		if err := size.Room(want); err != nil {
			full[cluster] = capacity.Rejection{Reason: ledger.ReasonFull, Message: err.Error()}
		}
	}
	for cluster := range s.unwritable {
		full[cluster] = capacity.Rejection{Reason: ledger.ReasonFull, Message: ErrUnwritable.Error()}
	}
	return full
}

// MarkUnwritable records that a ledger is too large to be written, unless the store knows
// a newer version than the one that was to be changed.
func (s *Store) MarkUnwritable(ad *broker.ClusterAdvertisement) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if known := s.advertisements.known[ad.Name]; known != nil && older(known, ad) {
		s.unwritable[ad.Name] = true
	}
}
