package reservation

import (
	"context"
	"fmt"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// untracked in an update of an object, not of its status, makes the API server drop the
// object's managedFields and track none in later updates. They are half of the content of
// a Reservation, of which every write encodes, decodes and compares them several times.
// It is for objects that only the broker writes.
func untracked() []metav1.ManagedFieldsEntry { return []metav1.ManagedFieldsEntry{{}} }

// recordsFirst reports whether the attempt of a plan is recorded by recordFirst: the first
// one of a Reservation that the broker has created for a cluster.
func recordsFirst(in snapshot, p plan) bool {
	r := in.reservation
	return r.Labels[broker.LabelManagedBy] == broker.ManagedBySpillway && r.Annotations[broker.AnnotationFirstAttempt] == "" &&
		p.attempt.Number == 1 && len(in.holds()) == 0 && len(p.grow) > 0
}

// recordFirst is write (a) for the first attempt of a Reservation. It is recorded in an
// annotation, since the write that ends the tracking of fields cannot change the status.
func (r *Reconciler) recordFirst(ctx context.Context, reservation *broker.Reservation, attempt broker.Attempt) error {
	status := reservation.Status
	if reservation.Annotations == nil {
		reservation.Annotations = map[string]string{}
	}
	reservation.Annotations[broker.AnnotationFirstAttempt] = strings.Join(attempt.Clusters, ",")
	reservation.ManagedFields = untracked()
	if err := r.client.Update(ctx, reservation); err != nil {
		return fmt.Errorf("recording the first attempt: %w", err)
	}
	r.store.putReservation(reservation.DeepCopy())
	reservation.Status = status
	adoptAttempt(reservation)
	return nil
}

// adoptAttempt sets the first attempt in the status of a Reservation that has it in its
// annotation only.
func adoptAttempt(reservation *broker.Reservation) {
	if clusters := reservation.FirstAsked(); clusters != nil {
		reservation.Status.Attempt = broker.Attempt{Number: 1, Clusters: clusters}
	}
}
