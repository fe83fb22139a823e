package store

import (
	"maps"
	"time"
)

// admissionTTL is the time after which a creation that the watch has not shown does not
// count any more: the object was deleted before the watch saw it.
const admissionTTL = time.Minute

// Admission is why a new Reservation is admitted or not.
type Admission int

const (
	// Admitted means that it may be created.
	Admitted Admission = iota
	// QuotaReached means that the requester has as many as allowed.
	QuotaReached
	// HubFull means that all consumers together have as many as allowed.
	HubFull
)

// Admit reserves a requester's place for a new Reservation, which Unadmit gives back if
// it is not created. limit is the maximum number of the requester, total of all.
func (s *Store) Admit(requester, name string, limit, total int) Admission {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.clock.Now()
	pending := s.admitted[requester]
	maps.DeleteFunc(pending, func(_ string, at time.Time) bool { return now.Sub(at) >= admissionTTL })
	if _, again := pending[name]; !again {
		own, all := len(s.byRequester[requester])+len(pending), len(s.reservations.known)
		for _, of := range s.admitted {
			for _, at := range of {
				if now.Sub(at) < admissionTTL {
					all++
				}
			}
		}
		if own >= limit {
			return QuotaReached
		}
		if all >= total {
			return HubFull
		}
	}
	if pending == nil {
		pending = map[string]time.Time{}
		s.admitted[requester] = pending
	}
	pending[name] = now
	return Admitted
}

// Unadmit gives back the place of a Reservation that was not created.
func (s *Store) Unadmit(requester, name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.unadmitLocked(requester, name)
}

func (s *Store) unadmitLocked(requester, name string) {
	if delete(s.admitted[requester], name); len(s.admitted[requester]) == 0 {
		delete(s.admitted, requester)
	}
}
