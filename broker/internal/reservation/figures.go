package reservation

import (
	"slices"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// differInFiguresOnly reports whether two statuses say the same but for the position in
// the queue, the explanation of the decision and the text of conditions. Such a
// difference is not worth a write at every event.
func differInFiguresOnly(a, b broker.ReservationStatus) bool {
	return apiequality.Semantic.DeepEqual(withoutFigures(a), withoutFigures(b))
}

func withoutFigures(status broker.ReservationStatus) broker.ReservationStatus {
	status.QueuePosition, status.Decision = 0, nil
	status.Conditions = slices.Clone(status.Conditions)
	for i := range status.Conditions {
		c := &status.Conditions[i]
		c.Message, c.LastTransitionTime = "", metav1.Time{}
	}
	return status
}
