// Package reservation reconciles the broker's Reservations: it gathers what the
// clusters advertise, lets decide choose, commits the choice to the ledger, and
// reports what became of it. It does the I/O around the pure packages decide
// and ledger.
//
// A placement is committed in three writes, each a compare-and-swap on the
// object's resourceVersion, so that two live brokers cannot both give the same
// capacity, and a broker that dies between two of them leaves nothing behind:
//
//	(a) Reservation.status.attempt names the attempt and its clusters
//	(b) ClusterAdvertisement.status.holds takes the hold, tagged with the attempt
//	(c) Reservation.status follows the holds: phase, allocations, conditions
//
// The ledger is the truth and the Reservation's status a view of it. After a
// break, the next reconcile finds the holds there are, compares them with what
// is asked for, and holds what is missing or shrinks what is too much. A hold
// whose Reservation is gone or over is swept, after a live read.
package reservation

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// configName is the BrokerConfig that counts.
const configName = "default"

// Freshness says when this broker process last received a cluster's
// advertisement, by the clock of Options. A restarted broker has received none.
type Freshness interface {
	ReceivedAt(cluster string) (time.Time, bool)
}

// Options of a Reconciler.
type Options struct {
	// Namespace in which the broker keeps its objects.
	Namespace string
	// Freshness of advertisements.
	Freshness Freshness
	// Clock is the real one where nil.
	Clock clock.WithTicker
	// Workers is how many reservations are reconciled at a time; 4 where 0.
	Workers int
}

// Reconciler places Reservations and keeps the ledger. Its methods may be
// called from any goroutine, on any replica; only SetupWithManager's
// controllers wait for leadership.
type Reconciler struct {
	client    client.Client
	live      client.Reader
	recorder  events.EventRecorder
	namespace string
	freshness Freshness
	clock     clock.WithTicker
	workers   int
	// since is when this process first asked how lately a cluster advertised: as
	// the leader, not as a standby that advertisements do not reach.
	since func() time.Time

	// wake tells of advertisements that became fresh again without a change that
	// a watch would see.
	wake chan event.GenericEvent
	// stored is when each cluster's advertisement was last stored.
	mu     sync.Mutex
	stored map[string]time.Time
}

// New makes a Reconciler that uses the manager's clients. Their cache must cover
// the broker's namespace.
func New(mgr manager.Manager, options Options) *Reconciler {
	if options.Clock == nil {
		options.Clock = clock.RealClock{}
	}
	if options.Workers == 0 {
		options.Workers = 4
	}
	return &Reconciler{
		client:    mgr.GetClient(),
		live:      mgr.GetAPIReader(),
		recorder:  mgr.GetEventRecorder("spillway-broker"),
		namespace: options.Namespace,
		freshness: options.Freshness,
		clock:     options.Clock,
		workers:   options.Workers,
		since:     sync.OnceValue(options.Clock.Now),
		wake:      make(chan event.GenericEvent, 1),
		stored:    map[string]time.Time{},
	}
}

// SetupWithManager adds the controllers for Reservations and for
// ClusterAdvertisements.
func (r *Reconciler) SetupWithManager(mgr manager.Manager) error {
	ours := predicate.NewPredicateFuncs(func(o client.Object) bool { return o.GetNamespace() == r.namespace })
	options := controller.Options{MaxConcurrentReconciles: r.workers}
	everyWaiting := handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, _ client.Object) []reconcile.Request {
		return requests(r.waiting(ctx))
	})
	err := ctrl.NewControllerManagedBy(mgr).
		Named("reservation").
		For(&broker.Reservation{}).
		Watches(&broker.ClusterAdvertisement{}, r.onAdvertisement()).
		Watches(&broker.BrokerConfig{}, everyWaiting).
		WatchesRawSource(source.Channel(r.wake, everyWaiting)).
		WithEventFilter(ours).
		WithOptions(options).
		Complete(reconcile.Func(r.reconcile))
	if err != nil {
		return fmt.Errorf("adding the reservation controller: %w", err)
	}
	err = ctrl.NewControllerManagedBy(mgr).
		Named("advertisement").
		For(&broker.ClusterAdvertisement{}).
		Watches(&broker.Reservation{}, handler.Funcs{DeleteFunc: r.onReservationGone}).
		Watches(&broker.BrokerConfig{}, handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, _ client.Object) []reconcile.Request {
			return r.advertisements(ctx, func(*broker.ClusterAdvertisement) bool { return true })
		})).
		WithEventFilter(ours).
		WithOptions(options).
		Complete(reconcile.Func(r.reconcileAdvertisement))
	if err != nil {
		return fmt.Errorf("adding the advertisement controller: %w", err)
	}
	return nil
}

