package reservation

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
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
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/spillway-dev/spillway/agent/internal/instruction"
	"github.com/spillway-dev/spillway/agent/internal/transport"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

const (
	// again is how long something sent may take to show in the stream before it
	// is sent again.
	again = 10 * time.Second
	// patience is the pause after the broker has refused a request: it may have
	// been told what was wrong with it since.
	patience = 30 * time.Second
	// maxNote is the longest note that an Event takes, in bytes.
	maxNote = 1024

	reasonUnreachable = "BrokerUnreachable"
	reasonReported    = "Reported"
)

// everything is the request to look at every Reservation.
var everything = reconcile.Request{}

// Options of a Reconciler. All fields but Clock are needed.
type Options struct {
	// ClusterID of this cluster.
	ClusterID string
	// InstructionNamespace holds the ReservationInstructions.
	InstructionNamespace string
	Broker               transport.BrokerCommunicator
	Mirror               *transport.Mirror[protocol.ConsumerView]
	// Clock is the real one where nil.
	Clock clock.Clock
}

// Reconciler keeps local Reservations and the broker's in step.
type Reconciler struct {
	Options
	client   client.Client
	live     client.Reader
	recorder events.EventRecorder

	mu       sync.Mutex
	queue    workqueue.TypedRateLimitingInterface[reconcile.Request]
	reported map[string]report
	acked    map[string]sentAck
	dropped  map[string]time.Time
}

// report is what was last put for a reservation, until the stream shows it.
type report struct {
	generation int64
	// due is when to put it again.
	due time.Time
	// condition says how it went.
	condition metav1.Condition
	// view is the broker's answer, nil where that was a no.
	view *protocol.ConsumerView
}

type sentAck struct {
	ack protocol.RequesterAck
	at  time.Time
}

// New makes a Reconciler that uses the manager's clients.
func New(mgr manager.Manager, options Options) *Reconciler {
	if options.Clock == nil {
		options.Clock = clock.RealClock{}
	}
	return &Reconciler{
		Options: options,
		client:  mgr.GetClient(), live: mgr.GetAPIReader(), recorder: mgr.GetEventRecorder("spillway-agent"),
		reported: map[string]report{}, acked: map[string]sentAck{}, dropped: map[string]time.Time{},
	}
}

// SetupWithManager adds the controller. instruction.SetupIndex comes before.
func (r *Reconciler) SetupWithManager(mgr manager.Manager) error {
	return builder.ControllerManagedBy(mgr).Named("reservations").
		For(&broker.Reservation{}, builder.WithPredicates(predicate.Or[client.Object](
			predicate.GenerationChangedPredicate{}, predicate.AnnotationChangedPredicate{}, predicate.LabelChangedPredicate{}, finalizersChanged))).
		Watches(&broker.ReservationInstruction{}, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
			spec := &o.(*broker.ReservationInstruction).Spec
			if spec.SourceName == "" {
				return nil
			}
			return []reconcile.Request{key(spec.SourceNamespace, spec.SourceName)}
		})).
		WatchesRawSource(source.Func(r.follow)).
		WithOptions(controller.Options{
			MaxConcurrentReconciles: 4,
			RateLimiter:             workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](200*time.Millisecond, 30*time.Second),
		}).
		Complete(r)
}

var finalizersChanged = predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
	return !slices.Equal(e.ObjectOld.GetFinalizers(), e.ObjectNew.GetFinalizers())
}}

// follow queues the Reservations that the stream speaks of.
func (r *Reconciler) follow(_ context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
	r.mu.Lock()
	r.queue = queue
	r.mu.Unlock()
	r.Mirror.Subscribe(func(change transport.Change[protocol.ConsumerView]) {
		for _, view := range change.Views {
			if view.SourceName != "" {
				queue.Add(key(view.SourceNamespace, view.SourceName))
			}
		}
		if change.Relisted {
			// What was sent before may be what the broker has forgotten.
			r.mu.Lock()
			clear(r.reported)
			clear(r.acked)
			clear(r.dropped)
			r.mu.Unlock()
			queue.Add(everything)
		}
	})
	return nil
}

func key(namespace, name string) reconcile.Request {
	return reconcile.Request{NamespacedName: types.NamespacedName{Namespace: namespace, Name: name}}
}

