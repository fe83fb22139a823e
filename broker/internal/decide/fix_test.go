package decide

import (
	"testing"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/answers"
)

// TestFixes: each reason that a consumer may see has a fix.
func TestFixes(t *testing.T) {
	for reason := range relevance {
		if got := capacity.Fix(reason); got == "" && reason != ReasonNotPreferred && reason != ReasonRequesterItself {
			t.Errorf("nothing is said about %s", reason)
		}
	}
	if capacity.Fix(answers.ReasonUnusable) == "" {
		t.Errorf("nothing is said about %s", answers.ReasonUnusable)
	}
	// Where a spread gives a domain no more, it is what the pods wait for: others are only full.
	if got := capacity.Closest([]broker.ClusterRejection{{Reason: capacity.ReasonInsufficientCapacity}, {Reason: ReasonShareLimited}}); got.Reason != ReasonShareLimited {
		t.Errorf("the closest is %+v, want that which the spread limits", got)
	}
	closest := capacity.Closest([]broker.ClusterRejection{{Cluster: "berlin", Reason: ReasonExcluded}, {Cluster: "oslo", Reason: capacity.ReasonInsufficientCapacity}, {Cluster: "paris", Reason: ReasonNotPreferred}})
	if closest.Cluster != "oslo" || capacity.Closest(nil) != nil {
		t.Errorf("the closest is %+v", closest)
	}
}
