package reservation

import (
	"slices"
	"strings"
	"testing"
	"time"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/plan"
)

// delete marks a Reservation as deleted, as the API server does while there are finalizers.
func (h *hub) delete(name string) {
	h.reservations[name].DeletionTimestamp = ptr.To(metav1.NewTime(h.clock.Now()))
}

// snapshotFor is what a reconcile of a Reservation begins with.
func (h *hub) snapshotFor(name string) plan.Input {
	return h.input(h.reservations[name].DeepCopy(), h.settings)
}

// Whether and when the status of a Reservation that is being deleted is written.
func TestStatusOfDeleted(t *testing.T) {
	for name, tc := range map[string]struct {
		reason string
		change func(*hub, *broker.Reservation)
		want   []bool // at once, 4 s and 5 s after the deletion was first seen
	}{
		"held": {"it is worth a write if the release takes long", func(*hub, *broker.Reservation) {}, []bool{false, false, true}},
		"not held": {"it is gone with the next write", func(h *hub, r *broker.Reservation) {
			h.change("paris", func(ad *broker.ClusterAdvertisement) { ad.Status.Holds = nil })
		}, []bool{false, false, false}},
		"kept":       {"the object outlives its release", func(_ *hub, r *broker.Reservation) { r.Finalizers = append(r.Finalizers, "example.com/keep") }, []bool{true, true, true}},
		"long ago":   {"the clocks of two machines are not compared", func(h *hub, r *broker.Reservation) { r.DeletionTimestamp.Time = h.clock.Now().Add(-time.Hour) }, []bool{false, false, true}},
		"no deleted": {"only a deletion ends all at once", func(_ *hub, r *broker.Reservation) { r.DeletionTimestamp = nil }, []bool{true, true, true}},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHub(t)
			h.advertise("paris", "4")
			h.ask("r", 2, "1")
			h.answer("paris", "r", true)
			h.delete("r")
			tc.change(h, h.reservations["r"])
			var got []bool
			for _, wait := range []time.Duration{0, 4 * time.Second, time.Second} {
				h.clock.Step(wait)
				in := h.snapshotFor("r")
				h.note(in)
				got = append(got, in.StatusDue())
				if again := h.requeue(in, time.Time{}).RequeueAfter; !in.StatusDue() && in.NeedsFinalizer() && (again <= 0 || again > 5*time.Second) {
					t.Errorf("it is reconciled again after %s", again)
				}
			}
			if !slices.Equal(got, tc.want) {
				t.Errorf("the status is written at once, after 4 s and 5 s: %v, want %v: %s", got, tc.want, tc.reason)
			}
		})
	}
}

// What counts from the deletion on is what the broker would write.
func TestEffectiveStatusIsTheNext(t *testing.T) {
	for name, prepare := range map[string]func(*hub){
		"new":     func(h *hub) {},
		"queued":  func(h *hub) { h.ask("r", 9, "1", func(s *broker.ReservationSpec) { s.MinAvailable = 9 }) },
		"partial": func(h *hub) { h.ask("r", 9, "1") },
		"granted": func(h *hub) { h.ask("r", 2, "1"); h.answer("paris", "r", true) },
		"active":  func(h *hub) { h.ask("r", 2, "1"); h.answer("paris", "r", true); h.use("r") },
		"expired": func(h *hub) {
			h.ask("r", 2, "1")
			h.answer("paris", "r", true)
			h.clock.Step(time.Hour)
			h.receive("paris", h.clock.Now())
			h.reconcile("r")
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHub(t)
			h.advertise("paris", "4")
			if prepare(h); h.reservations["r"] == nil {
				h.reservations["r"] = &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Name: "r", UID: "r", Generation: 1, Finalizers: []string{broker.FinalizerLedger}}}
			}
			if status := h.reservations["r"].EffectiveStatus(); !apiequality.Semantic.DeepEqual(status, h.reservations["r"].Status) {
				t.Errorf("before the deletion, %+v counts instead of the status", status)
			}
			before := h.reservations["r"].DeepCopy()
			h.delete("r")
			before.DeletionTimestamp = h.reservations["r"].DeletionTimestamp
			effective := h.reservations["r"].EffectiveStatus()
			if !apiequality.Semantic.DeepEqual(before, h.reservations["r"]) {
				t.Error("EffectiveStatus has changed the Reservation")
			}
			in := h.snapshotFor("r")
			p := plan.New(in)
			written := plan.Recorded(in, p)
			written.Attempt = in.Reservation.Status.Attempt // it may empty a hold
			for _, status := range []*broker.ReservationStatus{&effective, &written} {
				// Figures of the release, and of when it was written.
				meta.RemoveStatusCondition(&status.Conditions, broker.ConditionProviderReleased)
				status.ObservedGeneration = 0
				for i := range status.Conditions {
					status.Conditions[i].LastTransitionTime = metav1.Time{}
				}
				slices.SortFunc(status.Conditions, func(a, b metav1.Condition) int { return strings.Compare(a.Type, b.Type) })
			}
			if !apiequality.Semantic.DeepEqual(effective, written) {
				t.Errorf("%+v counts, and this is written: %+v", effective, written)
			}
			if len(effective.Allocations) > 0 || effective.Phase != broker.ReservationReleased {
				t.Errorf("a deleted Reservation grants %+v in phase %s", effective.Allocations, effective.Phase)
			}
		})
	}
}
