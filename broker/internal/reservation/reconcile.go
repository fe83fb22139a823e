package reservation

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/log"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
)

// The delay before a reconcile is retried after a conflict doubles with each further one.
const (
	conflictRetryAfter    = 20 * time.Millisecond
	maxConflictRetryAfter = 5 * time.Second
)

// Reconcile brings one Reservation up to date. All writes are compare-and-swaps on the
// versions that the plan was computed from.
func (r *Reconciler) Reconcile(ctx context.Context, name string) (ctrl.Result, error) {
	if err := r.takeOver(ctx); err != nil {
		return ctrl.Result{}, err
	}
	in, err := r.snapshot(ctx, name)
	if apierrors.IsNotFound(err) {
		r.forget(name)
	}
	if err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	p := newPlan(in)
	r.note(in)
	r.rememberImpossible(name, p.impossible.reason != "")
	if write, until := in.outdated(p); !r.mayWrite(write, in.now) {
		r.conflicts.Forget("reservation/" + name)
		return in.requeueBy(until), nil
	}
	if p.writes() {
		read, err := r.readAttempt(ctx, in)
		if err != nil {
			return ctrl.Result{}, err
		}
		if read {
			r.readLedgers(&in)
			p = newPlan(in)
		}
	}
	if err := r.commit(ctx, in, p); err != nil {
		return r.requeueOnConflict(ctx, "reservation/"+name, err)
	}
	r.conflicts.Forget("reservation/" + name)
	return in.requeue(), nil
}

// commit writes the changes of a plan.
func (r *Reconciler) commit(ctx context.Context, in snapshot, p plan) error {
	if err := r.addFinalizer(ctx, in); err != nil {
		return err
	}
	if err := r.writeAttempt(ctx, in, p); err != nil {
		return err
	}
	for _, c := range p.grow {
		r.answers.Asked(c.cluster, in.reservation.UID, c.capacity, in.now)
	}
	if err := r.writeHolds(ctx, &in, p); err != nil {
		return err
	}
	if err := r.writeStatus(ctx, in, p); err != nil {
		return err
	}
	return r.removeFinalizer(ctx, in)
}

func (r *Reconciler) addFinalizer(ctx context.Context, in snapshot) error {
	reservation := in.reservation
	if !in.needsFinalizer() || in.deleted() || !controllerutil.AddFinalizer(reservation, broker.FinalizerLedger) {
		return nil
	}
	if err := r.client.Update(ctx, reservation); err != nil {
		return fmt.Errorf("adding the finalizer: %w", err)
	}
	r.store.putReservation(reservation.DeepCopy())
	return nil
}

// writeAttempt is write (a): it records the attempt before any hold has its number. What
// is released cannot fail: its status is written at once. The release of a deleted
// Reservation is not recorded: since the deletion, nothing is granted, no version of before
// can be written, and nothing is placed any more.
func (r *Reconciler) writeAttempt(ctx context.Context, in snapshot, p plan) error {
	if p.empty() || in.deleted() {
		return nil
	}
	reservation := in.reservation
	if recordsFirst(in, p) {
		return r.recordFirst(ctx, reservation, p.attempt)
	}
	before := reservation.Status
	if len(p.grow) > 0 {
		if err := r.followWithdrawals(ctx, &in); err != nil {
			return err
		}
		// What is released, because the consumer cannot use it, ceases to be granted first.
		in.shrunk(p).followLowered()
		if before.Phase == "" {
			reservation.Status.Phase = broker.ReservationPending
		}
	}
	reservation.Status.Attempt = p.attempt
	if len(p.grow) == 0 {
		reservation.Status = nextStatus(in.shrunk(p), p, true)
	}
	if err := r.putStatus(ctx, reservation, &before); err != nil {
		return fmt.Errorf("recording attempt %d: %w", p.attempt.Number, err)
	}
	return nil
}

// shrunk is the snapshot after the plan's releases.
func (in snapshot) shrunk(p plan) snapshot {
	in.advertisements = slices.Clone(in.advertisements)
	for _, c := range p.shrink {
		at, found := in.find(c.cluster)
		if !found {
			continue
		}
		ad := draft(in.advertisements[at])
		ledger.Shrink(&ad.Status, in.reservation.UID, p.attempt.Number, c.capacity)
		in.advertisements[at] = ad
	}
	return in
}

// writeHolds is write (b): it changes the holds, if they are still those that the plan
// was computed from. The snapshot then has the written ledgers.
func (r *Reconciler) writeHolds(ctx context.Context, in *snapshot, p plan) error {
	uid, attempt := in.reservation.UID, p.attempt.Number
	before := map[string]*broker.Hold{}
	for _, h := range in.holds() {
		before[h.cluster] = &h.Hold
	}
	for _, cluster := range p.fence {
		if err := r.writeHold(ctx, cluster, uid, before[cluster], func(ad *broker.ClusterAdvertisement) (bool, error) {
			return ledger.Fence(&ad.Status, uid, attempt-1), nil
		}); err != nil {
			return err
		}
	}
	for _, c := range p.shrink {
		if err := r.writeHold(ctx, c.cluster, uid, before[c.cluster], func(ad *broker.ClusterAdvertisement) (bool, error) {
			return ledger.Shrink(&ad.Status, uid, attempt, c.capacity), nil
		}); err != nil {
			return err
		}
	}
	for _, c := range p.grow {
		if err := r.writeHold(ctx, c.cluster, uid, before[c.cluster], func(ad *broker.ClusterAdvertisement) (bool, error) {
			return ledger.Place(&ad.Spec, &ad.Status, growth(in.reservation, attempt, c.capacity))
		}); err != nil {
			return err
		}
	}
	if p.writes() {
		r.readLedgers(in)
		r.note(*in)
	}
	return nil
}

