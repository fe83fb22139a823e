package store

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

// Admit reserves a requester's place for a new Reservation until PutReservation adds it, or Unadmit
// gives the place back. limit is the maximum number of the requester, total of all.
func (s *Store) Admit(requester, name string, limit, total int) Admission {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := len(s.reservations.known)
	for _, creating := range s.creating {
		all += len(creating)
	}
	_, again := s.creating[requester][name]
	switch {
	case again:
	case len(s.byRequester[requester])+len(s.creating[requester]) >= limit:
		return QuotaReached
	case all >= total:
		return HubFull
	}
	s.creating.add(requester, name)
	return Admitted
}

// Unadmit gives back the place of a Reservation that is not being created any more.
func (s *Store) Unadmit(requester, name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.creating.remove(requester, name)
}
