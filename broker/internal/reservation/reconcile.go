package reservation

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/log"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/commit"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
	"github.com/spillway-dev/spillway/broker/internal/plan"
)

// reconcile brings one Reservation up to date. All writes are compare-and-swaps on the
// versions that the plan was computed from.
func (r *Reconciler) reconcile(ctx context.Context, name string) (ctrl.Result, error) {
	if !r.takeOver(ctx) {
		return ctrl.Result{}, ctx.Err()
	}
	known := r.store.Reservation(name)
	if known == nil {
		r.forget(name)
		return ctrl.Result{}, nil
	}
	in := r.input(known.DeepCopy(), r.store.Settings())
	p := plan.New(in)
	r.note(in)
	r.rememberImpossible(name, p.Impossible.Reason != "")
	if write, until := in.Outdated(p); !r.mayWrite(write, in.Now) {
		r.conflicts.Forget("reservation/" + name)
		return r.requeue(in, until), nil
	}
	if p.Writes() {
		read, err := r.readAttempt(ctx, in)
		if err != nil {
			return ctrl.Result{}, err
		}
		if read {
			r.readLedgers(&in, true)
			p = plan.New(in)
		}
	}
	placed := func() {}
	if requester := known.Spec.RequesterID; in.Settings.Capacity != nil && len(p.Grow) > 0 {
		if _, busy := r.placing.LoadOrStore(requester, true); busy {
			return r.conflicts.Requeue(ctx, "reservation/"+name, fmt.Errorf("another Reservation of %s is being placed: %w", requester, commit.ErrOutdated))
		}
		placed = sync.OnceFunc(func() { r.placing.Delete(requester) })
		defer placed()
		r.readLedgers(&in, true)
		p = plan.New(in)
	}
	if err := r.commit(ctx, in, p, placed); err != nil {
		return r.conflicts.Requeue(ctx, "reservation/"+name, err)
	}
	r.conflicts.Forget("reservation/" + name)
	return r.requeue(in, time.Time{}), nil
}

// mayWrite reports whether something is to be written now. A positive answer for figures counts as
// a write.
func (r *Reconciler) mayWrite(write plan.Urgency, now time.Time) bool {
	return write == plan.News || write == plan.Figures && r.figures.AllowN(now, 1)
}

// requeue requeues the Reservation for when it is due, or earlier, by a time that is not zero.
func (r *Reconciler) requeue(in plan.Input, by time.Time) (result ctrl.Result) {
	var refusedUntil time.Time
	if in.Queued() {
		_, refusedUntil = r.refused(in, in.Requested())
	}
	if due := in.Due(refusedUntil); !due.IsZero() {
		result.RequeueAfter = due.Sub(in.Now)
	}
	if after := by.Sub(in.Now); !by.IsZero() && (result.RequeueAfter == 0 || after < result.RequeueAfter) {
		result.RequeueAfter = after
	}
	return result
}

// commit writes the changes of a plan. It calls placed when the holds are written.
func (r *Reconciler) commit(ctx context.Context, in plan.Input, p plan.Plan, placed func()) error {
	if err := r.addFinalizer(ctx, in); err != nil {
		return err
	}
	if err := r.writeAttempt(ctx, in, p); err != nil {
		return err
	}
	for _, c := range p.Grow {
		r.answers.Asked(c.Cluster, in.Reservation.UID, c.Capacity, in.Now)
	}
	if err := r.writeHolds(ctx, &in, p); err != nil {
		return err
	}
	placed()
	if err := r.writeStatus(ctx, in, p); err != nil {
		return err
	}
	return r.removeFinalizer(ctx, in)
}

func (r *Reconciler) addFinalizer(ctx context.Context, in plan.Input) error {
	reservation := in.Reservation
	if !in.NeedsFinalizer() || in.Deleted() || !controllerutil.AddFinalizer(reservation, broker.FinalizerLedger) {
		return nil
	}
	if err := r.hub.Client.Update(ctx, reservation); err != nil {
		return fmt.Errorf("adding the finalizer: %w", err)
	}
	r.store.PutReservation(reservation.DeepCopy())
	return nil
}

