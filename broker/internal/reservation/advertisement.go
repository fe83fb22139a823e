package reservation

import (
	"context"
	"fmt"
	"slices"
	"time"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/log"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// StoreAdvertisement creates or updates the ClusterAdvertisement named spec.ClusterID
// and its account (reserved, available, active). An advertisement without changes is not
// written. The caller has verified that the spec is the
// cluster's own, and has recorded its receipt in Freshness: a cluster that is fresh again
// may be chosen for queued Reservations at once. An advertisement that is older than one received before
// is ignored: the error is a *protocol.OutdatedError. One that is too large to be in one
// object with the ledger is refused: the error is a *protocol.Error.
func (r *Reconciler) StoreAdvertisement(ctx context.Context, spec broker.ClusterAdvertisementSpec) error {
	if bytes := ledger.AdvertisementBytes(&spec); bytes > ledger.MaxAdvertisementBytes {
		// There is room for it as long as the holds are few: a hub that has lost them learns
		// them from it.
		held := 0
		if known := r.store.advertisement(spec.ClusterID); known != nil {
			held = ledger.SizeOf(&spec, known.Status.Holds).Bytes
		}
		if most := ledger.MaxBytes + ledger.MaxAdvertisementBytes - held; bytes > most {
			return &protocol.Error{Code: protocol.CodeTooLarge, Message: fmt.Sprintf("the advertisement has %d bytes, the maximum beside what the cluster holds is %d: give the nodes fewer distinct labels and taints", bytes, most)}
		}
	}
	config, err := r.config(ctx)
	if err != nil {
		return err
	}
	if err := r.storeSpec(ctx, spec); err != nil {
		return err
	}
	r.received(config, spec.ClusterID, spec.Sequence)
	return nil
}

// Beat does what StoreAdvertisement does with an advertisement that has the content of the
// stored one. It reports false if there is something to store or to refuse: then it has done
// nothing.
func (r *Reconciler) Beat(ctx context.Context, cluster string, beat protocol.Beat) (known bool, err error) {
	config, err := r.config(ctx)
	if err != nil {
		return false, err
	}
	stored := r.store.advertisement(cluster)
	r.mu.Lock()
	latest := r.latest[cluster]
	r.mu.Unlock()
	if stored == nil || !stored.Status.Active || stored.Status.ObservedGeneration != stored.Generation ||
		max(latest, stored.Spec.Sequence) > beat.Sequence || protocol.Digest(stored.Spec) != beat.Digest {
		return false, nil
	}
	r.received(config, cluster, beat.Sequence)
	return true, nil
}

// received records that an advertisement was received.
func (r *Reconciler) received(config config, cluster string, sequence int64) {
	r.mu.Lock()
	now := r.clock.Now()
	r.latest[cluster] = max(r.latest[cluster], sequence)
	last, stored := r.receivedAt[cluster]
	r.receivedAt[cluster] = now
	r.mu.Unlock()
	if !stored || now.Sub(last) > config.freshFor {
		select {
		case r.becameFresh <- event.GenericEvent{Object: &broker.ClusterAdvertisement{ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: cluster}}}:
		default: // a pending event enqueues the same Reservations
		}
	}
}

// storeSpec creates or updates the stored advertisement if it differs.
func (r *Reconciler) storeSpec(ctx context.Context, spec broker.ClusterAdvertisementSpec) error {
	r.mu.Lock()
	latest := r.latest[spec.ClusterID]
	r.mu.Unlock()
	// By what the next beat is compared with.
	digest := protocol.Digest(spec)
	edit := func(ad *broker.ClusterAdvertisement) (edited, error) {
		if latest := max(latest, ad.Spec.Sequence); latest > spec.Sequence {
			return edited{}, &protocol.OutdatedError{Latest: latest}
		}
		changes := edited{spec: protocol.Digest(ad.Spec) != digest}
		if changes.spec {
			ad.Spec = spec
		}
		changes.status = r.account(ad, true)
		return changes, nil
	}
	if known := r.store.advertisement(spec.ClusterID); known != nil {
		if changes, err := edit(draft(known)); err != nil || !changes.spec && !changes.status {
			return err
		}
	}
	_, err := r.committer.commit(ctx, spec.ClusterID, edit)
	if !apierrors.IsNotFound(err) {
		return err
	}
	ad := &broker.ClusterAdvertisement{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: r.namespace, Name: spec.ClusterID,
			Labels: map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway},
		},
		Spec: spec,
	}
	created := false
	if err := r.client.Create(ctx, ad); apierrors.IsAlreadyExists(err) {
		lockConflicts.Inc()
	} else if err != nil {
		return fmt.Errorf("creating the advertisement of %s: %w", spec.ClusterID, err)
	} else {
		created = true
		r.store.putAdvertisement(ad)
	}
	_, err = r.committer.commit(ctx, spec.ClusterID, func(ad *broker.ClusterAdvertisement) (edited, error) {
		changes, err := edit(ad)
		// A write of the spec ends the tracking of fields.
		changes.spec = changes.spec || created && err == nil
		return changes, err
	})
	return err
}

