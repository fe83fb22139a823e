package hold_test

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/discovery"

	"github.com/spillway-dev/spillway/agent/internal/hold/verdict"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/guest"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/e2e/playground/cluster"
)

// TestWrites counts what the API server writes for each guest from its hold until it is
// bound, and when a hold grows. For one guest:
//
//	POST pods, POST pods/binding, POST events   its placeholder: agent, scheduler, scheduler
//	POST pods                                   the guest: the consumer's virtual node
//	PATCH pods/status                           its nomination, which keeps the place: agent
//	DELETE pods                                 its placeholder: agent
//	PATCH pods                                  its scheduling gate: agent
//	POST pods/binding, POST events              the guest: scheduler
//
// A kubelet, which there is none here, adds the status of both pods.
func TestWrites(t *testing.T) {
	const guests, grown = 40, 50
	e := startPlaces(t, true)
	e.amd64("a", expect.Resources("cpu", fmt.Sprintf("%dm", grown*100), "memory", "8Gi"))
	api := discovery.NewDiscoveryClientForConfigOrDie(e.config).RESTClient()
	count := func() cluster.Counts {
		writes, err := cluster.Writes(e.Context(), api, "pods", "events")
		expect.NoError(e, err)
		return writes
	}
	expectAtMost := func(what string, before cluster.Counts, want cluster.Counts) {
		e.Helper()
		writes := count().Minus(before)
		for name, n := range writes {
			if n > want[name] {
				e.Errorf("%s: %v %s, want at most %v", what, n, name, want[name])
			}
		}
		e.Logf("%s: %v writes: %v", what, writes.Sum(), writes)
	}
	// A dry run, the event of the hold, and what a busy machine may make a few of them repeat:
	// far less than one more write for each guest.
	const others = guests / 4
	before := count()
	e.hold("r1", "rome", 1, pods(set("pods", guests, expect.Resources("cpu", "100m"))))
	e.decided("r1", 1, verdict.ReasonAccepted, "", guests)
	expectAtMost("a hold", before, cluster.Counts{"POST pods": guests + others, "POST pods/binding": guests + others, "POST events": guests + others})

	before = count()
	for i := range guests {
		e.pod("guests-of-rome", fmt.Sprintf("g%d", i), "100m", func(s *corev1.PodSpec) {
			s.PriorityClassName = guest.PriorityClass
			s.SchedulingGates = []corev1.PodSchedulingGate{{Name: broker.GateHandOver}}
		})
	}
	e.eventuallyBound("guests-of-rome", guests)
	e.eventuallyBound(holds, 0)
	expectAtMost("hand-overs", before, cluster.Counts{
		"POST pods": guests + others, "PATCH pods/status": guests + others, "DELETE pods": guests + others, "PATCH pods": guests + others,
		"POST pods/binding": guests + others, "POST events": 2*guests + others,
	})

	before = count()
	e.hold("r1", "rome", 2, pods(set("pods", grown, expect.Resources("cpu", "100m"))))
	e.decided("r1", 2, verdict.ReasonAccepted, "", grown)
	e.eventuallyBound(holds, grown-guests)
	const more = grown - guests
	expectAtMost("growth", before, cluster.Counts{
		"POST pods": more + others, "POST pods/binding": more + others, "POST events": more + guests + others,
	})
	if most := e.inFlight.most.Load(); most < 2 || most > 16 {
		e.Errorf("the agent had up to %d writes in flight, want some at a time, and at most 16", most)
	}
}
