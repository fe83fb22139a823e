package reservation

import (
	"context"
	"fmt"
	"time"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
)

// rewriteAfter is the age, by the agent's clock, at which a stored advertisement is
// replaced by an equal one. The new sequence ends the refusals of the old one, and the
// timestamp shows users that the cluster is alive.
const rewriteAfter = 5 * time.Minute

// StoreAdvertisement creates or updates the ClusterAdvertisement named spec.ClusterID
// and its account (reserved, available, active). An advertisement without changes is
// not written, and not read live. The caller has verified that the spec is the cluster's own, and has
// recorded its receipt in Freshness: a cluster that is fresh again may be chosen for
// queued Reservations at once.
func (r *Reconciler) StoreAdvertisement(ctx context.Context, spec broker.ClusterAdvertisementSpec) error {
	config, err := r.config(ctx)
	if err != nil {
		return err
	}
	upToDate, err := r.upToDate(ctx, &spec)
	if err != nil {
		return err
	}
	if !upToDate {
		err = r.retryOnConflict(ctx, func() error {
			ad, err := r.storeSpec(ctx, spec)
			if err != nil {
				return err
			}
			r.noteStored(ad)
			return r.writeAccount(ctx, ad, true)
		})
		if err != nil {
			return err
		}
	}
	r.noteReceived(spec.ClusterID, config)
	return nil
}

// storeSpec returns the stored advertisement, created or updated if necessary.
func (r *Reconciler) storeSpec(ctx context.Context, spec broker.ClusterAdvertisementSpec) (*broker.ClusterAdvertisement, error) {
	ad := &broker.ClusterAdvertisement{}
	err := r.live.Get(ctx, r.key(spec.ClusterID), ad)
	switch {
	case apierrors.IsNotFound(err):
		ad = &broker.ClusterAdvertisement{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: r.namespace, Name: spec.ClusterID,
				Labels: map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway},
			},
			Spec: spec,
		}
		if err := r.client.Create(ctx, ad); err != nil {
			return nil, fmt.Errorf("creating the advertisement of %s: %w", spec.ClusterID, err)
		}
	case err != nil:
		return nil, fmt.Errorf("reading the advertisement of %s: %w", spec.ClusterID, err)
	case needsUpdate(ad.Spec, spec):
		ad.Spec = spec
		if err := r.client.Update(ctx, ad); err != nil {
			return nil, fmt.Errorf("updating the advertisement of %s: %w", spec.ClusterID, err)
		}
	}
	return ad, nil
}

// needsUpdate reports whether an advertisement has changed in more than time and
// sequence, or is older than rewriteAfter.
func needsUpdate(stored, received broker.ClusterAdvertisementSpec) bool {
	if received.Timestamp.Sub(stored.Timestamp.Time).Abs() >= rewriteAfter {
		return true
	}
	stored.Timestamp, stored.Sequence = received.Timestamp, received.Sequence
	return !apiequality.Semantic.DeepEqual(stored, received)
}

// writeAccount writes the account and the activity to an advertisement's status, unless
// they are up to date.
func (r *Reconciler) writeAccount(ctx context.Context, ad *broker.ClusterAdvertisement, active bool) error {
	before := ad.Status.DeepCopy()
	ledger.Settle(&ad.Spec, &ad.Status)
	ad.Status.Active, ad.Status.Phase = active, broker.AdvertisementActive
	if !active {
		ad.Status.Phase = broker.AdvertisementStale
	}
	ad.Status.ObservedGeneration = ad.Generation
	conditions{&ad.Status.Conditions, ad.Generation, r.clock.Now()}.setActive(active)
	if apiequality.Semantic.DeepEqual(*before, ad.Status) {
		return nil
	}
	if err := r.client.Status().Update(ctx, ad); err != nil {
		return fmt.Errorf("writing the account of %s: %w", ad.Spec.ClusterID, err)
	}
	return nil
}

// ReconcileAdvertisement releases the holds of deleted Reservations and updates the
// account and the activity.
func (r *Reconciler) ReconcileAdvertisement(ctx context.Context, name string) (ctrl.Result, error) {
	var ad broker.ClusterAdvertisement
	if err := r.client.Get(ctx, r.key(name), &ad); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	config, err := r.config(ctx)
	if err != nil {
		return ctrl.Result{}, err
	}
	if err := r.releaseOrphans(ctx, &ad); err != nil {
		return requeueOnConflict(ctx, err)
	}
	active, _ := r.activity(ad.Spec.ClusterID, config)
	if err := r.writeAccount(ctx, &ad, active); err != nil {
		return requeueOnConflict(ctx, err)
	}
	if !active {
		return ctrl.Result{}, nil
	}
	return ctrl.Result{RequeueAfter: max(config.staleAfter-r.clock.Since(r.lastAdvertised(ad.Spec.ClusterID)), time.Second)}, nil
}

// releaseOrphans releases the holds whose Reservation does not exist any more.
func (r *Reconciler) releaseOrphans(ctx context.Context, ad *broker.ClusterAdvertisement) error {
	var orphans []types.UID
	for _, hold := range ad.Status.Holds {
		if hold.Promised.Empty() {
			continue
		}
		exists, err := r.reservationExists(ctx, hold)
		if err != nil {
			return err
		}
		if !exists {
			orphans = append(orphans, hold.ReservationUID)
		}
	}
	if !ledger.Sweep(&ad.Status, orphans...) {
		return nil
	}
	log.FromContext(ctx).Info("Releasing holds whose Reservation does not exist", "provider", ad.Spec.ClusterID, "reservationUIDs", orphans)
	ledger.Settle(&ad.Spec, &ad.Status)
	if err := r.client.Status().Update(ctx, ad); err != nil {
		return fmt.Errorf("releasing holds in the ledger of %s: %w", ad.Spec.ClusterID, err)
	}
	return nil
}

// reservationExists reads live what the cache does not have.
func (r *Reconciler) reservationExists(ctx context.Context, hold broker.Hold) (bool, error) {
	for _, from := range []client.Reader{r.client, r.live} {
		var reservation broker.Reservation
		err := from.Get(ctx, r.key(hold.ReservationName), &reservation)
		if client.IgnoreNotFound(err) != nil {
			return false, fmt.Errorf("reading the reservation of a hold: %w", err)
		}
		if err == nil && reservation.UID == hold.ReservationUID {
			return true, nil
		}
	}
	return false, nil
}