// draft is a version for an edit whose outcome is not written: it shares the rest.
func draft(ad *broker.ClusterAdvertisement) *broker.ClusterAdvertisement {
	copied := *ad
	copied.Status.Holds = slices.Clone(ad.Status.Holds)
	copied.Status.Conditions = slices.Clone(ad.Status.Conditions)
	return &copied
}

// account brings the account and the activity in an advertisement's status up to date,
// and reports whether they were not.
func (r *Reconciler) account(ad *broker.ClusterAdvertisement, active bool) (changed bool) {
	before := ad.Status
	before.Conditions = slices.Clone(before.Conditions)
	ledger.Settle(&ad.Spec, &ad.Status)
	ad.Status.Active, ad.Status.Phase = active, broker.AdvertisementActive
	if !active {
		ad.Status.Phase = broker.AdvertisementStale
	}
	ad.Status.ObservedGeneration = ad.Generation
	conditions{&ad.Status.Conditions, ad.Generation, r.clock.Now()}.setActive(active)
	after := ad.Status
	before.Holds, after.Holds = nil, nil
	return !apiequality.Semantic.DeepEqual(before, after)
}

// accountRetryAfter is when an account is looked at again that another write is about to bring
// up to date.
const accountRetryAfter = time.Second

// ReconcileAdvertisement releases the holds of deleted Reservations and updates the
// account and the activity.
func (r *Reconciler) ReconcileAdvertisement(ctx context.Context, name string) (ctrl.Result, error) {
	ad := r.store.advertisement(name)
	if ad == nil {
		return ctrl.Result{}, nil
	}
	r.followReports(name)
	config, err := r.config(ctx)
	if err != nil {
		return ctrl.Result{}, err
	}
	orphans, err := r.orphans(ctx, ad)
	if err != nil {
		return ctrl.Result{}, err
	}
	active, _ := r.activity(name, config)
	edit := func(ad *broker.ClusterAdvertisement) (edited, error) {
		swept := ledger.Sweep(&ad.Status, orphans...)
		return edited{status: r.account(ad, active) || swept}, nil
	}
	if changes, _ := edit(draft(ad)); changes.status {
		if len(orphans) == 0 && r.committer.busy(name) {
			// Most likely that write, such as of the spec and then of the status, does it: its
			// event comes here again. To wait for it would cost a read.
			return ctrl.Result{RequeueAfter: accountRetryAfter}, nil
		}
		if len(orphans) > 0 {
			log.FromContext(ctx).Info("Releasing holds whose Reservation does not exist", "provider", name, "reservationUIDs", orphans)
		}
		if _, err := r.committer.commit(ctx, name, edit); err != nil {
			return r.requeueOnConflict(ctx, "advertisement/"+name, err)
		}
	}
	r.conflicts.Forget("advertisement/" + name)
	var result ctrl.Result
	if active {
		result.RequeueAfter = max(config.staleAfter-r.clock.Since(r.lastAdvertised(name)), time.Second)
	}
	if due := r.reports.next(r.store, name); !due.IsZero() {
		if after := max(due.Sub(r.clock.Now()), time.Second); !active || after < result.RequeueAfter {
			result.RequeueAfter = after
		}
	}
	return result, nil
}

// orphans are the holds whose Reservation does not exist any more.
func (r *Reconciler) orphans(ctx context.Context, ad *broker.ClusterAdvertisement) ([]types.UID, error) {
	var orphans []types.UID
	for i := range ad.Status.Holds {
		hold := &ad.Status.Holds[i]
		if hold.Promised.Empty() || r.store.exists(hold.ReservationName, hold.ReservationUID) {
			continue
		}
		var reservation broker.Reservation
		err := r.live.Get(ctx, r.key(hold.ReservationName), &reservation)
		if client.IgnoreNotFound(err) != nil {
			return nil, fmt.Errorf("reading the reservation of a hold: %w", err)
		}
		if err != nil || reservation.UID != hold.ReservationUID {
			orphans = append(orphans, hold.ReservationUID)
		}
	}
	return orphans, nil
}