// Reconcile brings one Reservation and the broker's copy of it together.
func (r *Reconciler) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	if request == everything {
		return reconcile.Result{}, r.queueAll(ctx)
	}
	local := &broker.Reservation{}
	err := r.client.Get(ctx, request.NamespacedName, local)
	if client.IgnoreNotFound(err) != nil {
		return reconcile.Result{}, fmt.Errorf("reading Reservation %s: %w", request, err)
	}
	if err != nil {
		local = nil
	}
	result, err := r.releaseOrphans(ctx, request.NamespacedName, local)
	if err != nil || local == nil || local.Labels[broker.LabelRequester] != "" {
		// With that label it is the broker's own, in a hub that is also a consumer.
		return result, err
	}
	own, err := r.reconcile(ctx, local)
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		// The cache is behind.
		return reconcile.Result{RequeueAfter: time.Second}, nil
	}
	return sooner(result, own), err
}

func (r *Reconciler) queueAll(ctx context.Context) error {
	var all broker.ReservationList
	if err := r.client.List(ctx, &all); err != nil {
		return fmt.Errorf("listing Reservations: %w", err)
	}
	r.mu.Lock()
	queue := r.queue
	r.mu.Unlock()
	for i := range all.Items {
		queue.Add(key(all.Items[i].Namespace, all.Items[i].Name))
	}
	return nil
}

func sooner(a, b reconcile.Result) reconcile.Result {
	if a.RequeueAfter == 0 || (b.RequeueAfter != 0 && b.RequeueAfter < a.RequeueAfter) {
		return b
	}
	return a
}

func (r *Reconciler) reconcile(ctx context.Context, local *broker.Reservation) (reconcile.Result, error) {
	id := protocol.ReservationID(r.ClusterID, local.UID)
	instructions, err := r.instructions(ctx, id)
	if err != nil {
		return reconcile.Result{}, err
	}
	in := input{local: local, instructions: instructions, now: r.Clock.Now()}
	if !local.DeletionTimestamp.IsZero() {
		return r.release(ctx, id, in)
	}
	var result reconcile.Result
	var failure error
	if claimed, err := r.claim(ctx, local); err != nil {
		return reconcile.Result{}, err
	} else if claimed.Status == metav1.ConditionFalse {
		in.reported = claimed
	} else {
		in.reported, result, failure = r.report(ctx, id, local)
	}
	in.view, in.synced = r.view(id)
	status, err := r.write(ctx, in)
	if err != nil {
		return reconcile.Result{}, err
	}
	if in.view != nil {
		acked, err := r.acknowledge(ctx, in.view, status)
		result, failure = sooner(result, acked), errors.Join(failure, err)
	}
	return result, failure
}

