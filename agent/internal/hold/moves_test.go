package hold_test

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/hold"
	"github.com/spillway-dev/spillway/agent/internal/hold/verdict"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/guest"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// The broker waits for decisions: guests that wait for their places do not delay them.
func TestMoves(t *testing.T) {
	const guests = 150
	e := startPlaces(t, true)
	for _, node := range []string{"a", "b", "c"} {
		e.amd64(node, expect.Resources("cpu", "2", "memory", "8Gi"))
	}
	e.hold("r1", "rome", 1, pods(set("pods", guests+1, expect.Resources("cpu", "10m"))))
	e.decided("r1", 1, verdict.ReasonAccepted, "", guests+1)
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
	e.decided("r2", 1, verdict.ReasonAccepted, "", 1)
	e.inFlight.before.Store(nil)
	e.eventuallyBound("guests-of-rome", 1)

	e.moveAll(guests, waits, nominates)
}

// moveAll makes all guests wait at once, and asks for another hold while they are given their
// places: it does not wait for all of them.
func (e *env) moveAll(guests int, waits func(*corev1.PodSpec), nominates func(*http.Request) bool) {
	// The first guests may be known before the others.
	const trigger = hold.MaxMoved + 2
	nominated, before := atomic.Int64{}, atomic.Int64{}
	released, release := e.gate()
	asked, ask := e.gate()
	counting := func(r *http.Request) error {
		switch {
		case nominates(r):
			<-released
			if nominated.Add(1) == trigger {
				<-asked
			}
		case r.Method == http.MethodPost && r.URL.Path == "/api/v1/namespaces/"+holds+"/pods":
			before.CompareAndSwap(0, nominated.Load())
		}
		return nil
	}
	e.inFlight.before.Store(&counting)
	for i := range guests {
		e.pod("guests-of-rome", fmt.Sprint("g", i), "10m", waits)
	}
	e.known("the guests", func() error {
		var list corev1.PodList
		if err := e.cached.List(e.Context(), &list, client.InNamespace("guests-of-rome")); err != nil || len(list.Items) == guests+1 {
			return err
		}
		return fmt.Errorf("%d guests", len(list.Items))
	})
	release()
	expect.Eventually(e, "the agent to give some guests their places", func() (bool, string) {
		n := nominated.Load()
		return n >= trigger, fmt.Sprint(n)
	})
	e.hold("r3", "rome", 1, pods(set("pods", 1, expect.Resources("cpu", "20m"))))
	e.known("the hold", func() error {
		return e.cached.Get(e.Context(), client.ObjectKey{Namespace: namespace, Name: "r3"}, &broker.ProviderInstruction{})
	})
	ask()
	e.eventuallyBound("guests-of-rome", guests+1)
	e.decided("r3", 1, verdict.ReasonAccepted, "", 1)
	e.eventuallyBound(holds, 2)
	if n := before.Load() - trigger; n < 0 || n > hold.MaxMoved {
		e.Errorf("%d guests were given places between a new hold and its first placeholder, want at most %d", n, hold.MaxMoved)
	}
}

// gate is closed until open is called, at the latest when the test ends: the agent does not
// stop while one of its requests waits.
func (e *env) gate() (opened <-chan struct{}, open func()) {
	gate := make(chan struct{})
	open = sync.OnceFunc(func() { close(gate) })
	e.Cleanup(open)
	return gate, open
}

// known waits until the agent knows an object.
func (e *env) known(what string, read func() error) {
	expect.Eventually(e, "the agent to know "+what, func() (bool, string) {
		err := read()
		return err == nil, fmt.Sprint(err)
	})
}
