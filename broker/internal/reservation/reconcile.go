package reservation

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/log"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/decide"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
)

// retryLost is how soon a lost compare-and-swap is tried anew.
const retryLost = 20 * time.Millisecond

// config is the BrokerConfig with its defaults filled in.
type config struct {
	weights              broker.ScoreWeights
	staleAfter, freshFor time.Duration
	maxDuration          time.Duration
}

// limit is how long a reservation may last, 0 for as long as it is needed.
func (c config) limit(asked *metav1.Duration) time.Duration {
	switch {
	case asked == nil:
		return c.maxDuration
	case c.maxDuration > 0:
		return min(asked.Duration, c.maxDuration)
	default:
		return asked.Duration
	}
}

func (r *Reconciler) config(ctx context.Context) (config, error) {
	out := config{weights: decide.DefaultWeights, staleAfter: 10 * time.Minute, freshFor: 90 * time.Second}
	var object broker.BrokerConfig
	err := r.client.Get(ctx, client.ObjectKey{Namespace: r.namespace, Name: configName}, &object)
	if apierrors.IsNotFound(err) {
		return out, nil
	} else if err != nil {
		return out, fmt.Errorf("reading the BrokerConfig: %w", err)
	}
	if object.Spec.Weights != nil {
		out.weights = *object.Spec.Weights
	}
	if d := object.Spec.StaleAfter; d != nil {
		out.staleAfter = d.Duration
	}
	if d := object.Spec.FreshFor; d != nil {
		out.freshFor = d.Duration
	}
	if d := object.Spec.MaxDuration; d != nil {
		out.maxDuration = d.Duration
	}
	return out, nil
}

// gather reads everything that a plan depends on. The reservation comes first:
// if it is unchanged when the attempt is written, nothing was committed for it
// between the two reads.
func (r *Reconciler) gather(ctx context.Context, from client.Reader, name string) (gathered, error) {
	in := gathered{now: r.clock.Now(), active: map[string]bool{}, fresh: map[string]bool{}, silentAt: map[string]time.Time{}}
	var err error
	if in.config, err = r.config(ctx); err != nil {
		return in, err
	}
	in.reservation = &broker.Reservation{}
	if err := from.Get(ctx, client.ObjectKey{Namespace: r.namespace, Name: name}, in.reservation); err != nil {
		return in, err
	}
	var list broker.ClusterAdvertisementList
	if err := from.List(ctx, &list, client.InNamespace(r.namespace)); err != nil {
		return in, fmt.Errorf("listing advertisements: %w", err)
	}
	// An agent beside the broker keeps a copy of its advertisement here, under
	// another name: it is for people, and no second offer.
	in.advertisements = slices.DeleteFunc(list.Items, func(a broker.ClusterAdvertisement) bool { return a.Name != a.Spec.ClusterID })
	slices.SortFunc(in.advertisements, func(a, b broker.ClusterAdvertisement) int {
		return cmp.Compare(a.Spec.ClusterID, b.Spec.ClusterID)
	})
	for i := range in.advertisements {
		id := in.advertisements[i].Spec.ClusterID
		in.active[id], in.fresh[id] = r.activity(id, in.config)
		in.silentAt[id] = r.lastSign(id).Add(in.config.freshFor)
	}
	return in, nil
}

// activity says whether a cluster has advertised lately, and whether lately
// enough for a new placement. What a broker that has just taken over has not
// heard yet is not fresh, but it is active until it has been silent for long.
func (r *Reconciler) activity(cluster string, c config) (active, fresh bool) {
	silence := r.clock.Since(r.lastSign(cluster))
	_, ever := r.freshness.ReceivedAt(cluster)
	return silence < c.staleAfter, ever && silence <= c.freshFor
}

// lastSign is when a cluster last advertised; where this broker has not heard it
// yet, when it took over.
func (r *Reconciler) lastSign(cluster string) time.Time {
	if received, ever := r.freshness.ReceivedAt(cluster); ever {
		return received
	}
	return r.since()
}

