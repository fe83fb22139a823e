package pods

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spillway-dev/spillway/agent/internal/virtualnode"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// leavingRetry is how often the capacity for pods that must leave is looked for.
const leavingRetry = 5 * time.Second

// moveLeaving evicts the pods of which the provider has withdrawn the capacity. Before the
// deadline those that are not Ready, as many as have other capacity: the others run, and
// their node may come back. At the deadline all must go. A PodDisruptionBudget may hold
// them up for longer. A pod without a controller stays until it ends or the provider ends
// it. It returns when to requeue the provider.
func (r *Reconciler) moveLeaving(ctx context.Context, provider string, state *providerState) (requeueAfter time.Duration, err error) {
	leaving, err := r.nodes.Leaving(ctx, provider)
	if err != nil || len(leaving) == 0 {
		return virtualnode.ResyncPeriod, err
	}
	requeueAfter = virtualnode.ResyncPeriod
	var errs []error
	for _, l := range leaving {
		now := r.nodes.Clock.Now()
		due, cause := len(l.Pods), "the provider has withdrawn its capacity, and the time to leave is over"
		left := l.By.Sub(now)
		if left > 0 {
			requeueAfter = min(requeueAfter, left, leavingRetry)
			cause = "the provider has withdrawn its capacity, and other capacity can be used"
			if now.Before(state.lastMove.Add(leavingRetry)) {
				continue // the replacement of the last one may not be there yet
			}
			if due, err = r.elsewhere(ctx, l, provider); err != nil {
				errs = append(errs, err)
				continue
			}
		}
		for _, pod := range l.Pods {
			switch {
			case due <= 0:
			case pod.DeletionTimestamp != nil:
				due-- // it takes the place of its replacement already
			case left > 0 && virtualnode.Ready(pod):
			default:
				evicted, after, err := r.evictOrReport(ctx, pod, provider, cause, state.stuck, "PodMustLeave", "Pod must leave the virtual node")
				errs, requeueAfter = append(errs, err), min(requeueAfter, after)
				if evicted {
					due--
					state.lastMove = now
				}
			}
		}
	}
	return requeueAfter, errors.Join(errs...)
}

// elsewhere is for how many of the leaving pods, terminating ones included, a Reservation
// has usable capacity at other providers that no other pod is about to take. Which pending
// pods will use a Reservation made by hand is not known: its pods leave at the deadline.
func (r *Reconciler) elsewhere(ctx context.Context, l virtualnode.Leaving, provider string) (pods int, err error) {
	if l.Reservation == nil || l.ByHand {
		return 0, nil
	}
	key, ok := demand.KeyOfReservation(l.Reservation)
	if !ok {
		return 0, nil
	}
	need, err := r.nodes.Need(ctx, l.Reservation, key)
	if err != nil {
		return 0, fmt.Errorf("counting the pods of Reservation %s/%s: %w", l.Reservation.Namespace, l.Reservation.Name, err)
	}
	return Elsewhere(l.Reservation.Status.Allocations, need, provider), nil
}

// Elsewhere is the number of usable places in allocations of other providers that neither
// bound nor pending pods need.
func Elsewhere(allocations []broker.Allocation, need virtualnode.Need, provider string) int {
	free := -len(need.Pending)
	for _, a := range allocations {
		if a.Cluster != provider {
			free += max(0, int(a.Usable()-need.Bound[a.Cluster]))
		}
	}
	return max(0, free)
}