// writeAttempt is write (a): it records the attempt before any hold has its number. What
// is released cannot fail: its status is written at once. The release of a deleted
// Reservation is not recorded: since the deletion, nothing is granted, no version of before
// can be written, and nothing is placed any more.
func (r *Reconciler) writeAttempt(ctx context.Context, in plan.Input, p plan.Plan) error {
	if p.Empty() || in.Deleted() {
		return nil
	}
	reservation := in.Reservation
	if plan.RecordsFirst(in, p) {
		return r.recordFirst(ctx, reservation, p.Attempt)
	}
	before := reservation.Status
	if len(p.Grow) > 0 {
		if err := r.readOverstated(ctx, &in); err != nil {
			return err
		}
	}
	reservation.Status = plan.Recorded(in, p)
	if err := r.putStatus(ctx, reservation, &before); err != nil {
		return fmt.Errorf("recording attempt %d: %w", p.Attempt.Number, err)
	}
	return nil
}

// writeHolds is write (b): it changes the holds, if they are still those that the plan
// was computed from. The input then has the written ledgers.
func (r *Reconciler) writeHolds(ctx context.Context, in *plan.Input, p plan.Plan) error {
	uid, attempt := in.Reservation.UID, p.Attempt.Number
	before := map[string]*broker.Hold{}
	for _, h := range in.Holds() {
		before[h.Cluster] = &h.Hold
	}
	for _, cluster := range p.Fence {
		if err := r.writeHold(ctx, cluster, uid, before[cluster], func(ad *broker.ClusterAdvertisement) (bool, error) {
			return ledger.Fence(&ad.Status, uid, attempt-1), nil
		}); err != nil {
			return err
		}
	}
	for _, c := range p.Shrink {
		if err := r.writeHold(ctx, c.Cluster, uid, before[c.Cluster], func(ad *broker.ClusterAdvertisement) (bool, error) {
			return ledger.Shrink(&ad.Status, uid, attempt, c.Capacity), nil
		}); err != nil {
			return err
		}
	}
	for _, c := range p.Grow {
		if err := r.writeHold(ctx, c.Cluster, uid, before[c.Cluster], func(ad *broker.ClusterAdvertisement) (bool, error) {
			return ledger.Place(&ad.Spec, &ad.Status, plan.Growth(in.Reservation, attempt, c.Capacity))
		}); err != nil {
			return err
		}
	}
	if p.Writes() {
		r.readLedgers(in, false)
		r.note(*in)
	}
	return nil
}

// writeHold changes a hold that is still as it was before, nil for none. If another
// writer is first, it fails: that the hold is the same does not show that the Reservation
// is, and a plan of a former leader must not be carried out on a newer ledger.
func (r *Reconciler) writeHold(ctx context.Context, cluster string, uid types.UID, before *broker.Hold, change func(*broker.ClusterAdvertisement) (bool, error)) error {
	tried := false
	_, err := r.committer.Commit(ctx, cluster, func(ad *broker.ClusterAdvertisement) (commit.Edited, error) {
		now := ledger.Find(&ad.Status, uid)
		if tried || (now == nil) != (before == nil) || now != nil && !(ledger.SameVersion(now, before) && apiequality.Semantic.DeepEqual(now, before)) {
			return commit.Edited{}, commit.ErrOutdated
		}
		changed, err := change(ad)
		tried = changed
		return commit.Edited{Status: changed}, err
	})
	if err != nil {
		return fmt.Errorf("changing the hold in %s: %w", cluster, err)
	}
	return nil
}

