package instruction

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/spillway-dev/spillway/agent/internal/transport"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// ReservationInstructionName is the name of the instruction for one provider of
// a reservation.
func ReservationInstructionName(reservationID, cluster string) string {
	const longest = 253
	name := reservationID + "-" + cluster
	if len(name) <= longest {
		return name
	}
	sum := sha256.Sum256([]byte(name))
	return name[:longest-17] + "-" + hex.EncodeToString(sum[:8])
}

// Carries reports whether an instruction says the same as an allocation.
func Carries(instruction *broker.ReservationInstruction, allocation *broker.Allocation) bool {
	return instruction.Spec.TargetClusterID == allocation.Cluster &&
		equality.Semantic.DeepEqual(instruction.Spec.RequestedResources, allocation.Resources) &&
		equality.Semantic.DeepEqual(instruction.Spec.PodSets, allocation.PodSets)
}

// Consumer keeps the ReservationInstructions.
type Consumer struct {
	client    client.Client
	namespace string
	mirror    *transport.Mirror[protocol.ConsumerView]
	feed      feed
}

// NewConsumer keeps instructions in namespace as the mirror says.
func NewConsumer(c client.Client, namespace string, mirror *transport.Mirror[protocol.ConsumerView]) *Consumer {
	return &Consumer{client: c, namespace: namespace, mirror: mirror}
}

// SetupWithManager adds the controller. SetupIndex comes before.
func (c *Consumer) SetupWithManager(mgr manager.Manager) error {
	return builder.ControllerManagedBy(mgr).Named("reservation-instructions").
		Watches(&broker.ReservationInstruction{}, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
			if id := o.(*broker.ReservationInstruction).Spec.ReservationName; id != "" {
				return []reconcile.Request{{NamespacedName: types.NamespacedName{Name: id}}}
			}
			return nil
		})).
		WatchesRawSource(follow(&c.feed, c.mirror, func(v protocol.ConsumerView) string { return v.ID })).
		WithOptions(controller.Options{MaxConcurrentReconciles: 4}).
		Complete(c)
}

// Reconcile makes the instructions of one reservation what the broker says.
func (c *Consumer) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	if request == everything {
		var all broker.ReservationInstructionList
		if err := c.client.List(ctx, &all, client.InNamespace(c.namespace)); err != nil {
			return reconcile.Result{}, fmt.Errorf("listing ReservationInstructions: %w", err)
		}
		for _, have := range all.Items {
			c.feed.add(have.Spec.ReservationName)
		}
		return reconcile.Result{}, nil
	}
	if !c.mirror.Synced() {
		// The Relist to come queues everything again.
		return reconcile.Result{}, nil
	}
	id := request.Name
	var have broker.ReservationInstructionList
	if err := c.client.List(ctx, &have, client.InNamespace(c.namespace), client.MatchingFields{IndexReservation: id}); err != nil {
		return reconcile.Result{}, fmt.Errorf("listing the ReservationInstructions of %s: %w", id, err)
	}
	existing := map[string]*broker.ReservationInstruction{}
	for i := range have.Items {
		existing[have.Items[i].Name] = &have.Items[i]
	}
	var errs []error
	if view, ok := c.mirror.Get(id); ok {
		for i := range view.Status.Allocations {
			allocation := &view.Status.Allocations[i]
			name := ReservationInstructionName(id, allocation.Cluster)
			if !allocation.Accepted {
				// The first is written when the provider has agreed. An older one
				// stays in force while the provider thinks about a change.
				delete(existing, name)
				continue
			}
			errs = append(errs, c.ensure(ctx, name, existing[name], &view, allocation))
			delete(existing, name)
		}
	}
	for _, gone := range existing {
		err := c.client.Delete(ctx, gone, client.Preconditions{UID: &gone.UID})
		if client.IgnoreNotFound(err) != nil {
			errs = append(errs, fmt.Errorf("deleting ReservationInstruction %s: %w", gone.Name, err))
		}
	}
	return reconcile.Result{}, errors.Join(errs...)
}

func (c *Consumer) ensure(ctx context.Context, name string, have *broker.ReservationInstruction, view *protocol.ConsumerView, allocation *broker.Allocation) error {
	spec := broker.ReservationInstructionSpec{
		ReservationName:    view.ID,
		ReservationUID:     view.UID,
		SourceNamespace:    view.SourceNamespace,
		SourceName:         view.SourceName,
		SourceUID:          view.SourceUID,
		TargetClusterID:    allocation.Cluster,
		RequestedCPU:       orZero(allocation.Resources.CPU),
		RequestedMemory:    orZero(allocation.Resources.Memory),
		RequestedResources: allocation.Resources,
		PodSets:            allocation.PodSets,
		Endpoint:           allocation.Endpoint,
		PeerKey:            view.PeerKeys[allocation.Cluster],
		PricePerHour:       allocation.PricePerHour,
		Message:            view.Status.Summary,
		ExpiresAt:          view.Status.ExpiresAt,
		Attempt:            view.Status.Attempt.Number,
	}
	if have == nil {
		made := &broker.ReservationInstruction{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: c.namespace, Name: name,
				Labels: map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway},
			},
			Spec: spec,
		}
		if err := c.client.Create(ctx, made); err != nil {
			return fmt.Errorf("creating ReservationInstruction %s: %w", name, err)
		}
		return nil
	}
	if have.Spec.ReservationUID != spec.ReservationUID {
		// Another Reservation of the same name: no status of the former one may
		// answer for it. The deletion enqueues it again.
		return client.IgnoreNotFound(c.client.Delete(ctx, have, client.Preconditions{UID: &have.UID}))
	}
	// The reservation's attempts also count what happens at other providers. This
	// instruction's attempt moves when its own amount does, or else every change
	// elsewhere would close a virtual node that already carries its grant.
	if Carries(have, allocation) {
		spec.Attempt = have.Spec.Attempt
	} else {
		spec.Attempt = max(spec.Attempt, have.Spec.Attempt+1)
	}
	if equality.Semantic.DeepEqual(have.Spec, spec) {
		return nil
	}
	changed := have.DeepCopy()
	changed.Spec = spec
	if err := c.client.Patch(ctx, changed, client.MergeFromWithOptions(have, client.MergeFromWithOptimisticLock{})); err != nil {
		return fmt.Errorf("updating ReservationInstruction %s: %w", name, err)
	}
	return nil
}

func orZero(q *resource.Quantity) resource.Quantity {
	if q == nil {
		return resource.Quantity{}
	}
	return q.DeepCopy()
}
