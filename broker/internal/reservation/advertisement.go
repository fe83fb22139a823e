package reservation

import (
	"context"
	"fmt"
	"time"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/retry"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/log"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
)

// rewriteAfter is how old, by the agent's own clock, the stored copy of an
// advertisement may be that says nothing new. Its next one is written all the
// same: people see that it is alive, and what it refused is asked again.
const rewriteAfter = 5 * time.Minute

// StoreAdvertisement creates or updates the ClusterAdvertisement named
// spec.ClusterID and brings its account (reserved, available, active) up to
// date. An advertisement that says nothing new costs no write. The caller has
// checked that the spec is the cluster's own, and has noted its receipt in
// Freshness before: reservations that wait are tried again at once.
func (r *Reconciler) StoreAdvertisement(ctx context.Context, spec broker.ClusterAdvertisementSpec) error {
	config, err := r.config(ctx)
	if err != nil {
		return err
	}
	err = r.untilWritten(ctx, func() error {
		ad := broker.ClusterAdvertisement{}
		key := client.ObjectKey{Namespace: r.namespace, Name: spec.ClusterID}
		err := r.live.Get(ctx, key, &ad)
		switch {
		case apierrors.IsNotFound(err):
			ad = broker.ClusterAdvertisement{
				ObjectMeta: metav1.ObjectMeta{
					Namespace: key.Namespace, Name: key.Name,
					Labels: map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway},
				},
				Spec: spec,
			}
			if err := r.client.Create(ctx, &ad); err != nil {
				return fmt.Errorf("creating the advertisement of %s: %w", spec.ClusterID, err)
			}
		case err != nil:
			return fmt.Errorf("reading the advertisement of %s: %w", spec.ClusterID, err)
		case news(ad.Spec, spec):
			ad.Spec = spec
			if err := r.client.Update(ctx, &ad); err != nil {
				return fmt.Errorf("updating the advertisement of %s: %w", spec.ClusterID, err)
			}
		}
		return r.settle(ctx, &ad, true)
	})
	if err != nil {
		return err
	}
	r.mu.Lock()
	now := r.clock.Now()
	last, ever := r.stored[spec.ClusterID]
	r.stored[spec.ClusterID] = now
	r.mu.Unlock()
	if !ever || now.Sub(last) > config.freshFor {
		select {
		case r.wake <- event.GenericEvent{Object: &broker.ClusterAdvertisement{ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: spec.ClusterID}}}:
		default: // one that nobody has taken yet wakes the same
		}
	}
	return nil
}

// news reports whether an advertisement says more than that time has passed.
func news(stored, received broker.ClusterAdvertisementSpec) bool {
	if received.Timestamp.Sub(stored.Timestamp.Time).Abs() >= rewriteAfter {
		return true
	}
	stored.Timestamp, stored.Sequence = received.Timestamp, received.Sequence
	return !apiequality.Semantic.DeepEqual(stored, received)
}

// settle writes the account and the activity into an advertisement's status, if
// they are not there yet.
func (r *Reconciler) settle(ctx context.Context, ad *broker.ClusterAdvertisement, active bool) error {
	before := ad.Status.DeepCopy()
	ledger.Settle(&ad.Spec, &ad.Status)
	ad.Status.Active, ad.Status.Phase = active, broker.AdvertisementActive
	ad.Status.ObservedGeneration = ad.Generation
	ready := metav1.Condition{
		Type: broker.ConditionReady, Status: metav1.ConditionTrue, Reason: "Advertised", Message: "The cluster has advertised lately.",
		ObservedGeneration: ad.Generation, LastTransitionTime: metav1.Time{Time: r.clock.Now()},
	}
	if !active {
		ad.Status.Phase = broker.AdvertisementStale
		ready.Status, ready.Reason = metav1.ConditionFalse, "Silent"
		ready.Message = "The cluster has not advertised for long; what it holds stays held. See whether its agent runs and reaches the broker."
	}
	meta.SetStatusCondition(&ad.Status.Conditions, ready)
	if apiequality.Semantic.DeepEqual(*before, ad.Status) {
		return nil
	}
	if err := r.client.Status().Update(ctx, ad); err != nil {
		return fmt.Errorf("writing the account of %s: %w", ad.Spec.ClusterID, err)
	}
	return nil
}

// reconcileAdvertisement sweeps holds of reservations that are gone, and keeps
// the account and the activity current.
func (r *Reconciler) reconcileAdvertisement(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	var ad broker.ClusterAdvertisement
	if err := r.client.Get(ctx, request.NamespacedName, &ad); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	config, err := r.config(ctx)
	if err != nil {
		return ctrl.Result{}, err
	}
	orphans, err := r.orphans(ctx, &ad)
	if err != nil {
		return ctrl.Result{}, err
	}
	if ledger.Sweep(&ad.Status, orphans...) {
		log.FromContext(ctx).Info("Sweeping holds whose reservation is gone", "cluster", ad.Spec.ClusterID, "reservationUIDs", orphans)
		ledger.Settle(&ad.Spec, &ad.Status)
		if err := r.client.Status().Update(ctx, &ad); err != nil {
			return r.lostOr(fmt.Errorf("sweeping the ledger of %s: %w", ad.Spec.ClusterID, err))
		}
	}
	active, _ := r.activity(ad.Spec.ClusterID, config)
	if err := r.settle(ctx, &ad, active); err != nil {
		return r.lostOr(err)
	}
	if !active {
		return ctrl.Result{}, nil
	}
	return ctrl.Result{RequeueAfter: max(config.staleAfter-r.clock.Since(r.lastSign(ad.Spec.ClusterID)), time.Second)}, nil
}

func (r *Reconciler) lostOr(err error) (ctrl.Result, error) {
	if lost(err) {
		lockConflicts.Inc()
		return ctrl.Result{RequeueAfter: retryLost}, nil
	}
	return ctrl.Result{}, err
}

// orphans lists the holds that promise something to a reservation that is gone,
// by a live read.
func (r *Reconciler) orphans(ctx context.Context, ad *broker.ClusterAdvertisement) ([]types.UID, error) {
	var gone []types.UID
	for _, hold := range ad.Status.Holds {
		if hold.Promised.Empty() {
			continue
		}
		exists := false
		for _, from := range []client.Reader{r.client, r.live} {
			var reservation broker.Reservation
			err := from.Get(ctx, client.ObjectKey{Namespace: r.namespace, Name: hold.ReservationName}, &reservation)
			if client.IgnoreNotFound(err) != nil {
				return nil, fmt.Errorf("reading the reservation of a hold: %w", err)
			}
			if exists = err == nil && reservation.UID == hold.ReservationUID; exists {
				break
			}
		}
		if !exists {
			gone = append(gone, hold.ReservationUID)
		}
	}
	return gone, nil
}

// untilWritten repeats a read and its compare-and-swap while others are first.
func (r *Reconciler) untilWritten(ctx context.Context, write func() error) error {
	backoff := wait.Backoff{Duration: 10 * time.Millisecond, Factor: 1.5, Jitter: 0.5, Steps: 10}
	return retry.OnError(backoff, func(err error) bool {
		again := ctx.Err() == nil && (apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err))
		if again {
			lockConflicts.Inc()
		}
		return again
	}, write)
}
