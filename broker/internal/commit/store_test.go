package commit

import (
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
	c := New(Hub{}, clock)
	listed := &broker.ClusterAdvertisement{
		ObjectMeta: metav1.ObjectMeta{Name: "paris", UID: "paris", ResourceVersion: "1"},
		Spec:       broker.ClusterAdvertisementSpec{ClusterID: "paris"},
	}
	c.Store.PutAdvertisement(listed)
	c.Store.RemoveAdvertisement(listed)
	c.Store.PutAdvertisement(listed)
	if got := c.Store.Advertisement("paris"); got != nil || len(c.Store.Advertisements()) > 0 {
		t.Errorf("version %s is back", got.ResourceVersion)
	}
	// What a failed write took for a deletion is not for ever.
	clock.Step(goneFor + time.Second)
	c.Store.PutAdvertisement(listed)
	if c.Store.Advertisement("paris") == nil {
		t.Error("it is not known again")
	}
	c.Store.RemoveAdvertisement(listed)
	again := listed.DeepCopy()
	again.UID = "another"
	c.Store.PutAdvertisement(again)
	if c.Store.Advertisement("paris") == nil {
		t.Error("another one of its name is not known")
	}
}

// A Reservation that is gone is not reconciled again because an event, or a cache, still has
// an earlier version of it. Another one of its name is.
func TestRemovedReservationStaysGone(t *testing.T) {
	clock := testclock.NewFakeClock(time.Unix(1_000_000, 0))
	s := newStore(clock)
	version := func(uid types.UID, version string) *broker.Reservation {
		return &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Name: "r", UID: uid, ResourceVersion: version}}
	}
	s.NoteReservation(nil, version("first", "1"))
	s.RemoveReservation(version("first", "3"))
	s.NoteReservation(version("first", "1"), version("first", "2"))
	if got := s.Reservation("r"); got != nil {
		t.Errorf("version %s is back", got.ResourceVersion)
	}
	if !s.RemovedLately(version("first", "2")) {
		t.Error("a cache that still has it is believed")
	}
	s.NoteReservation(nil, version("second", "4"))
	if got := s.Reservation("r"); got == nil || got.UID != "second" {
		t.Errorf("another one of its name is %v", got)
	}
	s.NoteReservation(version("first", "2"), nil)
	if got := s.Reservation("r"); got == nil {
		t.Error("the end of the first one removed the second")
	}
	clock.Step(goneFor + time.Second)
	s.RemoveReservation(version("second", "5"))
	if len(s.gone) != 1 || len(s.removals) != 1 {
		t.Errorf("%d and %d are remembered", len(s.gone), len(s.removals))
	}
}
