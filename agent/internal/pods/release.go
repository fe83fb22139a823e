package pods

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Surplus tracks a Reservation that requests more pods than are needed. The zero
// value has seen none.
type Surplus struct {
	since time.Time
	peak  int32
}

// Observe records the need at a time. Once it has been below the requested pods
// throughout the grace period, due is true and target is the peak of the need in
// that time. Before, wait is the rest of the period; zero without a surplus.
func (s *Surplus) Observe(now time.Time, need, requested int32, grace time.Duration) (target int32, wait time.Duration, due bool) {
	if need >= requested {
		*s = Surplus{}
		return requested, 0, false
	}
	if s.since.IsZero() || s.peak >= requested {
		// The first observation, also since the count was lowered to the peak.
		*s = Surplus{since: now, peak: need}
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
		retained[i].Count = min(grantedPods(&instructions[i]), bound[retained[i].Cluster], target)
		target -= retained[i].Count
	}
	for _, i := range order {
		more := min(grantedPods(&instructions[i])-retained[i].Count, target)
		retained[i].Count += more
		target -= more
	}
	return retained
}

func grantedPods(in *broker.ReservationInstruction) int32 {
	return broker.HeldCapacity{PodSets: in.Spec.PodSets}.Pods()
}

func requestedPods(reservation *broker.Reservation) int32 {
	return broker.HeldCapacity{PodSets: reservation.Spec.PodSets}.Pods()
}

// release returns capacity that has not been needed for the grace period: the
// virtual nodes shrink, the pods there are read from the API server, then the count
// is lowered, or the Reservation deleted if no pod is left.
func (r *Reconciler) release(ctx context.Context, reservation *broker.Reservation, need Need) (requeueAfter time.Duration, err error) {
	if reservation.Status.Phase == broker.ReservationReleased {
		// It has expired at the broker. The scheduler creates another if pods still
		// need it.
		return 0, client.IgnoreNotFound(r.client.Delete(ctx, reservation, client.Preconditions{UID: &reservation.UID}))
	}
	target, wait, due := r.track(reservation).Observe(r.Clock.Now(), need.Pods(), requestedPods(reservation), r.ReleaseGrace)
	if !due {
		// Also once the count has been lowered: the release is complete.
		r.nodes.SetRelease(reservation.UID, nil)
		if wait > 0 {
			return min(wait, resyncPeriod), nil
		}
		return resyncPeriod, nil
	}
	instructions, err := r.nodes.Instructions(ctx, reservation)
	if err != nil {
		return 0, err
	}
	retained := Retain(target, instructions, need.Bound)
	r.nodes.SetRelease(reservation.UID, retained)
	shrunk, err := r.shrunk(ctx, instructions, retained)
	switch {
	case err != nil:
		return 0, err
	case !shrunk:
		return releaseRetry, nil
	case target == 0:
		log.FromContext(ctx).Info("Deleting a Reservation that no pod needs", "requested", requestedPods(reservation))
		err := r.client.Delete(ctx, reservation, client.Preconditions{UID: &reservation.UID, ResourceVersion: &reservation.ResourceVersion})
		return 0, client.IgnoreNotFound(err)
	}
	return releaseRetry, r.lowerCount(ctx, reservation, target, retained)
}

// shrunk reports whether the virtual nodes have shrunk to the retained pods, and no
// more pods are bound to them.
func (r *Reconciler) shrunk(ctx context.Context, instructions []broker.ReservationInstruction, retained []broker.RetainedPods) (bool, error) {
	for i := range instructions {
		if in := &instructions[i]; retained[i].Count < grantedPods(in) && !r.nodes.Shrunk(in, retained[i].Count) {
			return false, nil
		}
	}
	// No pod can be on its way to the released slots any more, but the cache may not
	// show the latest one yet.
	for i := range instructions {
		in := &instructions[i]
		if retained[i].Count == grantedPods(in) {
			continue
		}
		if bound, err := r.nodes.BoundPods(ctx, in); err != nil || bound > retained[i].Count {
			return false, err
		}
	}
	return true, nil
}

func (r *Reconciler) lowerCount(ctx context.Context, reservation *broker.Reservation, target int32, retained []broker.RetainedPods) error {
	log.FromContext(ctx).Info("Lowering a Reservation to the pods that need it", "requested", requestedPods(reservation), "needed", target, "retained", retained)
	changed := reservation.DeepCopy()
	changed.Spec.PodSets[0].Count, changed.Spec.Retained = target, retained
	if err := r.client.Patch(ctx, changed, client.MergeFromWithOptions(reservation, client.MergeFromWithOptimisticLock{})); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("lowering Reservation %s/%s: %w", reservation.Namespace, reservation.Name, err)
	}
	return nil
}
