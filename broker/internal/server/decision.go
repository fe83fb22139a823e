package server

import (
	"fmt"
	"net/http"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/decide"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// getDecision reports why each cluster that lends to the caller is not chosen for one of its
// reservations, and how many do not lend to it. It compares the reservation with all clusters.
func (s *Server) getDecision(w http.ResponseWriter, r *http.Request, caller string) error {
	rejections, err := s.Reconciler.Explain(r.Context(), caller, r.PathValue("id"))
	if err != nil {
		return fmt.Errorf("explaining the decision: %w", err)
	}
	seen := decide.ForConsumer(&broker.Decision{Rejections: rejections})
	view := protocol.DecisionView{Rejections: seen.Rejections, RejectionCounts: seen.RejectionCounts}
	if view.Rejections == nil {
		view.Rejections = []broker.ClusterRejection{}
	}
	return respond(w, http.StatusOK, view)
}
