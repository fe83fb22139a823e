package reservation

import (
	"context"
	"fmt"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	testclock "k8s.io/utils/clock/testing"
	"k8s.io/utils/dump"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// looks is a clock that reports the looks at when clusters were last heard.
type looks struct {
	*testclock.FakeClock
	seen func()
}

func (l *looks) Since(at time.Time) time.Duration {
	l.seen()
	return l.FakeClock.Since(at)
}

// accepting is a client that accepts every status.
type accepting struct{ client.Client }

func (accepting) Status() client.SubResourceWriter { return acceptedStatus{} }

type acceptedStatus struct{ client.SubResourceWriter }

func (acceptedStatus) Update(context.Context, client.Object, ...client.SubResourceUpdateOption) error {
	return nil
}

// configure stores the settings as a BrokerConfig.
func (h *hub) configure() {
	h.versions++
	h.store.Note(&broker.BrokerConfig{
		ObjectMeta: metav1.ObjectMeta{Name: "default", UID: "default", ResourceVersion: fmt.Sprint(h.versions)},
		Spec: broker.BrokerConfigSpec{
			MaxDuration: &metav1.Duration{Duration: h.settings.MaxDuration},
			KeepFreeFor: &metav1.Duration{Duration: h.settings.KeepFreeFor},
			Queueing:    h.settings.Queueing,
		},
	}, false)
}

// memory is what the broker's process remembers.
func (h *hub) memory() string {
	return dump.ForHash([]any{h.book, h.answers, h.queue, h.clusters.Reports, h.figures, h.impossible, h.priceChanges, len(h.clusters.Retry.C)})
}

// TestReadingChangesNothing: whichever cluster asks for a decision, and whatever is due by then,
// the broker remembers the same.
func TestReadingChangesNothing(t *testing.T) {
	for name, prepare := range map[string]func(*hub){
		"an answer is overdue": func(h *hub) {
			h.advertise("paris", "10")
			h.ask("r", 1, "1")
			h.clock.Step(time.Minute)
			h.advertise("paris", "10")
		},
		"the lease has become shorter": func(h *hub) {
			h.advertise("paris", "10")
			h.ask("r", 1, "1")
			h.answer("paris", "r", true)
			h.clock.Step(time.Second)
			h.settings.MaxDuration = time.Minute
		},
		"it waits, after a fail-over": func(h *hub) {
			h.advertise("paris", "1")
			h.ask("r", 20, "1")
			h.clock.Step(time.Second)
			h.failOver()
			h.advertise("paris", "1")
		},
		"the time for which room is kept for it is over": func(h *hub) {
			h.settings.KeepFreeFor = time.Minute
			h.advertise("paris", "1")
			h.ask("r", 20, "1")
			h.clock.Step(time.Minute)
			h.advertise("paris", "1")
		},
		"it waited, and has been placed": func(h *hub) {
			h.advertise("paris", "1")
			h.ask("r", 20, "1")
			h.clock.Step(time.Second)
			placed := h.reservations["r"].DeepCopy()
			meta.RemoveStatusCondition(&placed.Status.Conditions, broker.ConditionQueued)
			h.reservations["r"] = placed
			h.store.PutReservation(placed)
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHub(t)
			prepare(h)
			h.configure()
			looked := 0
			h.looks.seen = func() { looked++ }
			before := h.memory()
			if _, err := h.Explain("rome", "r"); err != nil {
				t.Errorf("its own decision: %v", err)
			}
			expectMemory(t, h, "its own cluster has asked", before)
			looked = 0
			if _, err := h.Explain("oslo", "r"); client.IgnoreNotFound(err) != nil || err == nil {
				t.Errorf("the decision of another cluster: %v", err)
			}
			expectMemory(t, h, "another cluster has asked", before)
			if looked > 0 {
				t.Errorf("for a call of another cluster, %d clusters were looked at", looked)
			}
			// Beside it, a reconcile remembers.
			h.note(h.snapshotFor("r"))
			if h.memory() == before {
				t.Error("a reconcile remembers nothing")
			}
		})
	}
}

// TestLeaseAnnouncedByAnAck: a lease whose length the status has from an ack begins then, not when
// the Reservation was placed: its consumer did not know how often to renew it.
func TestLeaseAnnouncedByAnAck(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "10")
	h.ask("r", 1, "1")
	h.answer("paris", "r", true)
	h.clock.Step(30 * time.Minute)
	h.advertise("paris", "10")
	h.settings.MaxDuration = 10 * time.Minute
	h.configure()
	ack := protocol.RequesterAck{ReservationUID: "r", Attempt: h.reservations["r"].Status.Attempt.Number, Ready: []string{"paris"}}
	expect.NoError(t, h.ApplyRequesterAck(t.Context(), "rome", "r", ack))
	h.reservations["r"] = h.store.Reservation("r").DeepCopy()
	if got := h.reservations["r"].Status.LeaseDuration; got == nil || got.Duration != 10*time.Minute {
		t.Fatalf("after the ack, the lease is %v", got)
	}
	h.clock.Step(time.Minute)
	h.reconcile("r")
	if got := h.reservations["r"].Status; got.Phase != broker.ReservationActive {
		t.Errorf("a minute after it was announced, it is %s: %s", got.Phase, got.Summary)
	}
}

func expectMemory(t *testing.T, h *hub, when, before string) {
	t.Helper()
	if after := h.memory(); after != before {
		t.Errorf("after %s, the broker remembers something else: was\n%s\nis\n%s", when, before, after)
	}
}
