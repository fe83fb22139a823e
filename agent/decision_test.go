package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestWriteDecision(t *testing.T) {
	var out strings.Builder
	expect.NoError(t, writeDecision(&out, protocol.DecisionView{
		Rejections:      []broker.ClusterRejection{{Cluster: "paris", Reason: "InsufficientCapacity", Message: "Insufficient cpu."}},
		RejectionCounts: []broker.RejectionCount{{Reason: "ConsumerNotAdmitted", Count: 3}},
	}, "rome"))
	const want = `CLUSTER    REASON                 MESSAGE
paris      InsufficientCapacity   Insufficient cpu.
(3 more)   ConsumerNotAdmitted    3 clusters do not offer capacity to rome (their values lend.enabled and lend.consumers).
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
}
