package server

import (
	"fmt"
	"net/http"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// getDecision reports why each cluster is not chosen for one of the caller's
// reservations. It compares the reservation with all clusters: one call at a time, so
// that callers cannot keep the broker from deciding.
func (s *Server) getDecision(w http.ResponseWriter, r *http.Request, caller string) error {
	rejections, err := s.explain(r, caller)
	if err != nil {
		return err
	}
	if rejections == nil {
		rejections = []broker.ClusterRejection{}
	}
	return respond(w, http.StatusOK, protocol.DecisionView{Rejections: rejections})
}

func (s *Server) explain(r *http.Request, caller string) ([]broker.ClusterRejection, error) {
	if !s.explaining.TryLock() {
		return nil, refuse(protocol.CodeTooMany, "another decision is being explained: retry after a second")
	}
	defer s.explaining.Unlock()
	rejections, err := s.Reconciler.Explain(r.Context(), caller, r.PathValue("id"))
	if err != nil {
		return nil, fmt.Errorf("explaining the decision: %w", err)
	}
	return rejections, nil
}
