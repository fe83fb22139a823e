package reservation

import (
	"maps"
	"slices"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// differInFiguresOnly reports whether two statuses say the same but for the position in
// the queue, the explanation of the decision, if both have one, the text of conditions, and
// what providers advertise besides capacity. Such a difference is not worth a write at every
// event. The consumer gets the endpoint from the advertisement itself.
func differInFiguresOnly(a, b broker.ReservationStatus) bool {
	return explained(a) == explained(b) && apiequality.Semantic.DeepEqual(withoutFigures(a), withoutFigures(b))
}

// differInTerms reports whether two statuses with the same allocations differ in what consumers
// go by of what providers advertise.
func differInTerms(a, b broker.ReservationStatus) bool {
	return !slices.EqualFunc(a.Allocations, b.Allocations, func(a, b broker.Allocation) bool {
		return a.PodSecurity == b.PodSecurity && maps.Equal(a.NodeLabels, b.NodeLabels)
	})
}

// explained reports whether a status says why clusters were not chosen.
func explained(status broker.ReservationStatus) bool {
	return status.Decision != nil && len(status.Decision.Rejections) > 0
}

func withoutFigures(status broker.ReservationStatus) broker.ReservationStatus {
	// Whether there is any explanation is more than a figure.
	explained := status.Decision != nil && len(status.Decision.Rejections) > 0
	status.QueuePosition, status.Decision = 0, nil
	if explained {
		status.Decision = &broker.Decision{}
	}
	status.TargetClusterEndpoint = ""
	status.Allocations = slices.Clone(status.Allocations)
	for i := range status.Allocations {
		a := &status.Allocations[i]
		a.Endpoint, a.NodeLabels, a.PodSecurity = "", nil, ""
	}
	status.Conditions = slices.Clone(status.Conditions)
	for i := range status.Conditions {
		c := &status.Conditions[i]
		c.Message, c.LastTransitionTime = "", metav1.Time{}
	}
	return status
}
