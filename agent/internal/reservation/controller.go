package reservation

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clientevents "k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/spillway-dev/spillway/agent/internal/instruction"
	"github.com/spillway-dev/spillway/agent/internal/transport"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/broker/protocol/objects"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// rejectedRetryAfter is when a Reservation that the broker has rejected is sent
// again: the reason may be gone although the Reservation is unchanged.
const rejectedRetryAfter = 30 * time.Second

// brokerTakesWithin is how long a broker may take to claim a Reservation beside it, before
// its author learns that there is none.
const brokerTakesWithin = 10 * time.Second

// Broker keeps the copies of this cluster's Reservations.
type Broker interface {
	// PutReservation creates or updates a reservation.
	PutReservation(ctx context.Context, request protocol.ReservationRequest) (protocol.ConsumerView, error)
	// DeleteReservation releases a reservation; it succeeds if there is none with
	// this ID. The caller uses nothing of it any more.
	DeleteReservation(ctx context.Context, id string) error
	// AckRequester reports which virtual nodes of a reservation are ready.
	AckRequester(ctx context.Context, id string, ack protocol.RequesterAck) error
	// Renew renews the lease of a reservation.
	Renew(ctx context.Context, id string, uid types.UID) error
}

// InUse reports whether pods use the capacity of a Reservation, by its UID in this
// cluster; known is false until that has been observed.
type InUse func(uid types.UID) (inUse, known bool)

// Options of a Reconciler. All fields but Namespace, Unmappable and Clock are required.
type Options struct {
	// ClusterID of this cluster.
	ClusterID string
	// InstructionNamespace is the namespace of the ReservationInstructions.
	InstructionNamespace string
	// Namespace of Spillway's programs. Reservations there are those of a broker in this
	// cluster.
	Namespace string
	Broker    Broker
	Mirror    *transport.Mirror[protocol.ConsumerView]
	// Unmappable returns why pods of a namespace can run at no provider, empty if they can:
	// the broker is not asked for them. They always can if it is nil.
	Unmappable func(ctx context.Context, namespace string) (why string, err error)
	// Clock defaults to the real clock.
	Clock clock.PassiveClock
}

// Reconciler reconciles the Reservations of this cluster with the broker's copies.
type Reconciler struct {
	Options
	inUse    InUse
	client   client.Client
	live     client.Reader
	recorder clientevents.EventRecorder
	source   *transport.Source[protocol.ConsumerView]
	// fromHub is the source of the reservations that were created in the hub.
	fromHub *transport.Source[protocol.ConsumerView]

	acks      transport.Resend[protocol.RequesterAck]
	deletions transport.Resend[struct{}]

	mu      sync.Mutex
	reports map[string]report
	// renewed is when the use of each reservation with a lease was last checked, and
	// reportedUse when their use of one that was created in the hub was last sent.
	renewed, reportedUse map[string]time.Time
}

// report is the outcome of the last PutReservation of a reservation. It counts
// until the mirror shows the reported generation.
type report struct {
	generation int64
	// due is when to send the Reservation again.
	due       time.Time
	condition metav1.Condition
	// view is the broker's response, nil if it rejected the Reservation.
	view *protocol.ConsumerView
}

// New returns a Reconciler that reads with c, which may be behind the API server,
// and with live, which is not. It renews the leases of what is in use; none where inUse is
// nil.
func New(c client.Client, live client.Reader, recorder clientevents.EventRecorder, inUse InUse, options Options) *Reconciler {
	options.Clock = cmp.Or[clock.PassiveClock](options.Clock, clock.RealClock{})
	r := &Reconciler{
		Options: options, inUse: inUse, client: c, live: live, recorder: recorder,
		reports: map[string]report{}, renewed: map[string]time.Time{}, reportedUse: map[string]time.Time{},
	}
	r.fromHub = &transport.Source[protocol.ConsumerView]{Mirror: options.Mirror, Key: hubKey}
	r.source = &transport.Source[protocol.ConsumerView]{
		Mirror: options.Mirror,
		Key: func(v protocol.ConsumerView) types.NamespacedName {
			return types.NamespacedName{Namespace: v.SourceNamespace, Name: v.SourceName}
		},
		// The broker may have lost what was sent before.
		Relisted: func() {
			r.acks.Reset()
			r.deletions.Reset()
			r.mu.Lock()
			defer r.mu.Unlock()
			clear(r.reports)
		},
	}
	return r
}