// onAdvertisement wakes the reservations whose holds changed, and, as there may
// be room now, those that wait.
func (r *Reconciler) onAdvertisement() handler.EventHandler {
	type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]
	enqueue := func(ctx context.Context, q queue, holds []broker.Hold) {
		for _, hold := range holds {
			q.Add(reconcile.Request{NamespacedName: types.NamespacedName{Namespace: r.namespace, Name: hold.ReservationName}})
		}
		for _, request := range requests(r.waiting(ctx)) {
			q.Add(request)
		}
	}
	return handler.Funcs{
		CreateFunc: func(ctx context.Context, e event.CreateEvent, q queue) {
			enqueue(ctx, q, e.Object.(*broker.ClusterAdvertisement).Status.Holds)
		},
		UpdateFunc: func(ctx context.Context, e event.UpdateEvent, q queue) {
			before, after := e.ObjectOld.(*broker.ClusterAdvertisement), e.ObjectNew.(*broker.ClusterAdvertisement)
			changed := changedHolds(before.Status.Holds, after.Status.Holds)
			if before.Status.Active != after.Status.Active {
				// What it holds counts, or no longer does.
				changed = after.Status.Holds
			}
			if len(changed) > 0 || before.Generation != after.Generation || before.Status.Active != after.Status.Active {
				enqueue(ctx, q, changed)
			}
		},
		DeleteFunc: func(ctx context.Context, e event.DeleteEvent, q queue) {
			enqueue(ctx, q, e.Object.(*broker.ClusterAdvertisement).Status.Holds)
		},
	}
}

// changedHolds are those that are not the same before and after.
func changedHolds(before, after []broker.Hold) []broker.Hold {
	var changed []broker.Hold
	lacks := func(list []broker.Hold, hold broker.Hold) bool {
		return !slices.ContainsFunc(list, func(h broker.Hold) bool { return apiequality.Semantic.DeepEqual(h, hold) })
	}
	for _, hold := range after {
		if lacks(before, hold) {
			changed = append(changed, hold)
		}
	}
	for _, hold := range before {
		if lacks(after, hold) {
			changed = append(changed, hold)
		}
	}
	return changed
}

// onReservationGone wakes the advertisements that still hold something for it.
func (r *Reconciler) onReservationGone(ctx context.Context, e event.DeleteEvent, q workqueue.TypedRateLimitingInterface[reconcile.Request]) {
	for _, request := range r.advertisements(ctx, func(ad *broker.ClusterAdvertisement) bool {
		return ledger.Find(&ad.Status, e.Object.GetUID()) != nil
	}) {
		q.Add(request)
	}
}

// advertisements lists those that are asked for.
func (r *Reconciler) advertisements(ctx context.Context, which func(*broker.ClusterAdvertisement) bool) []reconcile.Request {
	var list broker.ClusterAdvertisementList
	if err := r.client.List(ctx, &list, client.InNamespace(r.namespace)); err != nil {
		ctrl.LoggerFrom(ctx).Error(err, "Listing advertisements")
		return nil
	}
	var names []types.NamespacedName
	for i := range list.Items {
		if which(&list.Items[i]) {
			names = append(names, client.ObjectKeyFromObject(&list.Items[i]))
		}
	}
	return requests(names)
}

func requests(names []types.NamespacedName) []reconcile.Request {
	out := make([]reconcile.Request, len(names))
	for i, name := range names {
		out[i].NamespacedName = name
	}
	return out
}

