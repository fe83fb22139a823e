package server

import (
	"context"
	"net/http"

	"k8s.io/apimachinery/pkg/api/meta"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// codeOK is the outcome of a call without refusal, in logs and metrics.
const codeOK = "OK"

// auditKey is the key of a call's details in its context.
type auditKey struct{}

// withAudit returns the request with room for details of the audit log.
func withAudit(r *http.Request) (*http.Request, *[]any) {
	details := &[]any{}
	return r.WithContext(context.WithValue(r.Context(), auditKey{}, details)), details
}

// audit adds keys and values to the audit log's line of a call.
func audit(r *http.Request, keysAndValues ...any) {
	if details, ok := r.Context().Value(auditKey{}).(*[]any); ok {
		*details = append(*details, keysAndValues...)
	}
}

// auditCall logs who called and the outcome. Calls that a cluster repeats at a high rate
// are logged only when they are refused, and those over the rate limit with low priority.
func (s *Server) auditCall(route route, r *http.Request, caller string, details []any, refusal *protocol.Error) {
	if refusal == nil && route.frequent && !s.Log.V(1).Enabled() {
		return // as most calls: the logger for it is not free
	}
	log := s.Log.WithName("audit").WithValues("cluster", caller, "call", route.method+" "+route.path)
	if id := r.PathValue("id"); id != "" {
		log = log.WithValues("id", short(id))
	}
	if role := r.URL.Query().Get("role"); role != "" {
		log = log.WithValues("role", short(role))
	}
	log = log.WithValues(details...)
	switch {
	case refusal == nil && route.frequent:
		log.V(1).Info("Call", "outcome", codeOK)
	case refusal == nil:
		log.Info("Call", "outcome", codeOK)
	case refusal.Code == protocol.CodeTooMany, refusal.Code == protocol.CodeUnavailable:
		log.V(1).Info("Call", "outcome", refusal.Code, "reason", refusal.Message)
	default:
		log.Info("Call", "outcome", refusal.Code, "reason", refusal.Message)
	}
}

// auditPhase logs on the leader that a Reservation entered a phase: who asked, where it
// is placed, why, at what price, and until when.
func (s *Server) auditPhase(before, now *broker.Reservation) {
	if now == nil {
		return
	}
	// One that is being deleted is released, whether or not its status is written.
	status := now.EffectiveStatus()
	if before != nil && before.EffectiveStatus().Phase == status.Phase || status.Phase == "" || s.Ready(nil) != nil {
		return
	}
	log := s.Log.WithName("audit").WithValues("cluster", now.Spec.RequesterID, "id", now.Name, "phase", status.Phase)
	if name := now.Annotations[broker.LabelSourceName]; name != "" {
		log = log.WithValues("sourceNamespace", now.Annotations[broker.LabelSourceNamespace], "sourceName", name)
	}
	type placement struct {
		Provider     string `json:"provider"`
		Pods         int32  `json:"pods"`
		PricePerHour string `json:"pricePerHour,omitempty"`
		Score        string `json:"score,omitempty"`
	}
	scores := map[string]string{}
	if status.Decision != nil {
		for _, score := range status.Decision.Scores {
			scores[score.Cluster] = score.Score
		}
	}
	var placements []placement
	for _, allocation := range status.Allocations {
		placements = append(placements, placement{allocation.Cluster, broker.HeldCapacity{PodSets: allocation.PodSets}.Pods(), allocation.PricePerHour, scores[allocation.Cluster]})
	}
	log = log.WithValues("placements", placements)
	if ready := meta.FindStatusCondition(status.Conditions, broker.ConditionReady); ready != nil {
		log = log.WithValues("reason", ready.Reason, "message", ready.Message)
	}
	if status.ExpiresAt != nil {
		log = log.WithValues("expiresAt", status.ExpiresAt)
	}
	log.Info("Reservation")
}