// reconcile brings one reservation a step further. Whatever it writes rests on
// a live read: the cache only tells that there is something to do.
func (r *Reconciler) reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	in, err := r.gather(ctx, r.client, request.Name)
	if err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if in.settled() {
		return in.wakeAt(), nil
	}
	start := r.clock.Now()
	if in, err = r.gather(ctx, r.live, request.Name); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if err := r.step(ctx, in, start); err != nil {
		if lost(err) {
			lockConflicts.Inc()
			log.FromContext(ctx).V(1).Info("Another writer was first; trying anew", "reason", err.Error())
			return ctrl.Result{RequeueAfter: retryLost}, nil
		}
		return ctrl.Result{}, err
	}
	return in.wakeAt(), nil
}

// settled reports whether there is nothing to write.
func (in gathered) settled() bool {
	r := in.reservation
	if !r.DeletionTimestamp.IsZero() {
		return !controllerutil.ContainsFinalizer(r, broker.FinalizerLedger)
	}
	p := makePlan(in)
	return controllerutil.ContainsFinalizer(r, broker.FinalizerLedger) && len(p.changes()) == 0 &&
		sameStatus(r.Status, nextStatus(in, p, false))
}

// wakeAt asks for another look when the reservation ends, or when an answer is
// overdue.
func (in gathered) wakeAt() ctrl.Result {
	var result ctrl.Result
	at := func(when time.Time) {
		if pause := max(when.Sub(in.now), time.Second); result.RequeueAfter == 0 || pause < result.RequeueAfter {
			result.RequeueAfter = pause
		}
	}
	if over(in.reservation, in.now) {
		return result
	}
	if expires := in.reservation.Status.ExpiresAt; expires != nil {
		at(expires.Time)
	}
	for _, h := range holdsOf(in.reservation, in.advertisements) {
		if due := in.silentAt[h.cluster]; in.now.Before(due) && !ledger.Pending(h.hold).Empty() {
			at(due)
		}
	}
	return result
}

// lost reports whether a compare-and-swap failed because somebody else wrote.
func lost(err error) bool {
	var full *ledger.InsufficientError
	return apierrors.IsConflict(err) || apierrors.IsNotFound(err) || errors.As(err, &full)
}

// step makes a plan and commits it.
func (r *Reconciler) step(ctx context.Context, in gathered, start time.Time) error {
	reservation := in.reservation
	if reservation.DeletionTimestamp.IsZero() && controllerutil.AddFinalizer(reservation, broker.FinalizerLedger) {
		if err := r.client.Update(ctx, reservation); err != nil {
			return fmt.Errorf("adding the ledger's finalizer: %w", err)
		}
	}
	p := makePlan(in)
	committing := len(p.changes()) > 0
	if committing {
		if err := r.writeAttempt(ctx, reservation, p.attempt); err != nil {
			return err
		}
		for _, c := range p.shrink {
			if err := r.commit(ctx, in, c, func(ad *broker.ClusterAdvertisement) error {
				ledger.Shrink(&ad.Status, reservation.UID, p.attempt.Number, c.capacity)
				return nil
			}); err != nil {
				return err
			}
		}
		for _, c := range p.grow {
			if err := r.commit(ctx, in, c, func(ad *broker.ClusterAdvertisement) error {
				_, err := ledger.Place(&ad.Spec, &ad.Status, growth(reservation, p.attempt.Number, c.capacity))
				return err
			}); err != nil {
				return err
			}
		}
	}
	if err := r.writeStatus(ctx, in, p, committing); err != nil {
		return err
	}
	if len(p.grow) > 0 {
		decisionLatency.Observe(r.clock.Since(start).Seconds())
	}
	if !reservation.DeletionTimestamp.IsZero() && len(holdsOf(reservation, in.advertisements)) == 0 &&
		controllerutil.RemoveFinalizer(reservation, broker.FinalizerLedger) {
		if err := r.client.Update(ctx, reservation); err != nil {
			return fmt.Errorf("removing the ledger's finalizer: %w", err)
		}
	}
	return nil
}

// writeAttempt is write (a): it announces the attempt before any hold carries
// its number.
func (r *Reconciler) writeAttempt(ctx context.Context, reservation *broker.Reservation, attempt broker.Attempt) error {
	reservation.Status.Attempt = attempt
	if reservation.Status.Phase == "" {
		reservation.Status.Phase = broker.ReservationPending
		reservationsTotal.WithLabelValues(string(broker.ReservationPending), reservation.Spec.RequesterID).Inc()
	}
	if err := r.client.Status().Update(ctx, reservation); err != nil {
		return fmt.Errorf("announcing attempt %d: %w", attempt.Number, err)
	}
	return nil
}

