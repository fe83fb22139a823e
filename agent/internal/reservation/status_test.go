package reservation

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// While a virtual node is resized, pods may use the capacity that it carries, and
// never more than is granted.
func TestUsableWhileResized(t *testing.T) {
	pods := func(n int32) []broker.PodSet { return []broker.PodSet{{Name: "pods", Count: n}} }
	for name, tc := range map[string]struct {
		granted    int32
		accepted   bool
		instructed int32
		ready      bool
		carried    int32
		usable     int32
	}{
		"no virtual node yet":        {granted: 5, accepted: true, instructed: 5},
		"resized":                    {granted: 5, accepted: true, instructed: 5, ready: true, carried: 5, usable: 5},
		"growing":                    {granted: 5, accepted: true, instructed: 5, carried: 3, usable: 3},
		"instruction is not updated": {granted: 5, accepted: true, instructed: 3, ready: true, carried: 3, usable: 3},
		"growth is not accepted":     {granted: 5, instructed: 10, ready: true, carried: 10},
		"shrinking":                  {granted: 2, accepted: true, instructed: 5, ready: true, carried: 5, usable: 2},
	} {
		t.Run(name, func(t *testing.T) {
			in := broker.ReservationInstruction{Spec: broker.ReservationInstructionSpec{TargetClusterID: "paris", PodSets: pods(tc.instructed), Attempt: 7}}
			if tc.carried > 0 {
				in.Status.Carried = &broker.HeldCapacity{PodSets: pods(tc.carried)}
			}
			if tc.ready {
				in.Status.ObservedAttempt = 7
				meta.SetStatusCondition(&in.Status.Conditions, metav1.Condition{
					Type: broker.ConditionVirtualNodeReady, Status: metav1.ConditionTrue, Reason: "Ready"})
			}
			view := &protocol.ConsumerView{ID: "rome-1", Status: broker.ReservationStatus{
				Allocations: []broker.Allocation{{Cluster: "paris", PodSets: pods(tc.granted), Accepted: tc.accepted}}}}
			status := computeStatus(&state{local: &broker.Reservation{}, view: view, instructions: []broker.ReservationInstruction{in}, now: time.Unix(1000, 0)})
			if got := status.Allocations[0].Usable(); got != tc.usable {
				t.Errorf("%d pods may use the capacity, want %d: %+v", got, tc.usable, status.Allocations[0])
			}
		})
	}
}

// The broker refuses a report with a longer summary, and the Reservation would never be
// Active.
func TestSummaryOfManyResources(t *testing.T) {
	spec := broker.ReservationSpec{RequestedResources: &broker.ResourceQuantities{Extended: map[corev1.ResourceName]resource.Quantity{}}}
	for i := range 40 {
		spec.RequestedResources.Extended[corev1.ResourceName(fmt.Sprintf("example.com/accelerator-%d", i))] = resource.MustParse("4")
	}
	if got := usedSummary(&spec, &broker.Use{}); len(got) > 512 || len(got) < 100 {
		t.Errorf("%d bytes: %s", len(got), got)
	}
}
