package main

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// virtualCapacity is what a virtual node provides for pods.
func virtualCapacity(pods int32) corev1.ResourceList {
	n := int64(pods)
	return corev1.ResourceList{corev1.ResourceCPU: *resource.NewQuantity(n, resource.DecimalSI),
		corev1.ResourceMemory: *resource.NewQuantity(n<<30, resource.BinarySI), corev1.ResourcePods: *resource.NewQuantity(n, resource.DecimalSI)}
}

// play grants every Reservation as broker and agents do, the first one after some time: the
// virtual node grows, then the Reservation's status shows the grant. It returns when ctx ends.
func (h *home) play(after time.Duration) func(ctx context.Context) error {
	return func(ctx context.Context) error {
		watch, err := h.api.Watch(ctx, &broker.ReservationList{})
		if err != nil {
			return err
		}
		defer watch.Stop()
		requested := map[client.ObjectKey]int32{}
		for {
			select {
			case <-ctx.Done():
				return nil
			case event, open := <-watch.ResultChan():
				r, ok := event.Object.(*broker.Reservation)
				if ctx.Err() != nil {
					return nil
				}
				if !open || !ok {
					return fmt.Errorf("the watch of Reservations has ended: %v", event.Object)
				}
				key := client.ObjectKeyFromObject(r)
				if requested[key] == r.Spec.PodSets[0].Count {
					continue
				}
				if len(requested) == 0 {
					time.Sleep(after)
				}
				requested[key] = r.Spec.PodSets[0].Count
				if err := h.grant(ctx, r, requested); err != nil && ctx.Err() == nil {
					return fmt.Errorf("granting %s: %w", key, err)
				}
			}
		}
	}
}

// grant writes the virtual node and the status of a Reservation.
func (h *home) grant(ctx context.Context, r *broker.Reservation, requested map[client.ObjectKey]int32) error {
	var pods int32
	for _, n := range requested {
		pods += n
	}
	if err := h.resize(ctx, pods); err != nil {
		return err
	}
	before := r.DeepCopy()
	r.Status = broker.ReservationStatus{Phase: broker.ReservationActive, ID: "rome-" + string(r.UID), ObservedGeneration: r.Generation,
		Allocations: []broker.Allocation{{Cluster: provider, PodSets: r.Spec.PodSets, Accepted: true, VirtualNodeReady: true}},
		Conditions: []metav1.Condition{{Type: broker.ConditionReady, Status: metav1.ConditionTrue, Reason: "Granted", LastTransitionTime: metav1.Now(),
			ObservedGeneration: r.Generation}}}
	return h.api.Status().Patch(ctx, r, client.MergeFrom(before))
}

// deleteReservations deletes those of a namespace, and shrinks the virtual node.
func (h *home) deleteReservations(ctx context.Context, namespace string) error {
	if err := h.api.DeleteAllOf(ctx, &broker.Reservation{}, client.InNamespace(namespace)); err != nil {
		return fmt.Errorf("deleting the Reservations of %s: %w", namespace, err)
	}
	return h.resize(ctx, 0)
}

// resize makes the virtual node provide capacity for pods.
func (h *home) resize(ctx context.Context, pods int32) error {
	var node corev1.Node
	if err := h.api.Get(ctx, client.ObjectKey{Name: broker.VirtualNodeName(provider)}, &node); err != nil {
		return err
	}
	node.Status.Capacity, node.Status.Allocatable = virtualCapacity(pods), virtualCapacity(pods)
	if err := h.api.Status().Update(ctx, &node); err != nil {
		return fmt.Errorf("resizing the virtual node: %w", err)
	}
	return nil
}
