package reservation

import (
	"testing"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// TestDeletedReservationIsForgotten: what is computed for a Reservation when it is deleted,
// such as by a reconcile, leaves nothing in memory.
func TestDeletedReservationIsForgotten(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "1")
	h.ask("r", 20, "500m")
	read := h.reservations["r"].DeepCopy()
	h.store.Note(read, true)
	h.forget(read.Name)
	h.note(h.input(read.DeepCopy(), h.settings))
	if h.book.Renew(read.Name, read.UID, h.clock.Now()) {
		t.Error("its lease is remembered")
	}
	if n := len(h.waiting()); n > 0 {
		t.Errorf("%d Reservations are in the queue", n)
	}
}

// TestMetricsOfForgottenCluster: a cluster that is gone has no series, as a provider and as a
// consumer.
func TestMetricsOfForgottenCluster(t *testing.T) {
	const gone = "forgotten-cluster"
	h := newHub(t)
	h.advertise(gone, "1")
	r := &broker.Reservation{Spec: broker.ReservationSpec{RequesterID: gone}, Status: broker.ReservationStatus{Phase: broker.ReservationPending}}
	decision := &broker.Decision{Scores: []broker.ClusterScore{{Cluster: gone, Score: "50.00"}}}
	h.observeScores(decision)
	h.observePhase(r)
	h.forgetSeries(gone)
	if got := Series(t, gone); len(got) != 2 {
		t.Errorf("while it advertises, it has the series %v", got)
	}
	ad := h.store.Advertisement(gone)
	h.store.Note(ad, true)
	h.advertisementChanged(ad, nil)
	h.observeScores(decision)
	if got := Series(t, gone); len(got) > 0 {
		t.Errorf("without an advertisement, it has the series %v", got)
	}
}
