package server

import (
	"errors"
	"fmt"
	"net/http"

	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

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

// advertisementBody is an advertisement that may say nothing of lending.
type advertisementBody struct {
	broker.ClusterAdvertisementSpec
	Lending *broker.Lending `json:"lending"`
}

func (s *Server) postAdvertisement(w http.ResponseWriter, r *http.Request, caller string) error {
	if err := s.admitAdvertisement(caller, advertisementTokens(r)); err != nil {
		return err
	}
	var body advertisementBody
	if err := decode(r, &body); err != nil {
		return err
	}
	spec := body.ClusterAdvertisementSpec
	// As the API server's default.
	spec.Lending = ptr.Deref(body.Lending, broker.Lending{Enabled: true})
	if spec.ClusterID != caller {
		return refuse(protocol.CodeForbidden, "cluster %s cannot advertise for cluster %q: set clusterID to %s", caller, short(spec.ClusterID), caller)
	}
	if err := validateAdvertisement(&spec); err != nil {
		return err
	}
	err := s.Reconciler.StoreAdvertisement(r.Context(), spec)
	if outdated := (*protocol.OutdatedError)(nil); errors.As(err, &outdated) {
		spec.Sequence = outdated.Latest
	} else if err != nil {
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
	return respond(w, http.StatusOK, protocol.BeatResponse{Known: s.Reconciler.Beat(caller, beat)})
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
	return respond(w, http.StatusOK, protocol.AdvertisementList{Items: s.views.Advertisements(caller)})
}

func (s *Server) getAdvertisement(w http.ResponseWriter, r *http.Request, caller string) error {
	view, visible := s.views.Advertisement(r.PathValue("id"), caller)
	if !visible {
		return refuse(protocol.CodeNotFound, "there is no advertisement of that cluster, or it does not lend to cluster %s", caller)
	}
	return respond(w, http.StatusOK, view)
}