// ApplyProviderAck takes a provider's answer to the hold of the reservation
// with that name. An answer to another attempt than the hold's changes nothing.
// NotFound (apierrors.IsNotFound) if the provider holds nothing of that name.
// Repeatable.
func (r *Reconciler) ApplyProviderAck(ctx context.Context, cluster, name string, ack protocol.ProviderAck) error {
	return r.untilWritten(ctx, func() error {
		var ad broker.ClusterAdvertisement
		if err := r.live.Get(ctx, client.ObjectKey{Namespace: r.namespace, Name: cluster}, &ad); err != nil {
			return fmt.Errorf("reading the ledger of %s: %w", cluster, err)
		}
		at := slices.IndexFunc(ad.Status.Holds, func(h broker.Hold) bool {
			return h.ReservationName == name && h.ReservationUID == ack.ReservationUID && h.Attempt == ack.Attempt
		})
		if at < 0 {
			if slices.ContainsFunc(ad.Status.Holds, func(h broker.Hold) bool { return h.ReservationName == name }) {
				return nil
			}
			return fmt.Errorf("%s holds nothing for it: %w", cluster, notFound("reservations", name))
		}
		hold := *ad.Status.Holds[at].DeepCopy()
		if !ledger.Confirm(&ad.Status, hold.ReservationUID, ack.Attempt, ack.Accepted) {
			return nil
		}
		if !ack.Accepted {
			// The refusal is on record before what it turned down is free: nobody
			// asks this provider again for the same.
			if err := r.recordRefusal(ctx, hold, &ad.Spec, ack.Message); err != nil {
				return err
			}
		}
		ledger.Settle(&ad.Spec, &ad.Status)
		if err := r.client.Status().Update(ctx, &ad); err != nil {
			return fmt.Errorf("writing the ledger of %s: %w", cluster, err)
		}
		return nil
	})
}

// recordRefusal notes that a provider turned its hold's attempt down.
func (r *Reconciler) recordRefusal(ctx context.Context, hold broker.Hold, spec *broker.ClusterAdvertisementSpec, message string) error {
	var reservation broker.Reservation
	err := r.live.Get(ctx, client.ObjectKey{Namespace: r.namespace, Name: hold.ReservationName}, &reservation)
	if apierrors.IsNotFound(err) || err == nil && reservation.UID != hold.ReservationUID {
		return nil
	} else if err != nil {
		return fmt.Errorf("reading the reservation that %s refuses: %w", spec.ClusterID, err)
	}
	if message == "" {
		message = "it gave no reason"
	}
	refusal := broker.Refusal{Cluster: spec.ClusterID, Sequence: spec.Sequence, Message: message}
	if slices.Contains(reservation.Status.Refused, refusal) {
		return nil
	}
	reservation.Status.Refused = slices.DeleteFunc(reservation.Status.Refused, func(old broker.Refusal) bool { return old.Cluster == spec.ClusterID })
	reservation.Status.Refused = append(reservation.Status.Refused, refusal)
	if err := r.client.Status().Update(ctx, &reservation); err != nil {
		return fmt.Errorf("recording the refusal of %s: %w", spec.ClusterID, err)
	}
	r.event(&reservation, corev1.EventTypeWarning, "Refused", "Reserve", fmt.Sprintf("%s refused %s: %s", spec.ClusterID, amount(ledger.Pending(hold)), message))
	return nil
}

// ApplyRequesterAck takes a requester's report on its reservation. One about
// another attempt than the current changes nothing. NotFound
// (apierrors.IsNotFound) if there is none of that name, or if it is another
// cluster's. Repeatable.
func (r *Reconciler) ApplyRequesterAck(ctx context.Context, requester, name string, ack protocol.RequesterAck) error {
	return r.untilWritten(ctx, func() error {
		var reservation broker.Reservation
		if err := r.live.Get(ctx, client.ObjectKey{Namespace: r.namespace, Name: name}, &reservation); err != nil {
			return fmt.Errorf("reading the reservation: %w", err)
		}
		if reservation.Spec.RequesterID != requester {
			return fmt.Errorf("%s asked for no such reservation: %w", requester, notFound("reservations", name))
		}
		if reservation.UID != ack.ReservationUID || reservation.Status.Attempt.Number != ack.Attempt {
			return nil
		}
		var changed bool
		for i := range reservation.Status.Allocations {
			allocation := &reservation.Status.Allocations[i]
			ready := allocation.Accepted && slices.Contains(ack.Ready, allocation.Cluster)
			changed = changed || allocation.VirtualNodeReady != ready
			allocation.VirtualNodeReady = ready
		}
		if !changed {
			return nil
		}
		// The reconciler draws the conclusions.
		if err := r.client.Status().Update(ctx, &reservation); err != nil {
			return fmt.Errorf("recording what %s reports: %w", requester, err)
		}
		return nil
	})
}

func notFound(resource, name string) error {
	return apierrors.NewNotFound(schema.GroupResource{Group: broker.Group, Resource: resource}, name)
}
