package reservation

import (
	"context"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/answers"
	"github.com/spillway-dev/spillway/broker/internal/decide"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
	"github.com/spillway-dev/spillway/broker/internal/plan"
	"github.com/spillway-dev/spillway/broker/internal/settings"
)

// input is what the store knows that concerns this version of a Reservation, to which it adds
// an attempt that its status does not have yet. What is outdated in it does no harm: the writes
// of the Reservation fail if it has changed, those of holds if the holds of this Reservation
// have.
func (r *Reconciler) input(reservation *broker.Reservation, config settings.Settings) plan.Input {
	return r.gather(reservation, config, true)
}

// gather is the input, with a choice only for the queue if nothing is to be placed.
func (r *Reconciler) gather(reservation *broker.Reservation, config settings.Settings, place bool) plan.Input {
	adoptAttempt(reservation)
	in := plan.Input{Reservation: reservation, Settings: config, Now: r.clock.Now()}
	r.readLedgers(&in, place)
	return in
}

// readLedgers takes the advertisements and their activity from the store, and with them all
// that depends on them.
func (r *Reconciler) readLedgers(in *plan.Input, place bool) {
	requester := in.Reservation.Spec.RequesterID
	in.Advertisements = r.store.Advertisements()
	in.Holders = r.store.HoldersOf(in.Reservation.Name)
	in.Unreachable = nil
	if active, _ := r.clusters.Activity(requester, in.Settings); active {
		in.Unreachable = r.clusters.Reports.Unreachable(requester)
	}
	in.Active = map[string]bool{}
	for _, cluster := range in.Holders {
		in.Active[cluster], _ = r.clusters.Activity(cluster, in.Settings)
	}
	r.recall(in)
	in.Choice = plan.Choice{}
	if in.Chooses(place) {
		in.Choice = r.choice(*in, in.Missing())
	}
}

// recall adds what this process knows and no object says: since when it has seen the
// Reservation's state, what the providers have answered, and for whom capacity is kept free
// before it in the queue.
func (r *Reconciler) recall(in *plan.Input) {
	reservation := in.Reservation
	in.Times = r.book.Times(reservation.Name, reservation.UID, in.Seen(), in.Now)
	in.Progress, in.Unusable = map[string]answers.Progress{}, map[string]int64{}
	for _, cluster := range in.Holders {
		in.Progress[cluster] = r.answers.Progress(cluster)
		in.Unusable[cluster] = r.answers.UnusableUpTo(cluster, reservation.UID)
	}
	in.Heard = r.clusters.LastAdvertised(reservation.Spec.RequesterID)
	if in.QueueTime = reservation.Status.QueueTime; in.QueuesAgain() {
		// It compares no clocks: the times are those of the API server.
		in.QueueTime = &metav1.MicroTime{Time: r.store.AfterAll()}
	}
	if in.Settings.Queueing == broker.QueueingNone {
		return
	}
	entry := in.Entry()
	in.Position = int32(r.queue.Position(entry))
	in.First, in.RefuseFirst = nil, nil
	if first := r.queue.First(entry); first != nil {
		in.First = &first.Request
		in.RefuseFirst, _ = r.answers.Rejections(first.Request.Requester, first.UID, first.Request.Want, in.Settings.ProofDeadline, in.Now)
	}
}

// choice is what there is to choose from for a capacity.
func (r *Reconciler) choice(in plan.Input, want broker.HeldCapacity) plan.Choice {
	activity := make(decide.Activity, len(in.Advertisements))
	for _, ad := range in.Advertisements {
		if active, fresh := r.clusters.Activity(ad.Name, in.Settings); active {
			activity[ad.Name] = fresh
		}
	}
	choice := plan.Choice{Clusters: r.store.Clusters(activity), Full: r.store.Full(want, in.Holders)}
	choice.Refused, _ = r.refused(in, want)
	if in.Settings.Weights.Reliability > 0 {
		choice.Records = r.answers.Records(in.Now)
	}
	return choice
}

// refused are the clusters that must not be chosen for a capacity because of their answers so
// far, and when the first of them may be; zero if there are none.
func (r *Reconciler) refused(in plan.Input, want broker.HeldCapacity) (map[string]capacity.Rejection, time.Time) {
	return r.answers.Rejections(in.Reservation.Spec.RequesterID, in.Reservation.UID, want, in.Settings.ProofDeadline, in.Now)
}

// readAttempt reads the clusters of the Reservation's last attempt that do not show its
// holds in the store: another broker may have written them before it stopped, and the
// watch may not have repeated them yet. It reports whether anything was read.
func (r *Reconciler) readAttempt(ctx context.Context, in plan.Input) (read bool, err error) {
	attempt := in.Reservation.Status.Attempt
	for _, cluster := range attempt.Clusters {
		ad := in.Advertisement(cluster)
		if ad != nil {
			if hold := ledger.Find(&ad.Status, in.Reservation.UID); hold != nil && hold.Attempt >= attempt.Number {
				continue
			}
		}
		if err := r.readLedger(ctx, cluster); err != nil {
			return read, err
		}
		read = true
	}
	return read, nil
}

// readLedger takes a cluster's advertisement from the API server into the store, if it is
// there.
func (r *Reconciler) readLedger(ctx context.Context, cluster string) error {
	live := &broker.ClusterAdvertisement{}
	if err := r.hub.Live.Get(ctx, r.hub.Key(cluster), live); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("reading the ledger of %s: %w", cluster, err)
	} else if err == nil {
		r.store.PutAdvertisement(live)
	}
	return nil
}

// readOverstated reads the ledgers of which the status grants more than the store knows, before
// it is lowered: the store may be behind with what another broker has granted.
func (r *Reconciler) readOverstated(ctx context.Context, in *plan.Input) error {
	overstated := in.Overstated()
	for _, cluster := range overstated {
		if err := r.readLedger(ctx, cluster); err != nil {
			return err
		}
	}
	if len(overstated) > 0 {
		r.readLedgers(in, false)
	}
	return nil
}
