package plan

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

func TestFiguresAreNotNews(t *testing.T) {
	status := broker.ReservationStatus{
		Phase: broker.ReservationPending, QueuePosition: 3,
		Conditions: []metav1.Condition{{Type: broker.ConditionQueued, Status: metav1.ConditionTrue, Reason: "InsufficientCapacity", Message: "available 3"}},
	}
	for name, tc := range map[string]struct {
		change func(*broker.ReservationStatus)
		want   bool
	}{
		"the position":          {func(s *broker.ReservationStatus) { s.QueuePosition = 2 }, true},
		"a message":             {func(s *broker.ReservationStatus) { s.Conditions[0].Message = "available 2" }, true},
		"the decision":          {func(s *broker.ReservationStatus) { s.Decision = &broker.Decision{} }, true},
		"a reason":              {func(s *broker.ReservationStatus) { s.Conditions[0].Reason = "WaitingForRelease" }, false},
		"a condition":           {func(s *broker.ReservationStatus) { s.Conditions[0].Status = metav1.ConditionFalse }, false},
		"the phase":             {func(s *broker.ReservationStatus) { s.Phase = broker.ReservationReserved }, false},
		"the end of the lease":  {func(s *broker.ReservationStatus) { s.ExpiresAt = ptr.To(metav1.Now()) }, false},
		"the allocated amounts": {func(s *broker.ReservationStatus) { s.Allocations = []broker.Allocation{{Cluster: "paris"}} }, false},
	} {
		after := *status.DeepCopy()
		tc.change(&after)
		if got := differInFiguresOnly(status, after); got != tc.want {
			t.Errorf("%s: figures only is %t", name, got)
		}
	}
}
