package reservation

import (
	"context"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/spillway-dev/spillway/broker/protocol"
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

// renew renews the lease of a Reservation while pods use its capacity.
func (r *Reconciler) renew(ctx context.Context, s *state) (reconcile.Result, error) {
	return r.renewLease(ctx, s.view, s.id, s.local.UID, s.now)
}

// renewLease renews the lease of a reservation while pods use the capacity of the
// Reservation with a UID, with one call in each interval.
func (r *Reconciler) renewLease(ctx context.Context, view *protocol.ConsumerView, id string, source types.UID, now time.Time) (reconcile.Result, error) {
	if r.inUse == nil || view == nil || len(view.Status.Allocations) == 0 {
		r.forgetRenewal(id)
		return reconcile.Result{}, nil
	}
	interval := renewalInterval(view.Status.LeaseDuration)
	if interval == 0 {
		r.forgetRenewal(id)
		return reconcile.Result{}, nil
	}
	r.mu.Lock()
	last, checked := r.renewed[id]
	r.mu.Unlock()
	if due := last.Add(interval); checked && now.Before(due) {
		return reconcile.Result{RequeueAfter: due.Sub(now)}, nil
	}
	inUse, known := r.inUse(source)
	if !known {
		return reconcile.Result{RequeueAfter: min(useUnknownRetryAfter, interval)}, nil
	}
	if inUse {
		if err := r.Broker.Renew(ctx, id, view.UID); err != nil {
			return reconcile.Result{}, fmt.Errorf("renewing the lease of reservation %s: %w", id, err)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.renewed[id] = now
	return reconcile.Result{RequeueAfter: interval}, nil
}

func (r *Reconciler) forgetRenewal(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.renewed, id)
}
