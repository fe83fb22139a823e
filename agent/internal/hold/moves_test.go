package hold_test

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/hold"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/guest"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// The broker waits for decisions: guests that wait for their places do not delay them.
func TestMoves(t *testing.T) {
	const guests = 100
	e := startPlaces(t, true)
	for _, node := range []string{"a", "b"} {
		e.amd64(node, expect.Resources("cpu", "2", "memory", "8Gi"))
	}
	e.hold("r1", "rome", 1, pods(set("pods", guests+1, expect.Resources("cpu", "10m"))))
	e.decided("r1", 1, hold.ReasonAccepted, "", guests+1)
	waits := func(s *corev1.PodSpec) {
		s.PriorityClassName = guest.PriorityClass
		s.SchedulingGates = []corev1.PodSchedulingGate{{Name: broker.GateHandOver}}
	}
	nominates := func(r *http.Request) bool {
		return r.Method == http.MethodPatch && strings.HasPrefix(r.URL.Path, "/api/v1/namespaces/guests-of-rome/pods/") && strings.HasSuffix(r.URL.Path, "/status")
	}

	failing := func(r *http.Request) error {
		if nominates(r) {
			return errors.New("no connection")
		}
		return nil
	}
	e.inFlight.before.Store(&failing)
	e.pod("guests-of-rome", "fails", "10m", waits)
	e.hold("r2", "rome", 1, pods(set("pods", 1, expect.Resources("cpu", "20m"))))
	e.decided("r2", 1, hold.ReasonAccepted, "", 1)
	e.inFlight.before.Store(nil)
	e.eventuallyBound("guests-of-rome", 1)

	released, nominated, before := make(chan struct{}), atomic.Int64{}, atomic.Int64{}
	counting := func(r *http.Request) error {
		switch {
		case nominates(r):
			<-released
			nominated.Add(1)
		case r.Method == http.MethodPost && r.URL.Path == "/api/v1/namespaces/"+holds+"/pods":
			before.CompareAndSwap(0, nominated.Load())
		}
		return nil
	}
	e.inFlight.before.Store(&counting)
	for i := range guests {
		e.pod("guests-of-rome", fmt.Sprint("g", i), "10m", waits)
	}
	e.hold("r3", "rome", 1, pods(set("pods", 1, expect.Resources("cpu", "20m"))))
	expect.Eventually(t, "the agent to know the hold and the guests", func() (bool, string) {
		var list corev1.PodList
		expect.NoError(t, e.cached.List(t.Context(), &list, client.InNamespace("guests-of-rome")))
		err := e.cached.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: "r3"}, &broker.ProviderInstruction{})
		return err == nil && len(list.Items) == guests+1, fmt.Sprintf("%d guests, %v", len(list.Items), err)
	})
	close(released)
	e.decided("r3", 1, hold.ReasonAccepted, "", 1)
	e.eventuallyBound("guests-of-rome", guests+1)
	e.eventuallyBound(holds, 2)
	if n := before.Load(); n > hold.MaxMoved {
		t.Errorf("%d of %d guests were given places before the first placeholder of a new hold was created, want at most %d", n, guests, hold.MaxMoved)
	}
}