// writeHold changes a hold that is still as it was before, nil for none. If another
// writer is first, it fails: that the hold is the same does not show that the Reservation
// is, and a plan of a former leader must not be carried out on a newer ledger.
func (r *Reconciler) writeHold(ctx context.Context, cluster string, uid types.UID, before *broker.Hold, change func(*broker.ClusterAdvertisement) (bool, error)) error {
	tried := false
	_, err := r.committer.commit(ctx, cluster, func(ad *broker.ClusterAdvertisement) (edited, error) {
		now := ledger.Find(&ad.Status, uid)
		if tried || (now == nil) != (before == nil) || now != nil && !sameHold(now, before) {
			return edited{}, errOutdated
		}
		changed, err := change(ad)
		tried = changed
		return edited{status: changed}, err
	})
	if err != nil {
		return fmt.Errorf("changing the hold in %s: %w", cluster, err)
	}
	return nil
}

// writeStatus is write (c): the Reservation's status follows the ledger.
func (r *Reconciler) writeStatus(ctx context.Context, in snapshot, p plan) error {
	reservation := in.reservation
	before := reservation.Status
	if in.statusDue() {
		reservation.Status = nextStatus(in, p, !p.empty())
	}
	if !apiequality.Semantic.DeepEqual(before, reservation.Status) {
		if err := r.putStatus(ctx, reservation, &before); err != nil {
			return fmt.Errorf("writing the status: %w", err)
		}
		r.observeScores(p.decision)
	}
	if len(p.grow) > 0 {
		decisionLatency.Observe(r.clock.Since(in.now).Seconds())
	}
	return nil
}

// putStatus writes a Reservation's status, and reports what has changed since before.
func (r *Reconciler) putStatus(ctx context.Context, reservation *broker.Reservation, before *broker.ReservationStatus) error {
	if err := r.client.Status().Update(ctx, reservation); err != nil {
		return err
	}
	r.store.putReservation(reservation.DeepCopy())
	r.book.Written(reservation.Name, reservation.UID, r.clock.Now())
	r.reportChanges(ctx, reservation, before)
	return nil
}

// reportChanges records what has changed in a Reservation's status since before.
func (r *Reconciler) reportChanges(ctx context.Context, reservation *broker.Reservation, before *broker.ReservationStatus) {
	r.recordChanges(reservation, before)
	if status := &reservation.Status; status.Phase != before.Phase {
		r.observePhase(reservation)
		log.FromContext(ctx).Info("Reservation entered a phase", "phase", status.Phase, "summary", status.Summary, "attempt", status.Attempt.Number)
	}
}

// removeFinalizer removes the finalizer of a Reservation that has ended, once there is
// nothing to wait for.
func (r *Reconciler) removeFinalizer(ctx context.Context, in snapshot) error {
	reservation := in.reservation
	if in.needsFinalizer() || !controllerutil.RemoveFinalizer(reservation, broker.FinalizerLedger) {
		return nil
	}
	if err := r.client.Update(ctx, reservation); err != nil {
		return fmt.Errorf("removing the finalizer: %w", err)
	}
	if !in.deleted() || len(reservation.Finalizers) > 0 {
		r.store.putReservation(reservation.DeepCopy())
		return nil
	}
	r.store.removeReservation(reservation)
	// What no status says.
	before := reservation.Status
	reservation.Status = reservation.EffectiveStatus()
	r.reportChanges(ctx, reservation, &before)
	r.forgetSeries(reservation.Spec.RequesterID)
	return nil
}

// requeueOnConflict requeues an object if another writer was first: after a short delay,
// which doubles each time until the caller forgets the object's conflicts.
func (r *Reconciler) requeueOnConflict(ctx context.Context, object string, err error) (ctrl.Result, error) {
	if !isConflict(err) {
		return ctrl.Result{}, err
	}
	lockConflicts.Inc()
	retryAfter := r.conflicts.When(object)
	log.FromContext(ctx).V(1).Info("Requeueing because of a concurrent write", "reason", err.Error(), "retryAfter", retryAfter.String())
	return ctrl.Result{RequeueAfter: retryAfter}, nil
}

// isConflict reports whether a compare-and-swap failed because of a concurrent write.
func isConflict(err error) bool {
	var insufficient *ledger.InsufficientError
	var full *ledger.FullError
	return apierrors.IsConflict(err) || apierrors.IsNotFound(err) || errors.Is(err, errOutdated) || errors.As(err, &insufficient) || errors.As(err, &full)
}

// editStatus changes a Reservation's status. It starts from what the store knows, and
// reads live if another writer was first or if there is nothing to change. The edit may
// be called again. If it returns an error, nothing is written.
func (r *Reconciler) editStatus(ctx context.Context, name string, edit func(*broker.Reservation) (changed bool, err error)) error {
	known := r.store.reservation(name)
	live := known == nil
	for try := 1; ; try++ {
		if live {
			known = &broker.Reservation{}
			if err := r.live.Get(ctx, r.key(name), known); err != nil {
				return fmt.Errorf("reading the reservation: %w", err)
			}
		}
		reservation := known.DeepCopy()
		changed, err := edit(reservation)
		if (err != nil || !changed) && live {
			return err
		}
		if err == nil && changed {
			if err = r.putStatus(ctx, reservation, &known.Status); err == nil {
				return nil
			}
			if !apierrors.IsConflict(err) || try == maxCommitTries || ctx.Err() != nil {
				return err
			}
			lockConflicts.Inc()
		}
		live = true
	}
}