// Source enqueues the Reservations of which the broker's copy has changed.
func (r *Reconciler) Source() *transport.Source[protocol.ConsumerView] { return r.source }

// SetupWithManager adds the controller. instruction.SetupIndex must be called
// before.
func (r *Reconciler) SetupWithManager(mgr manager.Manager) error {
	if err := r.setupFromHub(mgr); err != nil {
		return err
	}
	return builder.ControllerManagedBy(mgr).Named("reservations").
		For(&broker.Reservation{}, builder.WithPredicates(predicate.Or[client.Object](
			predicate.GenerationChangedPredicate{}, predicate.AnnotationChangedPredicate{}, predicate.LabelChangedPredicate{}, finalizersChanged, statusChanged))).
		Watches(&broker.ReservationInstruction{}, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
			spec := &o.(*broker.ReservationInstruction).Spec
			if spec.SourceName == "" {
				return nil
			}
			return []reconcile.Request{{NamespacedName: types.NamespacedName{Namespace: spec.SourceNamespace, Name: spec.SourceName}}}
		})).
		WatchesRawSource(r.source).
		WithOptions(controller.Options{
			MaxConcurrentReconciles: 4,
			RateLimiter:             workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](200*time.Millisecond, 30*time.Second),
		}).
		Complete(r)
}

var finalizersChanged = predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
	return !slices.Equal(e.ObjectOld.GetFinalizers(), e.ObjectNew.GetFinalizers())
}}

// statusChanged matters because a status may have been computed from an outdated cache:
// the next reconcile after the cache has caught up corrects it.
var statusChanged = predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
	before, ok := e.ObjectOld.(*broker.Reservation)
	after, alsoOK := e.ObjectNew.(*broker.Reservation)
	return ok && alsoOK && !equality.Semantic.DeepEqual(before.Status, after.Status)
}}

// Reconcile synchronizes one Reservation with the broker's copy.
func (r *Reconciler) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	if request == transport.ResyncAll {
		return reconcile.Result{}, r.enqueueAll(ctx)
	}
	local := &broker.Reservation{}
	err := r.client.Get(ctx, request.NamespacedName, local)
	if client.IgnoreNotFound(err) != nil {
		return reconcile.Result{}, fmt.Errorf("reading Reservation %s: %w", request, err)
	}
	if err != nil {
		local = nil
	}
	result, err := r.deleteOrphans(ctx, request.NamespacedName, local)
	if err != nil || local == nil || ofBroker(local) {
		return result, err
	}
	step := r.sync
	if local.Namespace == r.Namespace && !controllerutil.ContainsFinalizer(local, broker.FinalizerRequest) {
		step = r.leaveToBroker
	}
	synced, err := step(ctx, local)
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		// The cache is behind.
		return reconcile.Result{RequeueAfter: time.Second}, nil
	}
	return earlier(result, synced), err
}

// ofBroker reports whether the broker keeps a Reservation, in a hub that is also a
// consumer: its own copy of one, one that was created in the hub, or one of another cluster, in
// that one's namespace. Their status is the broker's. After the end of the second, only its
// phase tells.
func ofBroker(r *broker.Reservation) bool {
	return strings.HasPrefix(r.Namespace, objects.Namespace("")) || r.Labels[broker.LabelRequester] != "" || controllerutil.ContainsFinalizer(r, broker.FinalizerLedger) ||
		r.Status.Phase == broker.ReservationReleased && !controllerutil.ContainsFinalizer(r, broker.FinalizerRequest)
}

// leaveToBroker claims no Reservation in the namespace of Spillway's programs, of which no
// pods overflow: in a hub that is also a consumer, those there are the broker's, for any
// requester. If no broker claims it, its status says where to create it.
func (r *Reconciler) leaveToBroker(ctx context.Context, local *broker.Reservation) (reconcile.Result, error) {
	s := &state{id: protocol.ReservationID(r.ClusterID, local.UID), local: local, now: r.Clock.Now()}
	if wait := local.CreationTimestamp.Add(brokerTakesWithin).Sub(s.now); wait > 0 {
		return reconcile.Result{RequeueAfter: wait}, nil
	}
	s.reported = notReported(reasonNamespaceOfBroker, fmt.Sprintf("Namespace %s is for Reservations of the hub, and no broker in this cluster has taken this one: create it in the namespace of its pods, or in the hub.", local.Namespace))
	return r.updateStatus(ctx, s)
}

