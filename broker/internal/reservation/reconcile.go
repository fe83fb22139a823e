package reservation

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/retry"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/log"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
)

// conflictRetryAfter is the delay before a reconcile is retried after a conflict.
const conflictRetryAfter = 20 * time.Millisecond

// Reconcile brings one Reservation up to date. The cache only shows whether there is
// something to do: all writes are based on live reads.
func (r *Reconciler) Reconcile(ctx context.Context, name string) (ctrl.Result, error) {
	in, err := r.snapshot(ctx, r.client, name)
	if err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if in.upToDate() {
		return in.requeue(), nil
	}
	if in, err = r.snapshot(ctx, r.live, name); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if err := r.commit(ctx, in); err != nil {
		return requeueOnConflict(ctx, err)
	}
	return in.requeue(), nil
}

// commit computes a plan and writes its changes.
func (r *Reconciler) commit(ctx context.Context, in snapshot) error {
	if err := r.addFinalizer(ctx, in.reservation); err != nil {
		return err
	}
	p := newPlan(in)
	if err := r.writeAttempt(ctx, in, p); err != nil {
		return err
	}
	if err := r.writeHolds(ctx, in, p); err != nil {
		return err
	}
	if err := r.writeStatus(ctx, in, p); err != nil {
		return err
	}
	return r.removeFinalizer(ctx, in)
}

func (r *Reconciler) addFinalizer(ctx context.Context, reservation *broker.Reservation) error {
	if !reservation.DeletionTimestamp.IsZero() || !controllerutil.AddFinalizer(reservation, broker.FinalizerLedger) {
		return nil
	}
	if err := r.client.Update(ctx, reservation); err != nil {
		return fmt.Errorf("adding the finalizer: %w", err)
	}
	return nil
}

// writeAttempt is write (a): it records the attempt before any hold has its number.
func (r *Reconciler) writeAttempt(ctx context.Context, in snapshot, p plan) error {
	if p.empty() {
		return nil
	}
	reservation := in.reservation
	created := reservation.Status.Phase == ""
	if created {
		reservation.Status.Phase = broker.ReservationPending
	}
	reservation.Status.Attempt = p.attempt
	if err := r.client.Status().Update(ctx, reservation); err != nil {
		return fmt.Errorf("recording attempt %d: %w", p.attempt.Number, err)
	}
	if created {
		r.observePhase(reservation)
	}
	return nil
}

// writeHolds is write (b): it changes the holds in the ledgers of the advertisements
// that the plan was computed from.
func (r *Reconciler) writeHolds(ctx context.Context, in snapshot, p plan) error {
	uid, attempt := in.reservation.UID, p.attempt.Number
	for _, c := range p.shrink {
		if err := r.writeHold(ctx, in, c.cluster, func(ad *broker.ClusterAdvertisement) error {
			ledger.Shrink(&ad.Status, uid, attempt, c.capacity)
			return nil
		}); err != nil {
			return err
		}
	}
	for _, c := range p.grow {
		if err := r.writeHold(ctx, in, c.cluster, func(ad *broker.ClusterAdvertisement) error {
			_, err := ledger.Place(&ad.Spec, &ad.Status, growth(in.reservation, attempt, c.capacity))
			return err
		}); err != nil {
			return err
		}
	}
	return nil
}

func (r *Reconciler) writeHold(ctx context.Context, in snapshot, cluster string, change func(*broker.ClusterAdvertisement) error) error {
	at := slices.IndexFunc(in.advertisements, func(ad broker.ClusterAdvertisement) bool { return ad.Spec.ClusterID == cluster })
	ad := in.advertisements[at].DeepCopy()
	if err := change(ad); err != nil {
		return fmt.Errorf("changing the hold in %s: %w", cluster, err)
	}
	ledger.Settle(&ad.Spec, &ad.Status)
	if err := r.client.Status().Update(ctx, ad); err != nil {
		return fmt.Errorf("writing the ledger of %s: %w", cluster, err)
	}
	in.advertisements[at] = *ad
	return nil
}

// writeStatus is write (c): the Reservation's status follows the ledger.
func (r *Reconciler) writeStatus(ctx context.Context, in snapshot, p plan) error {
	reservation := in.reservation
	before := reservation.Status
	reservation.Status = nextStatus(in, p, !p.empty())
	if !apiequality.Semantic.DeepEqual(before, reservation.Status) {
		if err := r.client.Status().Update(ctx, reservation); err != nil {
			return fmt.Errorf("writing the status: %w", err)
		}
		r.recordChanges(reservation, &before)
		observeScores(reservation.Status.Decision)
		if status := &reservation.Status; status.Phase != before.Phase {
			r.observePhase(reservation)
			log.FromContext(ctx).Info("Reservation entered a phase", "phase", status.Phase, "summary", status.Summary, "attempt", status.Attempt.Number)
		}
	}
	if len(p.grow) > 0 {
		decisionLatency.Observe(r.clock.Since(in.now).Seconds())
	}
	return nil
}

// removeFinalizer removes the finalizer of a deleted Reservation once no provider holds
// anything for it.
func (r *Reconciler) removeFinalizer(ctx context.Context, in snapshot) error {
	reservation := in.reservation
	if reservation.DeletionTimestamp.IsZero() || len(in.holds()) > 0 || !controllerutil.RemoveFinalizer(reservation, broker.FinalizerLedger) {
		return nil
	}
	if err := r.client.Update(ctx, reservation); err != nil {
		return fmt.Errorf("removing the finalizer: %w", err)
	}
	return nil
}

// requeueOnConflict requeues after a short delay if another writer was first.
func requeueOnConflict(ctx context.Context, err error) (ctrl.Result, error) {
	if !isConflict(err) {
		return ctrl.Result{}, err
	}
	lockConflicts.Inc()
	log.FromContext(ctx).V(1).Info("Requeueing because of a concurrent write", "reason", err.Error())
	return ctrl.Result{RequeueAfter: conflictRetryAfter}, nil
}

// isConflict reports whether a compare-and-swap failed because of a concurrent write.
func isConflict(err error) bool {
	var insufficient *ledger.InsufficientError
	return apierrors.IsConflict(err) || apierrors.IsNotFound(err) || errors.As(err, &insufficient)
}

// retryOnConflict retries a read and its compare-and-swap. Unlike the function of
// client-go's retry, it also retries a Create that another writer preceded, stops with
// ctx, and counts the conflicts.
func (r *Reconciler) retryOnConflict(ctx context.Context, write func() error) error {
	backoff := wait.Backoff{Duration: 10 * time.Millisecond, Factor: 1.5, Jitter: 0.5, Steps: 10}
	return retry.OnError(backoff, func(err error) bool {
		retriable := ctx.Err() == nil && (apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err))
		if retriable {
			lockConflicts.Inc()
		}
		return retriable
	}, write)
}
