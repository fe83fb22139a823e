package views

import (
	"slices"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/store"
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
	x := Views{store.New(clocktesting.NewFakePassiveClock(start))}
	x.Store.PutReservation(reservation)
	if view := x.OfConsumer(reservation); len(view.Status.Allocations) != 1 || view.Status.Phase != broker.ReservationActive {
		t.Errorf("before the deletion: %+v", view.Status)
	}
	deleted := reservation.DeepCopy()
	deleted.DeletionTimestamp = &metav1.Time{Time: start}
	x.Store.PutReservation(deleted)
	changed := OfReservation(reservation, deleted)
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
	x := Views{store.New(clocktesting.NewFakePassiveClock(start))}
	x.Store.PutAdvertisement(&broker.ClusterAdvertisement{ObjectMeta: metav1.ObjectMeta{Name: "paris", UID: "paris"}, Spec: broker.ClusterAdvertisementSpec{ClusterID: "paris", EndpointURL: "https://paris.test:6443", PeerKey: "key-of-paris"}})
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