func (r *Reconciler) enqueueAll(ctx context.Context) error {
	var list broker.ReservationList
	if err := r.client.List(ctx, &list); err != nil {
		return fmt.Errorf("listing Reservations: %w", err)
	}
	for i := range list.Items {
		r.source.Enqueue(client.ObjectKeyFromObject(&list.Items[i]))
	}
	return nil
}

// earlier returns the result that requeues first.
func earlier(a, b reconcile.Result) reconcile.Result {
	if a.RequeueAfter == 0 || (b.RequeueAfter != 0 && b.RequeueAfter < a.RequeueAfter) {
		return b
	}
	return a
}

func (r *Reconciler) sync(ctx context.Context, local *broker.Reservation) (reconcile.Result, error) {
	s := &state{id: protocol.ReservationID(r.ClusterID, local.UID), local: local, now: r.Clock.Now()}
	var err error
	if s.instructions, err = r.instructions(ctx, s.id); err != nil {
		return reconcile.Result{}, err
	}
	if !local.DeletionTimestamp.IsZero() {
		return r.release(ctx, s)
	}
	var result reconcile.Result
	for _, step := range []func(context.Context, *state) (reconcile.Result, error){
		r.claim, r.report, r.updateStatus, r.acknowledge, r.renew,
	} {
		stepResult, err := step(ctx, s)
		result = earlier(result, stepResult)
		if err != nil {
			return result, errors.Join(s.reportErr, err)
		}
	}
	return result, s.reportErr
}

func (r *Reconciler) instructions(ctx context.Context, id string) ([]broker.ReservationInstruction, error) {
	var list broker.ReservationInstructionList
	if err := r.client.List(ctx, &list, client.InNamespace(r.InstructionNamespace), client.MatchingFields{instruction.IndexReservation: id}); err != nil {
		return nil, fmt.Errorf("listing the ReservationInstructions of %s: %w", id, err)
	}
	return list.Items, nil
}

// claim adds the finalizer and this cluster's ID to a Reservation, or sets the
// condition that says why it is rejected.
func (r *Reconciler) claim(ctx context.Context, s *state) (reconcile.Result, error) {
	local := s.local
	if other := local.Spec.RequesterID; other != "" && other != r.ClusterID {
		s.reported = notReported(reasonWrongRequester, fmt.Sprintf("spec.requesterID is %q, but this cluster is %q: omit or correct it.", other, r.ClusterID))
		return reconcile.Result{}, nil
	}
	before := local.DeepCopy()
	local.Spec.RequesterID = r.ClusterID
	added := controllerutil.AddFinalizer(local, broker.FinalizerRequest)
	if !added && before.Spec.RequesterID != "" {
		return reconcile.Result{}, nil
	}
	err := r.client.Patch(ctx, local, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	if apierrors.IsInvalid(err) {
		before.DeepCopyInto(local)
		s.reported = notReported(protocol.CodeInvalid, "The Reservation is invalid in this cluster; correct it: "+err.Error())
		return reconcile.Result{}, nil
	}
	if err != nil {
		return reconcile.Result{}, fmt.Errorf("claiming Reservation %s/%s: %w", local.Namespace, local.Name, err)
	}
	return reconcile.Result{}, nil
}

// report sends the Reservation to the broker unless the broker has its current
// generation. If the broker cannot be reached, the status says so; s.reportErr
// makes the controller retry with backoff.
func (r *Reconciler) report(ctx context.Context, s *state) (reconcile.Result, error) {
	local := s.local
	if s.reported.Status == metav1.ConditionFalse {
		return reconcile.Result{}, nil
	}
	if view, ok := r.Mirror.Get(s.id); ok && view.SourceGeneration == local.Generation {
		s.reported = reported
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.reports, s.id)
		return reconcile.Result{}, nil
	}
	r.mu.Lock()
	last, sent := r.reports[s.id]
	r.mu.Unlock()
	if sent && last.generation == local.Generation && s.now.Before(last.due) {
		s.reported = last.condition
		return reconcile.Result{RequeueAfter: last.due.Sub(s.now)}, nil
	}
	if !sent && !r.Mirror.Synced() {
		// After a restart, the first Relist shows whether the broker has it.
		former := meta.FindStatusCondition(local.Status.Conditions, broker.ConditionReported)
		if former != nil && former.Status == metav1.ConditionTrue && former.ObservedGeneration == local.Generation {
			s.reported = *former
			return reconcile.Result{}, nil
		}
	}
	if why, err := r.unmappable(ctx, s); err != nil {
		return reconcile.Result{}, err
	} else if why != "" {
		s.reported = notReported(reasonNamespaceUnmappable, "The broker is not asked for capacity: "+why+".")
		return reconcile.Result{RequeueAfter: rejectedRetryAfter}, nil
	}
	_, keyed := demand.KeyOfReservation(local)
	owner := ""
	if keyed {
		owner = controllerOf(local)
	}
	view, err := r.Broker.PutReservation(ctx, protocol.ReservationRequest{
		SourceUID: local.UID, SourceNamespace: local.Namespace, SourceName: local.Name, SourceGeneration: local.Generation,
		SourceOwner: owner, ByHand: !keyed, Spec: local.Spec,
	})
	last = report{generation: local.Generation, due: s.now.Add(transport.ResendAfter), condition: reported, view: &view}
	var response *protocol.Error
	switch {
	case errors.As(err, &response) && response.Code != protocol.CodeUnavailable:
		last = report{generation: local.Generation, due: s.now.Add(cmp.Or(response.RetryAfter, rejectedRetryAfter)), condition: notReported(response.Code, response.Message)}
	case err != nil:
		s.reported = notReported(reasonBrokerUnreachable, err.Error())
		s.reportErr = fmt.Errorf("sending Reservation %s/%s to the broker: %w", local.Namespace, local.Name, err)
		return reconcile.Result{}, nil
	}
	s.reported = last.condition
	r.mu.Lock()
	defer r.mu.Unlock()
	r.reports[s.id] = last
	return reconcile.Result{RequeueAfter: last.due.Sub(s.now)}, nil
}

