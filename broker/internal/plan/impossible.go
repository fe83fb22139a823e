package plan

import (
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/decide"
)

// Impossibility is why a Reservation made by hand cannot be placed, however long it
// waits, unless the clusters change; zero if it can.
type Impossibility struct{ Reason, message string }

// impossible looks for what no provider that may be chosen could ever give: the queue is
// for what has no room now. The Reservations of the scheduler plugin always wait.
func (in Input) impossible() Impossibility {
	spec, want := &in.Reservation.Spec, in.Requested()
	if !madeByHand(in.Reservation) || want.Empty() {
		return Impossibility{}
	}
	if pin := spec.TargetClusterID; pin != "" && !in.lends(pin) {
		return Impossibility{reasonUnknownTarget, fmt.Sprintf("No cluster %s that lends to %s has sent an advertisement: correct or remove targetClusterID, or check the agent of %s and its values lend.enabled and lend.consumers. It is placed once %s advertises that it does.",
			pin, spec.RequesterID, pin, pin)}
	}
	request := decide.Request{Requester: spec.RequesterID, Pin: spec.TargetClusterID, Placement: spec.Placement}
	var allocatable []corev1.ResourceList
	all := corev1.ResourceList{}
	for _, ad := range in.Advertisements {
		if decide.Eligible(&request, &ad.Spec, true, true) {
			list := ad.Spec.Resources.Allocatable.List()
			allocatable = append(allocatable, list)
			broker.AddTo(all, list)
		}
	}
	if len(allocatable) == 0 {
		return Impossibility{} // the queue says why
	}
	if len(want.PodSets) == 0 {
		if name, amount, ok := exceeding(want.Totals.List(), all); ok {
			return Impossibility{reasonTooLarge, fmt.Sprintf("It requests %s %s, which is more than all nodes of the providers together have. Request less.", name, amount.String())}
		}
	}
	for _, set := range want.PodSets {
		fits := func(list corev1.ResourceList) bool { _, _, more := exceeding(set.Requests.List(), list); return !more }
		if !slices.ContainsFunc(allocatable, fits) {
			return Impossibility{reasonTooLarge, fmt.Sprintf("A pod of set %s requests %s, and no provider has as much. Request less.", set.Name, set.Requests)}
		}
	}
	return Impossibility{}
}

// lends reports whether a cluster lends to the requester. One that does not is as if it did
// not exist: the requester must not learn that it does.
func (in Input) lends(cluster string) bool {
	ad := in.Advertisement(cluster)
	return ad != nil && capacity.AdmitReason(ad.Spec.Lending, in.Reservation.Spec.RequesterID, nil) == ""
}

// madeByHand reports whether a Reservation was made by hand: in the hub, or in the
// consumer, whose agent says so unless it is hostile. The scheduler plugin writes neither
// totals nor targets.
func madeByHand(r *broker.Reservation) bool {
	return r.Labels[broker.LabelSourceNamespace] == "" || r.Labels[broker.LabelByHand] == "true" || r.Spec.RequestedResources != nil || r.Spec.TargetClusterID != ""
}

// exceeding returns the first resource, by name, of which more is wanted than there is.
func exceeding(want, have corev1.ResourceList) (name corev1.ResourceName, amount resource.Quantity, ok bool) {
	for _, name := range slices.Sorted(maps.Keys(want)) {
		wanted, there := want[name], have[name]
		if wanted.Cmp(there) > 0 {
			return name, wanted, true
		}
	}
	return "", resource.Quantity{}, false
}
