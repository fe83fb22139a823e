package server

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"time"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/decide"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// maxExplaining is the number of decisions that are explained at the same time.
const maxExplaining = 2

// explanations bound what the callers cost who have decisions explained: each has one at
// a time, and waits for one of few slots.
type explanations struct {
	slots   chan struct{}
	mutex   sync.Mutex
	callers map[string]struct{}
}

func newExplanations() *explanations {
	return &explanations{slots: make(chan struct{}, maxExplaining), callers: map[string]struct{}{}}
}

// begin waits until the caller may have a decision explained. The caller calls end after
// that.
func (e *explanations) begin(ctx context.Context, caller string) (end func(), err error) {
	e.mutex.Lock()
	_, busy := e.callers[caller]
	e.callers[caller] = struct{}{}
	e.mutex.Unlock()
	if busy {
		return nil, slower(time.Second, "another decision is being explained to cluster %s", caller)
	}
	leave := func() {
		e.mutex.Lock()
		defer e.mutex.Unlock()
		delete(e.callers, caller)
	}
	select {
	case e.slots <- struct{}{}:
		return func() { <-e.slots; leave() }, nil
	case <-ctx.Done():
		leave()
		return nil, ctx.Err()
	}
}

// getDecision reports why each cluster that lends to the caller is not chosen for one of its
// reservations, and how many do not lend to it. It compares the reservation with all clusters.
func (s *Server) getDecision(w http.ResponseWriter, r *http.Request, caller string) error {
	rejections, err := s.explain(r, caller)
	if err != nil {
		return err
	}
	seen := decide.ForConsumer(&broker.Decision{Rejections: rejections})
	view := protocol.DecisionView{Rejections: seen.Rejections, RejectionCounts: seen.RejectionCounts}
	if view.Rejections == nil {
		view.Rejections = []broker.ClusterRejection{}
	}
	// The slot is free again: the caller may read slowly.
	return respond(w, http.StatusOK, view)
}

func (s *Server) explain(r *http.Request, caller string) ([]broker.ClusterRejection, error) {
	end, err := s.explaining.begin(r.Context(), caller)
	if err != nil {
		return nil, err
	}
	defer end()
	rejections, err := s.Reconciler.Explain(r.Context(), caller, r.PathValue("id"))
	if err != nil {
		return nil, fmt.Errorf("explaining the decision: %w", err)
	}
	return rejections, nil
}
