package pods

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/spillway-dev/spillway/agent/internal/virtualnode"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// leavingRetry is how often the capacity for pods that must leave is looked for.
const leavingRetry = 5 * time.Second

// moveLeaving evicts the pods of which the provider has withdrawn the capacity. Before the
// deadline as many as have other capacity, of those that the provider has marked and those
// that are not Ready: the others run. At the deadline all must go. A PodDisruptionBudget may
// hold them up for longer. A pod without a controller stays until it ends or the provider
// ends it. It returns when to requeue the provider.
func (r *Reconciler) moveLeaving(ctx context.Context, provider string, state *providerState) (requeueAfter time.Duration, err error) {
	leaving, err := r.nodes.Leaving(ctx, provider)
	if err != nil {
		return virtualnode.ResyncPeriod, err
	}
	requeueAfter = virtualnode.ResyncPeriod
	var errs []error
	for _, l := range leaving {
		after, err := r.moveOne(ctx, l, provider, state)
		requeueAfter, errs = min(requeueAfter, after), append(errs, err)
	}
	return requeueAfter, errors.Join(errs...)
}

// moveOne is moveLeaving for one grant.
func (r *Reconciler) moveOne(ctx context.Context, l virtualnode.Leaving, provider string, state *providerState) (requeueAfter time.Duration, err error) {
	// One at a time: of two providers that withdraw from one Reservation, each would count
	// the places elsewhere for itself.
	r.moving.Lock()
	defer r.moving.Unlock()
	now := r.nodes.Clock.Now()
	requeueAfter = virtualnode.ResyncPeriod
	due, cause := len(l.Pods), "the provider has withdrawn its capacity, and the time to leave is over"
	left := l.By.Sub(now)
	if left > 0 {
		requeueAfter = min(requeueAfter, left, leavingRetry)
		cause = "the provider has withdrawn its capacity, and other capacity can be used"
		if r.movedSince(l, now.Add(-leavingRetry)) {
			return requeueAfter, nil // the replacement of the last one may not be there yet
		}
		if due, err = r.elsewhere(ctx, l, provider); err != nil {
			return requeueAfter, err
		}
	}
	var errs []error
	for _, pod := range l.Pods {
		switch {
		case due <= 0:
		case pod.DeletionTimestamp != nil:
			due-- // it takes the place of its replacement already
		case left > 0 && virtualnode.Ready(pod) && !virtualnode.MustLeave(pod):
		default:
			evicted, after, err := r.evictOrReport(ctx, pod, provider, cause, state.stuck, "PodMustLeave", "Pod must leave the virtual node")
			errs, requeueAfter = append(errs, err), min(requeueAfter, after)
			if evicted {
				due--
				r.noteMove(l, now)
			}
		}
	}
	return requeueAfter, errors.Join(errs...)
}

// movedSince reports whether pods of a Reservation were evicted after a time because their
// capacity was withdrawn, by any provider.
func (r *Reconciler) movedSince(l virtualnode.Leaving, since time.Time) bool {
	return l.Reservation != nil && r.moved[l.Reservation.UID].After(since)
}

func (r *Reconciler) noteMove(l virtualnode.Leaving, now time.Time) {
	maps.DeleteFunc(r.moved, func(_ types.UID, at time.Time) bool { return now.Sub(at) > leavingRetry })
	if l.Reservation != nil {
		r.moved[l.Reservation.UID] = now
	}
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
	replaced, err := r.replacedAtOthers(ctx, l, provider)
	return max(0, Elsewhere(l.Reservation.Status.Allocations, need, provider)-replaced), err
}

// replacedAtOthers is the number of pods of a Reservation that are leaving other providers
// because these have withdrawn their capacity: each takes the place of its replacement.
func (r *Reconciler) replacedAtOthers(ctx context.Context, l virtualnode.Leaving, provider string) (terminating int, err error) {
	instructions, err := r.nodes.Instructions(ctx, l.Reservation)
	if err != nil {
		return 0, err
	}
	for i := range instructions {
		other := instructions[i].Spec.TargetClusterID
		if other == provider || instructions[i].Spec.Withdrawal == nil {
			continue
		}
		leaving, err := r.nodes.Leaving(ctx, other)
		if err != nil {
			return 0, err
		}
		for _, from := range leaving {
			if from.Reservation == nil || from.Reservation.UID != l.Reservation.UID {
				continue
			}
			for _, pod := range from.Pods {
				if pod.DeletionTimestamp != nil {
					terminating++
				}
			}
		}
	}
	return terminating, nil
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
