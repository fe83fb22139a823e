package reservation

import "testing"

// TestDeletedReservationIsForgotten: what is computed for a Reservation when it is deleted,
// such as the answer to a call, leaves nothing in memory.
func TestDeletedReservationIsForgotten(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "1")
	h.ask("r", 20, "500m")
	read := h.reservations["r"].DeepCopy()
	h.ReservationChanged(nil, read)
	h.ReservationChanged(read, nil)
	h.snapshotOf(read.DeepCopy(), h.config)
	if h.book.Renew(read.Name, read.UID, h.clock.Now()) {
		t.Error("its lease is remembered")
	}
	if n := h.queue.Len(); n > 0 {
		t.Errorf("%d Reservations are in the queue", n)
	}
}
