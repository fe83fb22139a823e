package pods

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/spillway-dev/spillway/agent/internal/virtualnode"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Surplus tracks a Reservation that requests more pods than are needed. The zero
// value has seen none.
type Surplus struct {
	reservation types.UID

	since time.Time
	peak  int32
}

// Observe records the need at a time. Once it has been below the requested pods
// throughout the grace period, due is true and target is the peak of the need in
// that time. Before, wait is the rest of the period; zero without a surplus.
func (s *Surplus) Observe(now time.Time, need, requested int32, grace time.Duration) (target int32, wait time.Duration, due bool) {
	if need >= requested {
		s.since, s.peak = time.Time{}, 0
		return requested, 0, false
	}
	if s.since.IsZero() || s.peak >= requested {
		// The first observation, also since the count was lowered to the peak.
		s.since, s.peak = now, need
	}
	s.peak = max(s.peak, need)
	if left := s.since.Add(grace).Sub(now); left > 0 {
		return requested, left, false
	}
	return s.peak, 0, true
}

// Retain distributes target pods over the providers of instructions: first to
// those that are bound, then where most are, so that other providers become free
// altogether. The result has an entry for each instruction, in their order.
func Retain(target int32, instructions []broker.ReservationInstruction, bound map[string]int32) []broker.RetainedPods {
	retained := make([]broker.RetainedPods, len(instructions))
	order := make([]int, len(instructions))
	for i, in := range instructions {
		retained[i], order[i] = broker.RetainedPods{Cluster: in.Spec.TargetClusterID, Attempt: in.Spec.Attempt}, i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(bound[retained[b].Cluster], bound[retained[a].Cluster]) })
	for _, i := range order {
		retained[i].Count = min(virtualnode.PodsOf(instructions[i].Spec.PodSets), bound[retained[i].Cluster], target)
		target -= retained[i].Count
	}
	for _, i := range order {
		more := min(virtualnode.PodsOf(instructions[i].Spec.PodSets)-retained[i].Count, target)
		retained[i].Count += more
		target -= more
	}
	return retained
}

// surplusOf returns what is remembered of a Reservation.
func (r *Reconciler) surplusOf(reservation *broker.Reservation) *Surplus {
	r.mu.Lock()
	defer r.mu.Unlock()
	name := client.ObjectKeyFromObject(reservation)
	if s := r.surpluses[name]; s == nil || s.reservation != reservation.UID {
		r.surpluses[name] = &Surplus{reservation: reservation.UID}
	}
	return r.surpluses[name]
}

// untrack removes what is remembered of a Reservation that is gone.
func (r *Reconciler) untrack(name types.NamespacedName) {
	r.mu.Lock()
	delete(r.surpluses, name)
	r.mu.Unlock()
	r.nodes.SetRelease(name, "", nil)
}

// release returns capacity that has not been needed for the grace period: the
// virtual nodes shrink, the pods there are read from the API server, then the count
// is lowered, or the Reservation deleted if no pod is left.
func (r *Reconciler) release(ctx context.Context, reservation *broker.Reservation, need virtualnode.Need) (requeueAfter time.Duration, err error) {
	if reservation.Status.Phase == broker.ReservationReleased {
		// It has expired at the broker. The scheduler creates another if pods still
		// need it.
		return 0, client.IgnoreNotFound(r.client.Delete(ctx, reservation, client.Preconditions{UID: &reservation.UID}))
	}
	name, requested := client.ObjectKeyFromObject(reservation), virtualnode.PodsOf(reservation.Spec.PodSets)
	needed := need.Pods()
	if len(reservation.Spec.PodSets) > 1 && needed > 0 {
		// A gang of several shapes keeps its capacity as a whole: the number of pods does
		// not say which of them are left.
		needed = requested
	}
	target, wait, due := r.surplusOf(reservation).Observe(r.nodes.Clock.Now(), needed, requested, r.ReleaseGrace)
	if !due {
		// Also once the count has been lowered: the release is complete.
		r.nodes.SetRelease(name, reservation.UID, nil)
		return min(cmp.Or(wait, virtualnode.ResyncPeriod), virtualnode.ResyncPeriod), nil
	}
	instructions, err := r.nodes.Instructions(ctx, reservation)
	if err != nil {
		return 0, err
	}
	retained := Retain(target, instructions, need.Bound)
	r.nodes.SetRelease(name, reservation.UID, retained)
	shrunk, err := r.nodes.Shrunk(ctx, instructions, retained)
	switch {
	case err != nil:
		return 0, err
	case !shrunk:
		return retryDelay, nil
	case target == 0:
		log.FromContext(ctx).Info("Deleting a Reservation that no pod needs", "requested", requested)
		err := r.client.Delete(ctx, reservation, client.Preconditions{UID: &reservation.UID, ResourceVersion: &reservation.ResourceVersion})
		return 0, client.IgnoreNotFound(err)
	}
	log.FromContext(ctx).Info("Lowering a Reservation to the pods that need it", "requested", requested, "needed", target, "retained", retained)
	changed := reservation.DeepCopy()
	changed.Spec.PodSets[0].Count, changed.Spec.Retained = target, retained
	if err := r.client.Patch(ctx, changed, client.MergeFromWithOptions(reservation, client.MergeFromWithOptimisticLock{})); client.IgnoreNotFound(err) != nil {
		return 0, fmt.Errorf("lowering Reservation %s/%s: %w", reservation.Namespace, reservation.Name, err)
	}
	return retryDelay, nil
}
