package decide

import broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"

// Decision is the outcome of a request.
type Decision struct {
	// Cluster that was chosen; "" if not even one pod fits anywhere.
	Cluster string
	// Placement is what fits there; Complete whether that is all of the request.
	Placement broker.HeldCapacity
	Complete  bool
	// Decision explains the choice.
	broker.Decision
}

// Choose is the first choice of Split. An empty request chooses none.
func Choose(request Request, snapshot Snapshot) Decision {
	if request.Want.Empty() {
		return Decision{}
	}
	s := newSearch(request, snapshot)
	defer s.free()
	s.evaluate()
	s.compare()
	decision := Decision{Decision: s.report(nil)}
	decision.Scores = s.addScores(nil)
	if s.best >= 0 {
		decision.Cluster, decision.Placement, decision.Complete = s.id(s.best), s.placement(), s.complete
	}
	return decision
}
