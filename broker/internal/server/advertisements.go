package server

import (
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"k8s.io/utils/clock"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// Receipts are the times at which this process last received each cluster's
// advertisement, by its own clock. They are kept in memory only: an unchanged
// advertisement is not written, and after a restart no cluster is fresh before its next
// advertisement.
type Receipts struct {
	clock clock.PassiveClock
	mutex sync.Mutex
	at    map[string]time.Time
}

// NewReceipts returns empty Receipts.
func NewReceipts(clock clock.PassiveClock) *Receipts {
	return &Receipts{clock: clock, at: map[string]time.Time{}}
}

// ReceivedAt reports when the cluster's advertisement was last received, if ever.
func (r *Receipts) ReceivedAt(cluster string) (at time.Time, received bool) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	at, received = r.at[cluster]
	return at, received
}

// forget drops the receipt of a cluster whose advertisement was deleted.
func (r *Receipts) forget(cluster string) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	delete(r.at, cluster)
}

// record records a receipt now; undo restores the one before.
func (r *Receipts) record(cluster string) (undo func()) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	before, known := r.at[cluster]
	now := r.clock.Now()
	r.at[cluster] = now
	return func() {
		r.mutex.Lock()
		defer r.mutex.Unlock()
		switch {
		case !r.at[cluster].Equal(now):
		case known:
			r.at[cluster] = before
		default:
			delete(r.at, cluster)
		}
	}
}

// advertisementTokens is what a call takes of the limit of advertisements: more for a
// large one, which costs more to decode and to store.
func advertisementTokens(r *http.Request) int {
	const each = 16 << 10
	switch {
	case r.ContentLength > protocol.MaxBody:
		return 1 // it is refused unread
	case r.ContentLength < 0:
		return protocol.MaxBody / each
	}
	return 1 + int(r.ContentLength/each)
}

func (s *Server) postAdvertisement(w http.ResponseWriter, r *http.Request, caller string) error {
	if err := s.admitAdvertisement(caller, advertisementTokens(r)); err != nil {
		return err
	}
	var spec broker.ClusterAdvertisementSpec
	if err := decode(r, &spec); err != nil {
		return err
	}
	if spec.ClusterID != caller {
		return refuse(protocol.CodeForbidden, "cluster %s cannot advertise for cluster %q: set clusterID to %s", caller, short(spec.ClusterID), caller)
	}
	if err := validateAdvertisement(&spec); err != nil {
		return err
	}
	// Before it is stored, because storing enqueues Reservations, for which the cluster
	// must be fresh.
	undo := s.Receipts.record(caller)
	err := s.Reconciler.StoreAdvertisement(r.Context(), spec)
	if outdated := (*protocol.OutdatedError)(nil); errors.As(err, &outdated) {
		undo()
		spec.Sequence = outdated.Latest
	} else if err != nil {
		undo()
		return fmt.Errorf("storing the advertisement of %s: %w", caller, err)
	}
	return respond(w, http.StatusOK, protocol.AdvertisementResponse{Sequence: spec.Sequence})
}

// postBeat receives an advertisement of which the broker has the content already.
func (s *Server) postBeat(w http.ResponseWriter, r *http.Request, caller string) error {
	if err := s.admitAdvertisement(caller, 1); err != nil {
		return err
	}
	var beat protocol.Beat
	if err := decode(r, &beat); err != nil {
		return err
	}
	undo := s.Receipts.record(caller)
	known, err := s.Reconciler.Beat(r.Context(), caller, beat)
	if !known || err != nil {
		undo()
	}
	if err != nil {
		return fmt.Errorf("comparing the advertisement of %s: %w", caller, err)
	}
	return respond(w, http.StatusOK, protocol.BeatResponse{Known: known})
}

// admitAdvertisement takes from the limit of advertisements, and counts one.
func (s *Server) admitAdvertisement(caller string, tokens int) error {
	if wait := s.advertisers.Take(caller, tokens); wait > 0 {
		return slower(wait, "cluster %s advertises too often (at most every 500 ms, and less often the larger its advertisements are)", caller)
	}
	advertisements.Inc()
	return nil
}

func (s *Server) listAdvertisements(w http.ResponseWriter, _ *http.Request, caller string) error {
	return respond(w, http.StatusOK, protocol.AdvertisementList{Items: s.index.Advertisements(caller)})
}

func (s *Server) getAdvertisement(w http.ResponseWriter, r *http.Request, caller string) error {
	view, visible := s.index.Advertisement(r.PathValue("id"), caller)
	if !visible {
		return refuse(protocol.CodeNotFound, "there is no advertisement of that cluster, or it does not lend to cluster %s", caller)
	}
	return respond(w, http.StatusOK, view)
}
