package reservation

import (
	"context"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

const (
	// maxRenewalInterval bounds the interval of renewals, because the broker may shorten a
	// long lease.
	maxRenewalInterval = 5 * time.Minute
	// useUnknownRetryAfter is when to check again whether a Reservation is in use.
	useUnknownRetryAfter = 5 * time.Second
)

// renewalInterval is how often a lease is renewed while it is used: three times in its
// duration. 0 for a lease without one.
func renewalInterval(duration *metav1.Duration) time.Duration {
	if duration == nil || duration.Duration <= 0 {
		return 0
	}
	return max(min(duration.Duration/3, maxRenewalInterval), time.Second)
}

// renew renews the lease of a Reservation while pods use its capacity, with one call in
// each interval.
func (r *Reconciler) renew(ctx context.Context, s *state) (reconcile.Result, error) {
	if r.InUse == nil || s.view == nil || len(s.view.Status.Allocations) == 0 {
		r.forgetRenewal(s.id)
		return reconcile.Result{}, nil
	}
	duration := s.view.Status.LeaseDuration
	if duration == nil {
		// An earlier version of the broker does not say.
		duration = s.local.Spec.Duration
	}
	interval := renewalInterval(duration)
	if interval == 0 {
		r.forgetRenewal(s.id)
		return reconcile.Result{}, nil
	}
	r.mu.Lock()
	last, checked := r.renewed[s.id]
	r.mu.Unlock()
	if due := last.Add(interval); checked && s.now.Before(due) {
		return reconcile.Result{RequeueAfter: due.Sub(s.now)}, nil
	}
	inUse, known := r.InUse(s.local.UID)
	if !known {
		return reconcile.Result{RequeueAfter: min(useUnknownRetryAfter, interval)}, nil
	}
	if inUse {
		if err := r.Broker.Renew(ctx, s.id, s.view.UID); err != nil {
			return reconcile.Result{}, fmt.Errorf("renewing the lease of reservation %s: %w", s.id, err)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.renewed[s.id] = s.now
	return reconcile.Result{RequeueAfter: interval}, nil
}

func (r *Reconciler) forgetRenewal(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.renewed, id)
}
