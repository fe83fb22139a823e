package reservation_test

import (
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/decide"
)

// spread: a Reservation is divided over regions, waits for the one that is full, and what was accepted
// stays where it is.
func spread(e *env) {
	p := e.start(nil)
	in := func(region, id, free string) broker.ClusterAdvertisementSpec {
		spec := e.spec(id, free)
		spec.Region = region
		return spec
	}
	p.advertise(in("eu", "paris", "1100m"))
	p.advertise(in("us", "reno", "300m"))
	p.advertise(in("", "oslo", "1"))
	total := &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: e.namespace, Name: "total"}, Spec: broker.ReservationSpec{
		RequesterID: "rome", RequestedResources: ptr.To(cpu("1")), Placement: &broker.Placement{Spread: &broker.Spread{Over: broker.SpreadOverZone}}}}
	if err := e.client.Create(e.Context(), total); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "set podSets, or remove placement.spread") {
		e.Errorf("a total with a spread: %v", err)
	}
	total.Spec.Placement = &broker.Placement{DataRegions: []string{"eu"}, TransferPrice: &broker.TransferPrice{PricePerHour: "0.1", Currency: "EUR"}}
	if err := e.client.Create(e.Context(), total); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "set podSets, or remove dataRegions and transferPrice") {
		e.Errorf("a total with a price for each pod: %v", err)
	}
	e.request("r", 4, func(r *broker.Reservation) {
		r.Spec.Placement = &broker.Placement{Spread: &broker.Spread{Over: broker.SpreadOverRegion}}
	})
	e.expect("r", broker.ReservationReserved, "4 of 4 pods: 2 in paris, 2 in reno")
	p.answer("paris", "r", true, "")
	p.answer("reno", "r", true, "")

	e.edit("r", func(r *broker.Reservation) { r.Spec.PodSets[0].Count = 8 })
	e.expectCondition("r", broker.ConditionQueued, true, "1 pod is waiting for capacity.")
	e.expectRejection("r", "paris", decide.ReasonShareLimited, "region us has room for 3, and maxSkew is 1")
	e.expectRejection("r", "oslo", decide.ReasonNoDomain, "states no region")
	e.expectPods("paris", "r", 4, 0, 2)
	e.expectPods("reno", "r", 3, 0, 2)

	// What it cannot use is not kept free for it.
	e.request("other", 6, func(r *broker.Reservation) { r.Spec.TargetClusterID = "paris" })
	e.expect("other", broker.ReservationReserved, "6 of 6 pods in paris")

	// A region without a provider that may be chosen does not count.
	spec := in("us", "reno", "300m")
	spec.Lending.Enabled = false
	p.advertise(spec)
	e.touch("r")
	e.expectPods("paris", "r", 5, 0, 2)
	e.expectPods("reno", "r", 3, 0, 2)
}
