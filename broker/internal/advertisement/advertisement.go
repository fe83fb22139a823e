package advertisement

import (
	"context"
	"fmt"
	"slices"
	"time"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/commit"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
	"github.com/spillway-dev/spillway/broker/internal/store"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// StoreAdvertisement creates or updates the ClusterAdvertisement named spec.ClusterID
// and its account (reserved, available, active). An advertisement without changes is not
// written. The caller has verified that the spec is the
// cluster's own. An advertisement that is older than one received before
// is ignored: the error is a *protocol.OutdatedError. One that is too large to be in one
// object with the ledger is refused: the error is a *protocol.Error.
func (c *Clusters) StoreAdvertisement(ctx context.Context, spec broker.ClusterAdvertisementSpec) error {
	if bytes := ledger.AdvertisementBytes(&spec); bytes > ledger.MaxAdvertisementBytes {
		// There is room for it as long as the holds are few: a hub that has lost them learns
		// them from it.
		held := 0
		if known := c.store.Advertisement(spec.ClusterID); known != nil {
			held = ledger.SizeOf(&spec, known.Status.Holds).Bytes
		}
		if most := ledger.MaxBytes + ledger.MaxAdvertisementBytes - held; bytes > most {
			return &protocol.Error{Code: protocol.CodeTooLarge, Message: fmt.Sprintf("the advertisement has %d bytes, the maximum beside what the cluster holds is %d: give the nodes fewer distinct labels and taints", bytes, most)}
		}
	}
	// Before it is stored, because storing enqueues Reservations, for which the cluster must
	// be fresh.
	before, now := c.store.Receive(spec.ClusterID, 0)
	if err := c.storeSpec(ctx, spec); err != nil {
		c.store.Unreceive(spec.ClusterID, before, now)
		return err
	}
	c.received(spec.ClusterID, spec.Sequence, before)
	return nil
}

// Beat does what StoreAdvertisement does with an advertisement that has the content of the
// stored one. It reports false if there is something to store or to refuse: then it has done
// nothing.
func (c *Clusters) Beat(cluster string, beat protocol.Beat) (known bool) {
	stored := c.store.Advertisement(cluster)
	before := c.store.Receipt(cluster)
	if stored == nil || !stored.Status.Active || stored.Status.ObservedGeneration != stored.Generation ||
		max(before.Sequence, stored.Spec.Sequence) > beat.Sequence || protocol.Digest(stored.Spec) != beat.Digest {
		return false
	}
	c.received(cluster, beat.Sequence, before)
	return true
}

// received records that an advertisement was received. A cluster that is fresh again may be
// chosen for queued Reservations.
func (c *Clusters) received(cluster string, sequence int64, before store.Receipt) {
	c.store.Receive(cluster, sequence)
	if before.At.IsZero() || c.Clock.Since(before.At) > c.store.Settings().FreshFor {
		c.Retry.Send()
	}
}

// storeSpec creates or updates the stored advertisement if it differs.
func (c *Clusters) storeSpec(ctx context.Context, spec broker.ClusterAdvertisementSpec) error {
	latest := c.store.Receipt(spec.ClusterID).Sequence
	// By what the next beat is compared with.
	digest := protocol.Digest(spec)
	edit := func(ad *broker.ClusterAdvertisement) (commit.Edited, error) {
		if latest := max(latest, ad.Spec.Sequence); latest > spec.Sequence {
			return commit.Edited{}, &protocol.OutdatedError{Latest: latest}
		}
		changes := commit.Edited{Spec: protocol.Digest(ad.Spec) != digest}
		if changes.Spec {
			ad.Spec = spec
		}
		changes.Status = c.account(ad, true)
		return changes, nil
	}
	if known := c.store.Advertisement(spec.ClusterID); known != nil {
		if changes, err := edit(ledger.Draft(known)); err != nil || !changes.Spec && !changes.Status {
			return err
		}
	}
	_, err := c.Committer.Commit(ctx, spec.ClusterID, edit)
	if !apierrors.IsNotFound(err) {
		return err
	}
	ad := &broker.ClusterAdvertisement{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: c.hub.Namespace, Name: spec.ClusterID,
			Labels: map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway},
		},
		Spec: spec,
	}
	created := false
	if err := c.hub.Client.Create(ctx, ad); apierrors.IsAlreadyExists(err) {
		commit.LockConflicts.Inc()
	} else if err != nil {
		return fmt.Errorf("creating the advertisement of %s: %w", spec.ClusterID, err)
	} else {
		created = true
		c.store.PutAdvertisement(ad)
	}
	_, err = c.Committer.Commit(ctx, spec.ClusterID, func(ad *broker.ClusterAdvertisement) (commit.Edited, error) {
		changes, err := edit(ad)
		// A write of the spec ends the tracking of fields.
		changes.Spec = changes.Spec || created && err == nil
		return changes, err
	})
	return err
}

