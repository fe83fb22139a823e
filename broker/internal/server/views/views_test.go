package views

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// A consumer hears of the deletion of its Reservation from the deletion on, whatever the
// status says that is stored.
func TestViewOfDeletedReservation(t *testing.T) {
	reservation := &broker.Reservation{
		ObjectMeta: metav1.ObjectMeta{Name: "r", UID: "r"},
		Spec:       broker.ReservationSpec{RequesterID: "rome"},
		Status: broker.ReservationStatus{
			Phase: broker.ReservationActive, Summary: "1 of 1 pods in paris", QueuePosition: 1,
			Allocations: []broker.Allocation{{Cluster: "paris", Accepted: true, VirtualNodeReady: true}},
			Conditions:  []metav1.Condition{{Type: broker.ConditionReady, Status: metav1.ConditionTrue, Reason: "Ready"}, {Type: broker.ConditionQueued, Status: metav1.ConditionTrue, Reason: "InsufficientCapacity"}},
		},
	}
	x := NewIndex(clocktesting.NewFakePassiveClock(start))
	x.PutReservation("r", reservation)
	if view := x.OfConsumer(reservation); len(view.Status.Allocations) != 1 || view.Status.Phase != broker.ReservationActive {
		t.Errorf("before the deletion: %+v", view.Status)
	}
	deleted := reservation.DeepCopy()
	deleted.DeletionTimestamp = &metav1.Time{Time: start}
	_, changed := x.PutReservation("r", deleted)
	if ids := changed[Viewer{"rome", protocol.RoleRequester}]; !slices.Equal(ids, []string{"r"}) {
		t.Errorf("the deletion changes the views %v of rome", ids)
	}
	view := x.Consumer("rome", "")[0].Status
	if view.Phase != broker.ReservationReleased || len(view.Allocations) > 0 || view.Summary != "released" || meta.IsStatusConditionTrue(view.Conditions, broker.ConditionReady) || meta.IsStatusConditionTrue(view.Conditions, broker.ConditionQueued) {
		t.Errorf("after the deletion: %+v", view)
	}
	if before := deleted.Status; len(before.Allocations) != 1 || !meta.IsStatusConditionTrue(before.Conditions, broker.ConditionReady) {
		t.Errorf("the view has changed the Reservation: %+v", before)
	}
}

// A consumer hears which clusters are asked first, and how to reach them, from the record of
// the attempt until the status says more.
func TestViewOfFirstAttempt(t *testing.T) {
	x := NewIndex(clocktesting.NewFakePassiveClock(start))
	x.PutAdvertisement("paris", &broker.ClusterAdvertisement{Spec: broker.ClusterAdvertisementSpec{ClusterID: "paris", EndpointURL: "https://paris.test:6443", PeerKey: "key-of-paris"}})
	asked := &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Name: "r", UID: "r", Annotations: map[string]string{broker.AnnotationFirstAttempt: "paris,berlin"}}}
	view := x.OfConsumer(asked)
	if want := []protocol.AskedCluster{{Cluster: "paris", Endpoint: "https://paris.test:6443"}, {Cluster: "berlin"}}; !slices.Equal(view.Asked, want) || view.PeerKeys["paris"] != "key-of-paris" {
		t.Errorf("asked: %+v, keys: %v", view.Asked, view.PeerKeys)
	}
	answered, deleted := asked.DeepCopy(), asked.DeepCopy()
	answered.Status.Attempt.Number = 1
	deleted.DeletionTimestamp = &metav1.Time{Time: start}
	for what, reservation := range map[string]*broker.Reservation{"answered": answered, "deleted": deleted} {
		if view := x.OfConsumer(reservation); len(view.Asked) > 0 {
			t.Errorf("%s, it asks %+v", what, view.Asked)
		}
	}
}

// All consumers together have a bounded number of Reservations.
func TestReservationsOfAllAreBounded(t *testing.T) {
	now := clocktesting.NewFakePassiveClock(start)
	x := NewIndex(now)
	const limit, total = 60, 100
	admit := func(requester string, want Admission, count int) {
		t.Helper()
		for i := range count {
			name := fmt.Sprint(requester, "-", now.Now().Unix(), "-", i)
			if got := x.Admit(requester, name, limit, total); got != want {
				t.Fatalf("number %d of %s: %v, want %v", i+1, requester, got, want)
			}
			if want == Admitted && i%2 == 0 {
				// The watch has shown it.
				x.PutReservation(name, &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: broker.ReservationSpec{RequesterID: requester}})
			}
		}
	}
	admit("rome", Admitted, 60)
	admit("rome-2", Admitted, 30)
	admit("rome", QuotaReached, 1)
	admit("oslo", Admitted, 10)
	admit("lima", HubFull, 1)
	// What the watch has not shown for long does not count any more.
	now.SetTime(start.Add(admissionTTL))
	admit("lima", Admitted, 9)
}
