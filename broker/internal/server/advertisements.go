package server

import (
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// Receipts says when each cluster's advertisement was last received, by this
// process's clock. They are kept in memory only: one of the same content costs
// no write, and after a restart nobody counts as fresh until heard of.
type Receipts struct {
	clock clock.PassiveClock
	mutex sync.Mutex
	at    map[string]time.Time
}

// NewReceipts makes Receipts without any.
func NewReceipts(clock clock.PassiveClock) *Receipts {
	return &Receipts{clock: clock, at: map[string]time.Time{}}
}

// ReceivedAt is when cluster's advertisement was last received, if it was.
func (r *Receipts) ReceivedAt(cluster string) (time.Time, bool) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	at, known := r.at[cluster]
	return at, known
}

// note records a receipt now. Undo takes it back.
func (r *Receipts) note(cluster string) (undo func()) {
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

func (s *Server) postAdvertisement(w http.ResponseWriter, r *http.Request, caller string) error {
	var spec broker.ClusterAdvertisementSpec
	if err := decode(w, r, &spec); err != nil {
		return err
	}
	if spec.ClusterID != caller {
		return refuse(protocol.CodeForbidden, "cluster %s cannot advertise for %q: clusterID must be its own", caller, bounded(spec.ClusterID))
	}
	if err := checkOffer(&spec); err != nil {
		return err
	}
	// Before it is stored, because storing wakes reservations that wait for
	// somebody fresh.
	undo := s.Receipts.note(caller)
	if err := s.Core.StoreAdvertisement(r.Context(), spec); err != nil {
		undo()
		return fmt.Errorf("storing the advertisement of %s: %w", caller, err)
	}
	return respond(w, http.StatusOK, protocol.AdvertisementResponse{Sequence: spec.Sequence})
}

func (s *Server) listAdvertisements(w http.ResponseWriter, r *http.Request, caller string) error {
	var list broker.ClusterAdvertisementList
	if err := s.client.List(r.Context(), &list, client.InNamespace(s.Namespace)); err != nil {
		return fmt.Errorf("listing advertisements: %w", err)
	}
	answer := protocol.AdvertisementList{Items: []protocol.AdvertisementView{}}
	for i := range list.Items {
		answer.Items = append(answer.Items, advertisementView(&list.Items[i], caller))
	}
	return respond(w, http.StatusOK, answer)
}

func (s *Server) getAdvertisement(w http.ResponseWriter, r *http.Request, caller string) error {
	var advertisement broker.ClusterAdvertisement
	if err := s.client.Get(r.Context(), s.key(r.PathValue("id")), &advertisement); err != nil {
		return fmt.Errorf("reading an advertisement: %w", err)
	}
	return respond(w, http.StatusOK, advertisementView(&advertisement, caller))
}

// advertisementView leaves out of an advertisement, in place, what others hold
// there.
func advertisementView(advertisement *broker.ClusterAdvertisement, caller string) protocol.AdvertisementView {
	view := protocol.AdvertisementView{Spec: advertisement.Spec, Status: advertisement.Status}
	if advertisement.Spec.ClusterID != caller {
		view.Spec.ObservedHolds = slices.DeleteFunc(view.Spec.ObservedHolds, func(hold broker.ObservedHold) bool { return hold.Requester != caller })
		view.Status.Holds = slices.DeleteFunc(view.Status.Holds, func(hold broker.Hold) bool { return hold.Requester != caller })
	}
	return view
}

func (s *Server) key(name string) client.ObjectKey {
	return client.ObjectKey{Namespace: s.Namespace, Name: name}
}