// claim makes a Reservation ours: with the finalizer, and with our name in it.
// The condition says what is wrong with it, if something is.
func (r *Reconciler) claim(ctx context.Context, local *broker.Reservation) (metav1.Condition, error) {
	if other := local.Spec.RequesterID; other != "" && other != r.ClusterID {
		return notReported("WrongRequester", fmt.Sprintf("requesterID is %q, but this cluster is %q: leave it out, or correct it", other, r.ClusterID)), nil
	}
	before := local.DeepCopy()
	local.Spec.RequesterID = r.ClusterID
	added := controllerutil.AddFinalizer(local, broker.FinalizerRequest)
	if !added && before.Spec.RequesterID != "" {
		return metav1.Condition{}, nil
	}
	err := r.client.Patch(ctx, local, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	if apierrors.IsInvalid(err) {
		before.DeepCopyInto(local)
		return notReported(protocol.CodeInvalid, "this cluster cannot ask for it as it is written: "+err.Error()), nil
	}
	if err != nil {
		return metav1.Condition{}, fmt.Errorf("claiming Reservation %s/%s: %w", local.Namespace, local.Name, err)
	}
	return metav1.Condition{}, nil
}

func notReported(reason, message string) metav1.Condition {
	return metav1.Condition{Type: broker.ConditionReported, Status: metav1.ConditionFalse, Reason: reason, Message: message}
}

var isReported = metav1.Condition{Type: broker.ConditionReported, Status: metav1.ConditionTrue, Reason: reasonReported, Message: "the broker has this request"}

// report puts a Reservation to the broker unless it is there as it is now.
func (r *Reconciler) report(ctx context.Context, id string, local *broker.Reservation) (metav1.Condition, reconcile.Result, error) {
	now := r.Clock.Now()
	if view, ok := r.Mirror.Get(id); ok && view.SourceGeneration == local.Generation {
		r.forgetReport(id)
		return isReported, reconcile.Result{}, nil
	}
	r.mu.Lock()
	last, sent := r.reported[id]
	r.mu.Unlock()
	if sent && last.generation == local.Generation && now.Before(last.due) {
		return last.condition, reconcile.Result{RequeueAfter: last.due.Sub(now)}, nil
	}
	if !sent && !r.Mirror.Synced() {
		// After a restart, the stream will soon say what the broker has.
		was := meta.FindStatusCondition(local.Status.Conditions, broker.ConditionReported)
		if was != nil && was.Status == metav1.ConditionTrue && was.ObservedGeneration == local.Generation {
			return *was, reconcile.Result{}, nil
		}
	}
	view, err := r.Broker.PutReservation(ctx, protocol.ReservationRequest{
		SourceUID: local.UID, SourceNamespace: local.Namespace, SourceName: local.Name, SourceGeneration: local.Generation,
		Spec: local.Spec,
	})
	last = report{generation: local.Generation, due: now.Add(again), condition: isReported, view: &view}
	var answer *protocol.Error
	switch {
	case errors.As(err, &answer) && answer.Code != protocol.CodeUnavailable:
		last = report{generation: local.Generation, due: now.Add(patience), condition: notReported(answer.Code, answer.Message)}
	case err != nil:
		return notReported(reasonUnreachable, err.Error()), reconcile.Result{}, fmt.Errorf("putting Reservation %s/%s to the broker: %w", local.Namespace, local.Name, err)
	}
	r.mu.Lock()
	r.reported[id] = last
	r.mu.Unlock()
	return last.condition, reconcile.Result{RequeueAfter: last.due.Sub(now)}, nil
}

// view is the broker's copy: as the stream says, or, until it does, as the broker
// answered.
func (r *Reconciler) view(id string) (view *protocol.ConsumerView, synced bool) {
	synced = r.Mirror.Synced()
	if streamed, ok := r.Mirror.Get(id); ok {
		return &streamed, synced
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.reported[id].view, synced
}

func (r *Reconciler) forgetReport(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.reported, id)
}

// write brings the local status up to date and tells what has happened.
func (r *Reconciler) write(ctx context.Context, in input) (*broker.ReservationStatus, error) {
	status := compute(in)
	if equality.Semantic.DeepEqual(in.local.Status, status) {
		return &status, nil
	}
	before := in.local.DeepCopy()
	in.local.Status = status
	if err := r.client.Status().Patch(ctx, in.local, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
		return nil, fmt.Errorf("writing the status of Reservation %s/%s: %w", in.local.Namespace, in.local.Name, err)
	}
	for _, h := range happenings(&before.Status, &status) {
		r.recorder.Eventf(in.local, nil, h.kind, h.reason, "Reserve", "%s", strings.ToValidUTF8(h.note[:min(len(h.note), maxNote)], ""))
	}
	return &status, nil
}

// acknowledge tells the broker which virtual nodes carry their allocation, until
// its view shows that.
func (r *Reconciler) acknowledge(ctx context.Context, view *protocol.ConsumerView, status *broker.ReservationStatus) (reconcile.Result, error) {
	if shows(view, status) {
		return reconcile.Result{}, nil
	}
	ack, now := acknowledgement(view, status), r.Clock.Now()
	r.mu.Lock()
	last, sent := r.acked[view.ID]
	r.mu.Unlock()
	if due := last.at.Add(again); sent && equality.Semantic.DeepEqual(last.ack, ack) && now.Before(due) {
		return reconcile.Result{RequeueAfter: due.Sub(now)}, nil
	}
	if err := r.Broker.Ack(ctx, view.ID, nil, &ack); err != nil {
		return reconcile.Result{}, fmt.Errorf("reporting on reservation %s: %w", view.ID, err)
	}
	r.mu.Lock()
	r.acked[view.ID] = sentAck{ack: ack, at: now}
	r.mu.Unlock()
	return reconcile.Result{RequeueAfter: again}, nil
}

// release lets go of a Reservation that is being deleted: first here, then at
// the broker, then, when the broker says that it is released, of the object.
func (r *Reconciler) release(ctx context.Context, id string, in input) (reconcile.Result, error) {
	if !controllerutil.ContainsFinalizer(in.local, broker.FinalizerRequest) {
		return reconcile.Result{}, nil
	}
	in.view, in.synced = r.view(id)
	in.reported = isReported
	if was := meta.FindStatusCondition(in.local.Status.Conditions, broker.ConditionReported); was != nil {
		in.reported = *was
	}
	if in.view == nil && in.local.Status.ID == "" {
		// It never got as far as the broker, or the stream will show an orphan.
		return reconcile.Result{}, r.letGo(ctx, id, in.local)
	}
	if unreleased(in.instructions) != nil {
		_, err := r.write(ctx, in)
		return reconcile.Result{}, err
	}
	result, err := r.drop(ctx, id)
	if err != nil {
		in.reported = notReported(reasonUnreachable, "giving it back: "+err.Error())
		if _, failed := r.write(ctx, in); failed != nil {
			err = errors.Join(err, failed)
		}
		return reconcile.Result{}, err
	}
	if view, known := r.Mirror.Get(id); r.Mirror.Synced() && (!known || view.Status.Phase == broker.ReservationReleased) {
		// What a provider has yet to confirm is between the broker and it.
		return reconcile.Result{}, r.letGo(ctx, id, in.local)
	}
	_, err = r.write(ctx, in)
	return result, err
}

// letGo removes the finalizer.
func (r *Reconciler) letGo(ctx context.Context, id string, local *broker.Reservation) error {
	before := local.DeepCopy()
	controllerutil.RemoveFinalizer(local, broker.FinalizerRequest)
	if err := r.client.Patch(ctx, local, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("letting go of Reservation %s/%s: %w", local.Namespace, local.Name, err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.reported, id)
	delete(r.acked, id)
	return nil
}

// drop deletes a reservation at the broker, again if that takes long.
func (r *Reconciler) drop(ctx context.Context, id string) (reconcile.Result, error) {
	now := r.Clock.Now()
	r.mu.Lock()
	at, sent := r.dropped[id]
	r.mu.Unlock()
	if due := at.Add(again); sent && now.Before(due) {
		return reconcile.Result{RequeueAfter: due.Sub(now)}, nil
	}
	if err := r.Broker.DeleteReservation(ctx, id); err != nil {
		return reconcile.Result{}, fmt.Errorf("deleting reservation %s at the broker: %w", id, err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	// Remembered also when the object has been let go of: the cache may show it for
	// a moment longer.
	maps.DeleteFunc(r.dropped, func(_ string, at time.Time) bool { return !now.Before(at.Add(again)) })
	r.dropped[id] = now
	return reconcile.Result{RequeueAfter: again}, nil
}

// releaseOrphans gives back what the broker holds for a Reservation that is no
// longer here.
func (r *Reconciler) releaseOrphans(ctx context.Context, name types.NamespacedName, local *broker.Reservation) (reconcile.Result, error) {
	orphans := r.Mirror.Select(func(v protocol.ConsumerView) bool {
		return v.SourceNamespace == name.Namespace && v.SourceName == name.Name && (local == nil || v.SourceUID != local.UID) &&
			v.Status.Phase != broker.ReservationReleased
	})
	var result reconcile.Result
	for _, view := range orphans {
		// The cache may be behind; this is worth asking the API server.
		current := &broker.Reservation{}
		err := r.live.Get(ctx, name, current)
		if client.IgnoreNotFound(err) != nil {
			return result, fmt.Errorf("looking for Reservation %s: %w", name, err)
		}
		if err == nil && current.UID == view.SourceUID {
			continue
		}
		instructions, err := r.instructions(ctx, view.ID)
		if err != nil {
			return result, err
		}
		if unreleased(instructions) != nil {
			continue
		}
		dropped, err := r.drop(ctx, view.ID)
		if err != nil {
			return result, err
		}
		result = sooner(result, dropped)
	}
	return result, nil
}

func (r *Reconciler) instructions(ctx context.Context, id string) ([]broker.ReservationInstruction, error) {
	var list broker.ReservationInstructionList
	if err := r.client.List(ctx, &list, client.InNamespace(r.InstructionNamespace), client.MatchingFields{instruction.IndexReservation: id}); err != nil {
		return nil, fmt.Errorf("listing the ReservationInstructions of %s: %w", id, err)
	}
	return list.Items, nil
}

// unreleased returns an instruction that this cluster has not let go of yet, nil
// where there is none.
func unreleased(instructions []broker.ReservationInstruction) *broker.ReservationInstruction {
	for i := range instructions {
		if !meta.IsStatusConditionTrue(instructions[i].Status.Conditions, broker.ConditionRequesterReleased) {
			return &instructions[i]
		}
	}
	return nil
}
