package instruction

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestOutdatedViews checks which views of a broker that is behind are ignored, and that
// those of a restored hub are not ignored forever.
func TestOutdatedViews(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	view := func(attempt int64, pods int32) *protocol.ProviderView {
		v := &protocol.ProviderView{ID: "rome-1", Requester: "rome", Hold: broker.Hold{ReservationUID: "uid", Attempt: attempt}}
		if pods > 0 {
			v.Hold.Promised = capacity.OfPodSets([]broker.PodSet{{Name: "pods", Count: pods, Requests: broker.FromList(expect.Resources("cpu", "1"))}})
		}
		return v
	}
	carriedOut := func(v *protocol.ProviderView, enforced metav1.Condition) *broker.ProviderInstruction {
		in := &broker.ProviderInstruction{ObjectMeta: objectMeta("default", v.ID), Spec: providerInstructionSpec(v)}
		enforced.Type = broker.ConditionEnforced
		in.Status.ObservedAttempt, in.Status.Conditions = v.Hold.Attempt, []metav1.Condition{enforced}
		return in
	}
	accepted := carriedOut(view(5, 2), metav1.Condition{Status: metav1.ConditionTrue})
	released := carriedOut(view(5, 0), metav1.Condition{Status: metav1.ConditionFalse, Reason: broker.ReasonReleased})
	undecided := carriedOut(view(5, 2), metav1.Condition{Status: metav1.ConditionUnknown})
	// The broker does not say any more how long it waits.
	asked := accepted.DeepCopy()
	asked.Spec.AnswerWithin = &metav1.Duration{Duration: 30 * time.Second}
	for name, tc := range map[string]struct {
		existing, removed *broker.ProviderInstruction
		view              *protocol.ProviderView
		outdated          bool
	}{
		"new":                                  {view: view(1, 2)},
		"the next attempt":                     {existing: accepted, view: view(6, 3)},
		"the same attempt":                     {existing: accepted, view: view(5, 2)},
		"an earlier attempt":                   {existing: accepted, view: view(4, 3), outdated: true},
		"an earlier release":                   {existing: accepted, view: view(4, 0), outdated: true},
		"an earlier attempt, the same content": {existing: accepted, view: view(4, 2)},
		"one that is accepted since":           {existing: asked, view: view(4, 2)},
		"a hold that was released":             {removed: released, view: view(4, 2), outdated: true},
		"a release that was confirmed":         {removed: released, view: view(5, 0)},
		"placed again after its release":       {removed: released, view: view(6, 2)},
		"removed before it was decided":        {removed: undecided, view: view(5, 2)},
	} {
		t.Run(name, func(t *testing.T) {
			var o outdated
			if tc.removed != nil {
				o.removed(tc.removed, now)
			}
			wait := o.wait(tc.existing, tc.view, now)
			if (wait > 0) != tc.outdated || wait > outdatedRetention {
				t.Fatalf("it is ignored for %s", wait)
			}
			if left := o.wait(tc.existing, tc.view, now.Add(outdatedRetention)); left != 0 {
				t.Errorf("a view that stays is ignored for %s more", left)
			}
		})
	}
}
