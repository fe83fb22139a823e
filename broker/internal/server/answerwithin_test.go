package server

import (
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestAnswerWithin: a provider learns how long the broker waits for its answer, as long as there
// is something to accept.
func TestAnswerWithin(t *testing.T) {
	pods := func(n int32) broker.HeldCapacity {
		return capacity.OfPodSets([]broker.PodSet{{Name: "pods", Count: n, Requests: broker.FromList(expect.Resources("cpu", "1m"))}})
	}
	granted := func(n int32) *broker.HeldCapacity { held := pods(n); return &held }
	for name, tc := range map[string]struct {
		configured time.Duration
		hold       broker.Hold
		want       time.Duration
	}{
		"the default":          {hold: broker.Hold{Promised: pods(1)}, want: 30 * time.Second},
		"configured":           {configured: 10 * time.Second, hold: broker.Hold{Promised: pods(1)}, want: 10 * time.Second},
		"many pods":            {configured: 10 * time.Second, hold: broker.Hold{Promised: pods(600)}, want: 30 * time.Second},
		"many are granted":     {configured: 10 * time.Second, hold: broker.Hold{Promised: pods(600), Granted: granted(500)}, want: 10 * time.Second},
		"all is granted":       {hold: broker.Hold{Promised: pods(2), Granted: granted(2)}},
		"less than is granted": {hold: broker.Hold{Promised: pods(1), Granted: granted(2)}},
		"to be released":       {hold: broker.Hold{Unconfirmed: granted(2)}},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMemory(t, logr.Discard())
			if tc.configured > 0 {
				m.Observe(&broker.BrokerConfig{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: configName}, Spec: broker.BrokerConfigSpec{ProofDeadline: &metav1.Duration{Duration: tc.configured}}}, false)
			}
			tc.hold.ReservationName, tc.hold.Requester = "r", "rome"
			advertisement := advertised("paris")
			advertisement.Status.Holds = []broker.Hold{tc.hold}
			m.Observe(advertisement, false)
			views := m.providerViews("paris", "r")
			var want *metav1.Duration
			if tc.want > 0 {
				want = &metav1.Duration{Duration: tc.want}
			}
			if diff := cmp.Diff(want, views[0].AnswerWithin); len(views) != 1 || diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
