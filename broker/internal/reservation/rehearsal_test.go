package reservation_test

import (
	"fmt"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/rehearsal"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// rehearsed: what package rehearsal says of a Reservation, from what the API server has, is what the
// broker then decides.
func rehearsed(e *env) {
	p := e.start(nil)
	for id, free := range map[string]string{"paris": "4", "berlin": "8", "vienna": "16", "rome": "1"} {
		spec := e.spec(id, free)
		if id == "berlin" {
			spec.Cost = &broker.Cost{CPUCost: "0.2", Currency: "EUR"}
		}
		spec.Lending.Consumers = map[string][]string{"vienna": {"oslo"}}[id]
		p.advertise(spec)
		e.eventually(id+" to be active", func() error {
			if !e.ad(id).Status.Active {
				return fmt.Errorf("it is not")
			}
			return nil
		})
	}
	// Those that wait have several priorities: the API server's times are of whole seconds.
	for _, ask := range []struct {
		name  string
		pods  int32
		spec  func(*broker.ReservationSpec)
		phase broker.ReservationPhase
		queue int32
	}{
		{"chosen", 2, func(*broker.ReservationSpec) {}, broker.ReservationReserved, 0},
		{"dear", 1, func(s *broker.ReservationSpec) {
			s.Priority, s.Budget = 3, &broker.Budget{MaxPricePerHour: "0.05", Currency: "EUR"}
		}, broker.ReservationPending, 1},
		{"divided", 9, func(*broker.ReservationSpec) {}, broker.ReservationReserved, 0},
		{"pinned", 1, func(s *broker.ReservationSpec) { s.TargetClusterID = "vienna" }, broker.ReservationFailed, 0},
		{"gang", 3, func(s *broker.ReservationSpec) { s.Priority, s.MinAvailable = 2, 3 }, broker.ReservationPending, 2},
		{"partly", 3, func(s *broker.ReservationSpec) { s.Priority = 1 }, broker.ReservationPending, 3},
		{"first", 1, func(s *broker.ReservationSpec) { s.Priority = 10 }, broker.ReservationReserved, 0},
	} {
		change := func(r *broker.Reservation) {
			r.Spec.PodSets[0].Requests = cpu("1")
			ask.spec(&r.Spec)
		}
		wanted := &broker.Reservation{Spec: broker.ReservationSpec{RequesterID: "rome", PodSets: []broker.PodSet{{Name: "pods", Count: ask.pods}}}}
		change(wanted)
		said := e.hub().Decide(wanted)
		e.request(ask.name, ask.pods, change)
		ignored := cmp.Options{cmpopts.IgnoreFields(metav1.Condition{}, "LastTransitionTime"), cmpopts.IgnoreFields(broker.ReservationStatus{}, "ReservedAt", "ExpiresAt", "LeaseDuration", "ID"), cmpopts.EquateEmpty()}
		expect.EventuallyWithin(e, time.Minute, ask.name+" to be decided as it was said", func() (bool, string) {
			diff := cmp.Diff(said.Status, e.get(ask.name).Status, ignored)
			return diff == "", diff
		})
		if said.Status.Phase != ask.phase || said.Status.QueuePosition != ask.queue || ask.queue > 0 && len(said.Ahead) != int(ask.queue)-1 {
			e.Errorf("%s is %s, number %d behind %d, want %s, %d", ask.name, said.Status.Phase, said.Status.QueuePosition, len(said.Ahead), ask.phase, ask.queue)
		}
		if len(said.Offers) != 4 && ask.phase != broker.ReservationFailed {
			e.Errorf("%s has offers of %+v", ask.name, said.Offers)
		}
	}
}

// hub is what a reader of the API server sees.
func (e *env) hub() *rehearsal.Hub {
	e.Helper()
	var ads broker.ClusterAdvertisementList
	var reservations broker.ReservationList
	var configs broker.BrokerConfigList
	for _, list := range []client.ObjectList{&ads, &reservations, &configs} {
		expect.NoError(e, e.client.List(e.Context(), list, client.InNamespace(e.namespace)))
	}
	return rehearsal.New(e.clock.Now(), ads.Items, reservations.Items, configs.Items)
}
