package virtualnode

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// Need is what the pods of a Reservation need.
type Need struct {
	// Pending pods have no node and may overflow.
	Pending []*corev1.Pod
	// Bound is the number of pods on each provider's virtual node that have not
	// finished.
	Bound map[string]int32
}

// Pods is the number of pods that need capacity.
func (n Need) Pods() int32 {
	total := int32(len(n.Pending))
	for _, pods := range n.Bound {
		total += pods
	}
	return total
}

// Need returns what the pods of the Reservation with a key need. Pending pods count only if
// the namespace is opted in.
func (r *Reconciler) Need(ctx context.Context, reservation *broker.Reservation, key demand.Key) (Need, error) {
	need := Need{Bound: map[string]int32{}}
	var namespace corev1.Namespace
	if err := r.client.Get(ctx, client.ObjectKey{Name: reservation.Namespace}, &namespace); err != nil {
		return need, fmt.Errorf("reading namespace %s: %w", reservation.Namespace, err)
	}
	byHand, err := r.byHand(ctx)
	if err != nil {
		return need, err
	}
	if err := r.Pods.WaitSynced(ctx); err != nil {
		return need, err
	}
	shapes := map[string]bool{}
	optedIn, resolve := namespace.Labels[broker.LabelOverflow] == broker.OverflowEnabled, r.ResolveOwners(ctx)
	for _, g := range r.Pods.observe(r.Pods.ofNamespace, reservation.Namespace) {
		switch {
		case g.use == waits && optedIn && g.belongsTo(reservation, key, resolve):
			need.Pending = append(need.Pending, g.all()...)
			shapes[g.shape] = true
		// What is charged to a Reservation made by hand uses that instead.
		case g.use == runs && !byHand[g.hold] && g.belongsTo(reservation, key, resolve):
			provider, err := BoundTo(ctx, r.client, g.node)
			if err != nil {
				return need, err
			}
			if provider != "" {
				need.Bound[provider] += g.Count
			}
		}
	}
	if key.IsGang() && len(need.Bound) == 0 && isOutdated(reservation.Spec.PodSets, shapes) {
		need.Pending = nil
	}
	return need, nil
}

// isOutdated reports whether a gang's Reservation, which no pod runs with, was made for pods
// that have come back with other requests: it lacks the shape of a pod, and has one that no
// pod has. The scheduler then waits for its end, to request capacity for the pods as they are
// now.
func isOutdated(sets []broker.PodSet, pending map[string]bool) bool {
	used := 0
	for _, set := range sets {
		if pending[set.Name] {
			used++
		}
	}
	return used < len(pending) && used < len(sets)
}

// belongsTo reports whether pods have the key of a Reservation. Pods whose owner is gone
// belong to it by their hold label.
func (g observed) belongsTo(reservation *broker.Reservation, key demand.Key, resolve demand.Resolve) bool {
	if !key.IsGang() && g.shape != key.Shape && g.hold == "" {
		return false // whatever their owner is
	}
	owner, ok := demand.OwnerOf(g.member, resolve)
	if !ok {
		return reservation.Status.ID != "" && g.hold == demand.HoldLabel(reservation.Status.ID)
	}
	// Those of a gang belong to it whatever their shape.
	return owner.UID == key.OwnerUID && (key.IsGang() || g.shape == key.Shape)
}
