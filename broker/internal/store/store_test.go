package store

import (
	"fmt"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	testclock "k8s.io/utils/clock/testing"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// An advertisement that is gone is not back because a new leader's list, or a read, still has it.
func TestRemovedAdvertisementStaysGone(t *testing.T) {
	clock := testclock.NewFakeClock(time.Unix(1_000_000, 0))
	s := New(clock)
	listed := &broker.ClusterAdvertisement{
		ObjectMeta: metav1.ObjectMeta{Name: "paris", UID: "paris", ResourceVersion: "1"},
		Spec:       broker.ClusterAdvertisementSpec{ClusterID: "paris"},
	}
	s.PutAdvertisement(listed)
	s.RemoveAdvertisement(listed)
	s.PutAdvertisement(listed)
	if got := s.Advertisement("paris"); got != nil || len(s.Advertisements()) > 0 {
		t.Errorf("version %s is back", got.ResourceVersion)
	}
	// What a failed write took for a deletion is not for ever.
	clock.Step(goneFor + time.Second)
	s.PutAdvertisement(listed)
	if s.Advertisement("paris") == nil {
		t.Error("it is not known again")
	}
	s.RemoveAdvertisement(listed)
	again := listed.DeepCopy()
	again.UID = "another"
	s.PutAdvertisement(again)
	if s.Advertisement("paris") == nil {
		t.Error("another one of its name is not known")
	}
}

// A Reservation that is gone is not reconciled again because an event, or a cache, still has
// an earlier version of it. Another one of its name is.
func TestRemovedReservationStaysGone(t *testing.T) {
	clock := testclock.NewFakeClock(time.Unix(1_000_000, 0))
	s := New(clock)
	version := func(uid types.UID, version string) *broker.Reservation {
		return &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Name: "r", UID: uid, ResourceVersion: version}}
	}
	s.Note(version("first", "1"), false)
	s.RemoveReservation(version("first", "3"))
	s.Note(version("first", "2"), false)
	if got := s.Reservation("r"); got != nil {
		t.Errorf("version %s is back", got.ResourceVersion)
	}
	s.Note(version("second", "4"), false)
	if got := s.Reservation("r"); got == nil || got.UID != "second" {
		t.Errorf("another one of its name is %v", got)
	}
	s.Note(version("first", "2"), true)
	if got := s.Reservation("r"); got == nil {
		t.Error("the end of the first one removed the second")
	}
	// The watch may have shown the end of one before its own creation has returned.
	s.RemoveReservation(version("third", "6"))
	s.PutReservation(version("third", "5"))
	if got := s.Reservation("r"); got == nil || got.UID != "second" {
		t.Errorf("one that was created and deleted at once is back: %v", got)
	}
	clock.Step(goneFor + time.Second)
	s.RemoveReservation(version("second", "7"))
	if len(s.reservations.gone) != 1 || len(s.reservations.removals) != 1 {
		t.Errorf("%d and %d are remembered", len(s.reservations.gone), len(s.reservations.removals))
	}
}

// TestReceipts: what could not be stored was not received, unless the cluster was heard again.
// There are no receipts of clusters whose advertisement was deleted.
func TestReceipts(t *testing.T) {
	start := time.Unix(1_000_000, 0)
	clock := testclock.NewFakeClock(start)
	s := New(clock)
	expect := func(what string, at time.Time, sequence int64) {
		t.Helper()
		if got := s.Receipt("paris"); !got.At.Equal(at) || got.Sequence != sequence {
			t.Errorf("%s: %+v", what, got)
		}
	}
	before, now := s.Receive("paris", 0)
	s.Unreceive("paris", before, now)
	expect("undone", time.Time{}, 0)
	s.Receive("paris", 7)
	clock.Step(time.Minute)
	before, now = s.Receive("paris", 0)
	expect("received again", start.Add(time.Minute), 7)
	s.Unreceive("paris", before, now)
	expect("as before", start, 7)
	before, now = s.Receive("paris", 0)
	clock.Step(time.Minute)
	s.Receive("paris", 8)
	s.Unreceive("paris", before, now)
	expect("heard since", start.Add(2*time.Minute), 8)
	ad := func(uid types.UID, version string) *broker.ClusterAdvertisement {
		return &broker.ClusterAdvertisement{ObjectMeta: metav1.ObjectMeta{Name: "paris", UID: uid, ResourceVersion: version}, Spec: broker.ClusterAdvertisementSpec{ClusterID: "paris"}}
	}
	s.Note(ad("first", "1"), false)
	expect("with an update", start.Add(2*time.Minute), 8)
	s.Note(ad("first", "1"), true)
	expect("deleted", time.Time{}, 0)
	s.Receive("paris", 1)
	s.Note(ad("second", "3"), false)
	s.Note(ad("first", "1"), true)
	expect("of another one of its name", start.Add(2*time.Minute), 1)
}

// All consumers together have a bounded number of Reservations.
func TestReservationsOfAllAreBounded(t *testing.T) {
	s := New(testclock.NewFakeClock(time.Unix(1_000_000, 0)))
	const limit, total = 60, 100
	admit := func(requester string, want Admission, count int) {
		t.Helper()
		for i := range count {
			name := fmt.Sprint(requester, "-", i)
			if got := s.Admit(requester, name, limit, total); got != want {
				t.Fatalf("number %d of %s: %v, want %v", i+1, requester, got, want)
			}
			if want == Admitted && i%2 == 0 {
				// It is created.
				s.PutReservation(&broker.Reservation{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name)}, Spec: broker.ReservationSpec{RequesterID: requester}})
			}
		}
	}
	admit("rome", Admitted, 60)
	admit("rome-2", Admitted, 30)
	admit("rome", QuotaReached, 1)
	admit("oslo", Admitted, 10)
	admit("lima", HubFull, 1)
	if s.Admit("rome", "rome-1", limit, total) != Admitted {
		t.Error("one that is being created is refused when it is requested again")
	}
	// What is not created does not count any more.
	for i := 1; i < 18; i += 2 {
		s.Unadmit("rome", fmt.Sprint("rome-", i))
	}
	admit("lima", Admitted, 9)
	admit("oslo", HubFull, 1)
}