// unmappable is why no pod of the Reservation's namespace can run at any provider; empty if they
// can, or if the broker has a copy, with which something may be held.
func (r *Reconciler) unmappable(ctx context.Context, s *state) (why string, err error) {
	if _, known := r.Mirror.Get(s.id); known || r.Unmappable == nil {
		return "", nil
	}
	return r.Unmappable(ctx, s.local.Namespace)
}

// observe reads the broker's copy from the mirror or, until it is there, from the
// response to the last report.
func (r *Reconciler) observe(s *state) {
	s.synced = r.Mirror.Synced()
	if view, ok := r.Mirror.Get(s.id); ok {
		s.view = &view
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	s.view = r.reports[s.id].view
}

// updateStatus writes the local status if it differs from the computed one, and
// records events about the change.
func (r *Reconciler) updateStatus(ctx context.Context, s *state) (reconcile.Result, error) {
	r.observe(s)
	status := computeStatus(s)
	if equality.Semantic.DeepEqual(s.local.Status, status) {
		return reconcile.Result{}, nil
	}
	before := s.local.DeepCopy()
	s.local.Status = status
	if err := r.client.Status().Patch(ctx, s.local, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
		return reconcile.Result{}, fmt.Errorf("writing the status of Reservation %s/%s: %w", s.local.Namespace, s.local.Name, err)
	}
	for _, e := range statusEvents(&before.Status, &status) {
		r.recorder.Eventf(s.local, nil, e.kind, e.reason, eventAction, "%s", e.message)
	}
	return reconcile.Result{}, nil
}

// acknowledge reports which virtual nodes provide their allocation, and which allocations no
// pod can use, until the broker's view shows it.
func (r *Reconciler) acknowledge(ctx context.Context, s *state) (reconcile.Result, error) {
	if s.view == nil {
		return reconcile.Result{}, nil
	}
	ack := acknowledgement(s.view, &s.local.Status)
	if ack.Unusable = unusable(s.view, s.instructions); ack.Unusable == nil && acknowledged(s.view, &s.local.Status) {
		return reconcile.Result{}, nil
	}
	if wait := r.acks.Wait(s.id, ack, s.now); wait > 0 {
		return reconcile.Result{RequeueAfter: wait}, nil
	}
	if err := r.Broker.AckRequester(ctx, s.id, ack); err != nil {
		return reconcile.Result{}, fmt.Errorf("acknowledging reservation %s: %w", s.id, err)
	}
	return reconcile.Result{RequeueAfter: r.acks.Sent(s.id, ack, s.now)}, nil
}