// commit is write (b): it changes one hold in the ledger of the very
// advertisement that the plan was made on.
func (r *Reconciler) commit(ctx context.Context, in gathered, c change, apply func(*broker.ClusterAdvertisement) error) error {
	at := slices.IndexFunc(in.advertisements, func(ad broker.ClusterAdvertisement) bool { return ad.Spec.ClusterID == c.cluster })
	ad := in.advertisements[at].DeepCopy()
	if err := apply(ad); err != nil {
		return fmt.Errorf("changing the hold in %s: %w", c.cluster, err)
	}
	ledger.Settle(&ad.Spec, &ad.Status)
	if err := r.client.Status().Update(ctx, ad); err != nil {
		return fmt.Errorf("writing the ledger of %s: %w", c.cluster, err)
	}
	in.advertisements[at] = *ad
	return nil
}

// writeStatus is write (c): the reservation's status follows the ledger.
func (r *Reconciler) writeStatus(ctx context.Context, in gathered, p plan, committed bool) error {
	reservation := in.reservation
	before := reservation.Status
	reservation.Status = nextStatus(in, p, committed)
	if sameStatus(before, reservation.Status) {
		return nil
	}
	if err := r.client.Status().Update(ctx, reservation); err != nil {
		return fmt.Errorf("writing the reservation's status: %w", err)
	}
	r.tell(ctx, reservation, before)
	return nil
}

// tell records what the change of status means to people.
func (r *Reconciler) tell(ctx context.Context, reservation *broker.Reservation, before broker.ReservationStatus) {
	status := &reservation.Status
	if status.Decision != nil {
		for _, s := range status.Decision.Scores {
			clusterScore.WithLabelValues(s.Cluster).Set(parseScore(s.Score))
		}
	}
	queued := func(s *broker.ReservationStatus) bool {
		return meta.IsStatusConditionTrue(s.Conditions, broker.ConditionQueued)
	}
	if queued(status) && !queued(&before) {
		message := meta.FindStatusCondition(status.Conditions, broker.ConditionQueued).Message
		r.event(reservation, corev1.EventTypeNormal, "Queued", "Queue", message)
	}
	if status.Phase == before.Phase {
		return
	}
	reservationsTotal.WithLabelValues(string(status.Phase), reservation.Spec.RequesterID).Inc()
	log.FromContext(ctx).Info("Reservation changed its phase", "phase", status.Phase, "summary", status.Summary, "attempt", status.Attempt.Number)
	switch status.Phase {
	case broker.ReservationReserved:
		r.event(reservation, corev1.EventTypeNormal, "Reserved", "Reserve", "Reserved "+status.Summary+".")
	case broker.ReservationActive:
		reservationDuration.Observe(r.clock.Since(reservation.CreationTimestamp.Time).Seconds())
	case broker.ReservationReleased:
		r.event(reservation, corev1.EventTypeNormal, "Released", "Release", meta.FindStatusCondition(status.Conditions, broker.ConditionReady).Message)
	case broker.ReservationFailed:
		r.event(reservation, corev1.EventTypeWarning, "Failed", "Reserve", meta.FindStatusCondition(status.Conditions, broker.ConditionReady).Message)
	}
}

func (r *Reconciler) event(reservation *broker.Reservation, kind, reason, action, message string) {
	const maxNote = 1000 // what the events API takes is 1 kB
	if len(message) > maxNote {
		message = message[:maxNote]
	}
	r.recorder.Eventf(reservation, nil, kind, reason, action, "%s", message)
}

// waiting lists the reservations that lack something.
func (r *Reconciler) waiting(ctx context.Context) []types.NamespacedName {
	var list broker.ReservationList
	if err := r.client.List(ctx, &list, client.InNamespace(r.namespace)); err != nil {
		log.FromContext(ctx).Error(err, "Listing the reservations that wait")
		return nil
	}
	var names []types.NamespacedName
	for i := range list.Items {
		item := &list.Items[i]
		if item.Status.Phase == "" || meta.IsStatusConditionTrue(item.Status.Conditions, broker.ConditionQueued) {
			names = append(names, client.ObjectKeyFromObject(item))
		}
	}
	return names
}