// account brings the account and the activity in an advertisement's status up to date,
// and reports whether they were not.
func (c *Clusters) account(ad *broker.ClusterAdvertisement, active bool) (changed bool) {
	before := ad.Status
	before.Conditions = slices.Clone(before.Conditions)
	ledger.Settle(&ad.Spec, &ad.Status)
	ad.Status.Active, ad.Status.Phase = active, broker.AdvertisementActive
	if !active {
		ad.Status.Phase = broker.AdvertisementStale
	}
	ad.Status.ObservedGeneration = ad.Generation
	c.setActive(ad, active)
	after := ad.Status
	before.Holds, after.Holds = nil, nil
	return !apiequality.Semantic.DeepEqual(before, after)
}

// Reasons of condition Ready of a ClusterAdvertisement: stale means that its cluster has not been
// heard for longer than staleAfter of the BrokerConfig, as its phase does.
const (
	reasonReceived = "AdvertisementReceived"
	reasonStale    = "AdvertisementStale"
)

// setActive sets the condition of a ClusterAdvertisement.
func (c *Clusters) setActive(ad *broker.ClusterAdvertisement, active bool) {
	condition := metav1.Condition{
		Type: broker.ConditionReady, Status: metav1.ConditionTrue, Reason: reasonReceived, Message: "The broker receives the cluster's advertisements.",
		ObservedGeneration: ad.Generation, LastTransitionTime: metav1.Time{Time: c.Clock.Now()},
	}
	if !active {
		condition.Status, condition.Reason = metav1.ConditionFalse, reasonStale
		condition.Message = "The broker has received no advertisement for longer than the stale threshold. Holds stay charged. Check that the cluster's agent runs and can reach the broker."
	}
	meta.SetStatusCondition(&ad.Status.Conditions, condition)
}

// accountRetryAfter is when an account is looked at again that another write is about to bring
// up to date.
const accountRetryAfter = time.Second

// ReconcileAdvertisement releases the holds of deleted Reservations and updates the
// account and the activity.
func (c *Clusters) ReconcileAdvertisement(ctx context.Context, name string) (ctrl.Result, error) {
	ad := c.store.Advertisement(name)
	if ad == nil {
		return ctrl.Result{}, nil
	}
	c.Follow(name)
	config := c.store.Settings()
	if !createdForCluster(ad) && ad.Spec.Sequence == 0 && ad.Status.ObservedGeneration != ad.Generation {
		// Who changes one that was made by hand says that the cluster is there.
		before, _ := c.store.Receive(name, ad.Spec.Sequence)
		c.received(name, ad.Spec.Sequence, before)
	}
	orphans, err := c.orphans(ctx, ad)
	if err != nil {
		return ctrl.Result{}, err
	}
	active, _ := c.Activity(name, config)
	edit := func(ad *broker.ClusterAdvertisement) (commit.Edited, error) {
		swept := ledger.Sweep(&ad.Status, orphans...)
		return commit.Edited{Status: c.account(ad, active) || swept}, nil
	}
	if changes, _ := edit(ledger.Draft(ad)); changes.Status {
		if _, writing := c.Committer.Waiting(name); writing && len(orphans) == 0 {
			// Most likely that write, such as of the spec and then of the status, does it: its
			// event comes here again. To wait for it would cost a read.
			return ctrl.Result{RequeueAfter: accountRetryAfter}, nil
		}
		if len(orphans) > 0 {
			log.FromContext(ctx).Info("Releasing holds whose Reservation does not exist", "provider", name, "reservationUIDs", orphans)
		}
		if _, err := c.Committer.Commit(ctx, name, edit); err != nil {
			return c.conflicts.Requeue(ctx, "advertisement/"+name, err)
		}
	}
	c.conflicts.Forget("advertisement/" + name)
	var result ctrl.Result
	if active {
		result.RequeueAfter = max(config.StaleAfter-c.Clock.Since(c.LastAdvertised(name)), time.Second)
	}
	if due := c.Reports.next(c.store, name); !due.IsZero() {
		if after := max(due.Sub(c.Clock.Now()), time.Second); !active || after < result.RequeueAfter {
			result.RequeueAfter = after
		}
	}
	return result, nil
}

// orphans are the holds whose Reservation does not exist any more.
func (c *Clusters) orphans(ctx context.Context, ad *broker.ClusterAdvertisement) ([]types.UID, error) {
	var orphans []types.UID
	for i := range ad.Status.Holds {
		hold := &ad.Status.Holds[i]
		if hold.Promised.Empty() || c.store.Exists(hold.ReservationName, hold.ReservationUID) {
			continue
		}
		var reservation broker.Reservation
		err := c.hub.Live.Get(ctx, c.hub.Key(hold.ReservationName), &reservation)
		if client.IgnoreNotFound(err) != nil {
			return nil, fmt.Errorf("reading the reservation of a hold: %w", err)
		}
		if err != nil || reservation.UID != hold.ReservationUID {
			orphans = append(orphans, hold.ReservationUID)
		}
	}
	return orphans, nil
}