// writeStatus is write (c): the Reservation's status follows the ledger.
func (r *Reconciler) writeStatus(ctx context.Context, in plan.Input, p plan.Plan) error {
	reservation := in.Reservation
	before := reservation.Status
	if in.StatusDue() {
		reservation.Status = plan.Status(in, p, !p.Empty())
	}
	if !apiequality.Semantic.DeepEqual(before, reservation.Status) {
		if err := r.putStatus(ctx, reservation, &before); err != nil {
			return fmt.Errorf("writing the status: %w", err)
		}
		r.observeScores(p.Decision)
	}
	if len(p.Grow) > 0 {
		decisionLatency.Observe(r.clock.Since(in.Now).Seconds())
	}
	return nil
}

// putStatus writes a Reservation's status, and reports what has changed since before.
func (r *Reconciler) putStatus(ctx context.Context, reservation *broker.Reservation, before *broker.ReservationStatus) error {
	if err := r.hub.Client.Status().Update(ctx, reservation); err != nil {
		return err
	}
	r.store.PutReservation(reservation.DeepCopy())
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
func (r *Reconciler) removeFinalizer(ctx context.Context, in plan.Input) error {
	reservation := in.Reservation
	if in.NeedsFinalizer() || !controllerutil.ContainsFinalizer(reservation, broker.FinalizerLedger) {
		return nil
	}
	if in.Deleted() && r.history != nil {
		if err := r.history.Ended(ctx, reservation, in.Times.Deleted); err != nil {
			return err
		}
	}
	controllerutil.RemoveFinalizer(reservation, broker.FinalizerLedger)
	if err := r.hub.Client.Update(ctx, reservation); err != nil {
		return fmt.Errorf("removing the finalizer: %w", err)
	}
	if !in.Deleted() || len(reservation.Finalizers) > 0 {
		r.store.PutReservation(reservation.DeepCopy())
		return nil
	}
	r.store.RemoveReservation(reservation)
	// What no status says.
	before := reservation.Status
	reservation.Status = reservation.EffectiveStatus()
	r.reportChanges(ctx, reservation, &before)
	r.forgetSeries(reservation.Spec.RequesterID)
	return nil
}

// editStatus changes a Reservation's status. It starts from what the store knows, and
// reads live if another writer was first or if there is nothing to change. The edit may
// be called again. If it returns an error, nothing is written.
func (r *Reconciler) editStatus(ctx context.Context, name string, edit func(*broker.Reservation) (changed bool, err error)) error {
	known := r.store.Reservation(name)
	live := known == nil
	for try := 1; ; try++ {
		if live {
			known = &broker.Reservation{}
			if err := r.hub.Live.Get(ctx, r.hub.Key(name), known); err != nil {
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
			if !apierrors.IsConflict(err) || try == commit.MaxTries || ctx.Err() != nil {
				return err
			}
			commit.LockConflicts.Inc()
		}
		live = true
	}
}

// recordFirst is write (a) for the first attempt of a Reservation. It is recorded in an
// annotation, since the write that ends the tracking of fields cannot change the status.
func (r *Reconciler) recordFirst(ctx context.Context, reservation *broker.Reservation, attempt broker.Attempt) error {
	status := reservation.Status
	metav1.SetMetaDataAnnotation(&reservation.ObjectMeta, broker.AnnotationFirstAttempt, strings.Join(attempt.Clusters, ","))
	reservation.ManagedFields = commit.Untracked()
	if err := r.hub.Client.Update(ctx, reservation); err != nil {
		return fmt.Errorf("recording the first attempt: %w", err)
	}
	r.store.PutReservation(reservation.DeepCopy())
	reservation.Status = status
	adoptAttempt(reservation)
	return nil
}

// adoptAttempt sets the first attempt in the status of a Reservation that has it in its
// annotation only.
func adoptAttempt(reservation *broker.Reservation) {
	if clusters := reservation.FirstAsked(); clusters != nil {
		reservation.Status.Attempt = broker.Attempt{Number: 1, Clusters: clusters}
	}
}
