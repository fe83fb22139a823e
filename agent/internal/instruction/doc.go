// Package instruction writes what the broker has decided as objects of this
// cluster: a ReservationInstruction for each provider that granted capacity to
// one of its Reservations, and a ProviderInstruction for each hold at it. Other
// controllers act on these objects and write their status; the decision about a
// hold is acknowledged to the broker from here.
//
// The objects follow the broker's latest view. A change or deletion by another
// client is reverted, and only the broker removes an object: while it is
// unreachable, everything remains.
package instruction

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// workers is the number of instructions that a controller reconciles at a time. The broker
// writes acks that come at the same time together.
const workers = 48

// IndexReservation finds ReservationInstructions by spec.reservationName.
const IndexReservation = "spec.reservationName"

// SetupIndex adds IndexReservation to the manager's cache.
func SetupIndex(ctx context.Context, mgr manager.Manager) error {
	err := mgr.GetFieldIndexer().IndexField(ctx, &broker.ReservationInstruction{}, IndexReservation, func(o client.Object) []string {
		return []string{o.(*broker.ReservationInstruction).Spec.ReservationName}
	})
	if err != nil {
		return fmt.Errorf("indexing ReservationInstructions: %w", err)
	}
	return nil
}

func objectMeta(namespace, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Namespace: namespace, Name: name,
		Labels: map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway},
	}
}

// remove deletes an object unless it was replaced by another one of its name.
func remove(ctx context.Context, c client.Client, object client.Object) error {
	uid := object.GetUID()
	if err := client.IgnoreNotFound(c.Delete(ctx, object, client.Preconditions{UID: &uid})); err != nil {
		return fmt.Errorf("deleting %T %s: %w", object, object.GetName(), err)
	}
	return nil
}

func orZero(q *resource.Quantity) resource.Quantity {
	if q == nil {
		return resource.Quantity{}
	}
	return q.DeepCopy()
}
