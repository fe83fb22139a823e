package virtualnode

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/spillway-dev/spillway/agent/internal/peering"
)

// reconcileIdle parks the virtual node of a provider without grants, and removes
// the peering once it has been idle for long enough.
func (r *Reconciler) reconcileIdle(ctx context.Context, state *peeringState, s *Snapshot) (requeueAfter time.Duration, err error) {
	r.setCarried(s.Provider, nil)
	observed, err := r.observePeering(ctx, s.Provider)
	if err != nil {
		return 0, err
	}
	if observed == nil && !state.terminating {
		r.deleteState(s.Provider)
		return 0, nil
	}
	if !state.terminating {
		now := r.Clock.Now()
		if keep := keepPeering(s, state.lastGrant, now, r.PeeringIdleTime, r.FinishedPodRetention); keep > 0 {
			if observed.Node == nil && s.Node == nil {
				return keep, nil
			}
			return r.park(ctx, state, s, keep)
		}
		// The cache may not show the latest grant or pod yet.
		live, err := r.gather(ctx, r.live, s.Provider)
		if err != nil {
			return 0, err
		}
		if len(live.Grants) > 0 || len(live.Ungranted) > 0 {
			return minRetry, nil
		}
		log.FromContext(ctx).Info("Removing an idle peering", "provider", s.Provider, "idleFor", now.Sub(state.lastGrant).Round(time.Second).String())
		state.terminating = true
	}
	return r.teardown(ctx, state, s.Provider)
}

// observePeering returns the peering with a provider; nil if there is none.
func (r *Reconciler) observePeering(ctx context.Context, provider string) (*peering.Observed, error) {
	all, err := r.driver.Observe(ctx)
	if err != nil {
		return nil, fmt.Errorf("listing peerings: %w", err)
	}
	i := slices.IndexFunc(all, func(o peering.Observed) bool { return o.ClusterID == provider })
	if i < 0 {
		return nil, nil
	}
	return &all[i], nil
}

// keepPeering is how long to keep a peering without grants before looking again,
// at most the resync period; 0 if it is to be removed now.
func keepPeering(s *Snapshot, lastGrant, now time.Time, idleTime, retention time.Duration) time.Duration {
	keep := lastGrant.Add(idleTime).Sub(now)
	for _, pod := range s.Finished {
		keep = max(keep, finishedAt(pod).Add(retention).Sub(now))
	}
	if len(s.Ungranted) > 0 {
		keep = resyncPeriod
	}
	return min(max(keep, 0), resyncPeriod)
}

// finishedAt is about when a pod ended: the last transition of its conditions.
func finishedAt(pod *corev1.Pod) time.Time {
	at := pod.CreationTimestamp.Time
	for _, c := range pod.Status.Conditions {
		if c.LastTransitionTime.After(at) {
			at = c.LastTransitionTime.Time
		}
	}
	return at
}

// park shrinks the virtual node to what still runs there.
func (r *Reconciler) park(ctx context.Context, state *peeringState, s *Snapshot, requeueAfter time.Duration) (time.Duration, error) {
	parked, err := r.driver.EnsureCapacity(ctx, state.peer, NodePlan(s))
	if err != nil {
		return 0, fmt.Errorf("parking the virtual node of %s: %w", s.Provider, err)
	}
	if !parked.Done {
		requeueAfter = min(requeueAfter, maxRetry)
	}
	return requeueAfter, nil
}

// teardown takes the next step of removing a peering.
func (r *Reconciler) teardown(ctx context.Context, state *peeringState, provider string) (requeueAfter time.Duration, err error) {
	logger := log.FromContext(ctx).WithValues("provider", provider)
	gone, err := r.driver.Teardown(ctx, state.peer)
	if err != nil {
		return 0, fmt.Errorf("removing the peering with %s: %w", provider, err)
	}
	if !gone.Done {
		logger.V(1).Info("Waiting for the peering to be removed", "reason", gone.Message)
		return state.backOff(), nil
	}
	logger.Info("Removed the peering")
	r.deleteState(provider)
	return 0, nil
}
