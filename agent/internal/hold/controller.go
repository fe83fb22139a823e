package hold

import (
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/peering"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// requeueAfter is the delay before a step is repeated that waits for a change
// without an event.
const requeueAfter = 2 * time.Second

// Options of a Reconciler.
type Options struct {
	// Namespace of the ProviderInstructions.
	Namespace string
	// Lending and Headroom are the provider's terms, as they are advertised.
	Lending  broker.Lending
	Headroom corev1.ResourceList
	// Recognizer of guests and virtual nodes.
	Recognizer inventory.Recognizer
	// PeeringIdleTime is how long consumers keep an idle peering. The provider removes
	// it after twice that and five minutes.
	PeeringIdleTime time.Duration
	// Clock; the real one where nil.
	Clock clock.PassiveClock
}

// Reconciler decides ProviderInstructions, consumer by consumer.
type Reconciler struct {
	Options
	provider peering.Provider
	client   client.Client
	live     client.Reader
	recorder events.EventRecorder
	enqueue  chan event.GenericEvent

	// unusedSince is when a consumer was first seen with neither an instruction
	// nor a guest. Only the one worker uses it.
	unusedSince map[string]time.Time
}

// New makes a Reconciler that reads with c, which may be behind the API server, and
// with live, which is not.
func New(c client.Client, live client.Reader, recorder events.EventRecorder, provider peering.Provider, options Options) *Reconciler {
	if options.Clock == nil {
		options.Clock = clock.RealClock{}
	}
	return &Reconciler{
		Options: options, provider: provider, client: c, live: live, recorder: recorder,
		enqueue: make(chan event.GenericEvent, 64), unusedSince: map[string]time.Time{},
	}
}

// Enqueue enqueues a consumer. It does not block: if the queue is full, the
// consumer is reconciled with the next resync.
func (r *Reconciler) Enqueue(consumer string) {
	select {
	case r.enqueue <- event.GenericEvent{Object: &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: consumer}}}:
	default:
	}
}

// SetupWithManager adds the controller and the periodic resync of all consumers.
func (r *Reconciler) SetupWithManager(mgr ctrl.Manager) error {
	err := ctrl.NewControllerManagedBy(mgr).Named("holds").
		Watches(&broker.ProviderInstruction{}, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
			return requestFor(o.(*broker.ProviderInstruction).Spec.RequesterClusterID)
		})).
		Watches(&corev1.Pod{}, handler.EnqueueRequestsFromMapFunc(r.consumerOf)).
		WatchesRawSource(source.Channel(r.enqueue, &handler.EnqueueRequestForObject{})).
		// One at a time: the same capacity must not be promised to two consumers.
		WithOptions(controller.Options{MaxConcurrentReconciles: 1}).
		Complete(r)
	if err != nil {
		return err
	}
	return mgr.Add(leaderRunnable{r.resync})
}

func requestFor(consumer string) []reconcile.Request {
	return []reconcile.Request{{NamespacedName: types.NamespacedName{Name: consumer}}}
}

// consumerOf maps a guest to its consumer.
func (r *Reconciler) consumerOf(ctx context.Context, o client.Object) []reconcile.Request {
	consumer, ok := r.Recognizer.Guest(o.(*corev1.Pod), func(name string) map[string]string {
		var namespace corev1.Namespace
		if r.client.Get(ctx, client.ObjectKey{Name: name}, &namespace) != nil {
			return nil
		}
		return namespace.Labels
	})
	if !ok {
		return nil
	}
	return requestFor(consumer)
}

// Reconcile decides all instructions of one consumer, makes the grant match what
// is held, and writes the statuses.
func (r *Reconciler) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	consumer := request.Name
	in, err := r.read(ctx, consumer)
	if err != nil {
		return reconcile.Result{}, err
	}
	if !in.hasInstruction() {
		return r.cleanUp(ctx, consumer, in.guests[consumer])
	}
	delete(r.unusedSince, consumer)

	decisions := decide(in)
	total, pods := grant(decisions)
	granted, err := r.ensureGrant(ctx, consumer, total, pods)
	if err != nil {
		return reconcile.Result{}, err
	}
	using, within := in.guests[consumer].within(total, pods)
	var result reconcile.Result
	for _, d := range decisions {
		status := d.status(granted, within, using)
		if status.ObservedAttempt != d.instruction.Spec.Attempt {
			result.RequeueAfter = requeueAfter
		}
		err := r.writeStatus(ctx, d.instruction, status)
		if apierrors.IsConflict(err) {
			result.RequeueAfter = requeueAfter
		} else if err != nil {
			return reconcile.Result{}, err
		}
	}
	return result, nil
}

// read gathers what the instructions of a consumer are decided on.
func (r *Reconciler) read(ctx context.Context, consumer string) (input, error) {
	// Live, because the cache may not show what was just promised to another consumer.
	var instructions broker.ProviderInstructionList
	if err := r.live.List(ctx, &instructions, client.InNamespace(r.Namespace)); err != nil {
		return input{}, fmt.Errorf("listing provider instructions: %w", err)
	}
	cluster, err := inventory.Read(ctx, r.client, r.Recognizer)
	if err != nil {
		return input{}, err
	}
	return input{
		consumer: consumer, instructions: instructions.Items, lending: r.Lending,
		slots:  sync.OnceValue(func() []capacity.Slot { return cluster.Slots(r.Headroom) }),
		guests: guestsByConsumer(cluster),
	}, nil
}

// ensureGrant lets a consumer use a total and a number of pods, and those of
// DaemonSets that its virtual node runs besides.
func (r *Reconciler) ensureGrant(ctx context.Context, consumer string, total corev1.ResourceList, pods int32) (peering.Progress, error) {
	if pods > 0 {
		pods += peering.DaemonSetPodsAllowance
	}
	granted, err := r.provider.EnsureGrant(ctx, consumer, total, pods)
	if err != nil {
		return granted, fmt.Errorf("granting %s to %s: %w", broker.FromList(total), consumer, err)
	}
	return granted, nil
}

// writeStatus patches the status, and records an event if the condition changed. It
// returns a conflict if the instruction was changed, or replaced by another one of
// its name, since it was judged.
func (r *Reconciler) writeStatus(ctx context.Context, instruction *broker.ProviderInstruction, status broker.ProviderInstructionStatus) error {
	if equality.Semantic.DeepEqual(instruction.Status, status) {
		return nil
	}
	before := instruction.DeepCopy()
	instruction.Status = status
	if err := r.client.Status().Patch(ctx, instruction, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
		return client.IgnoreNotFound(fmt.Errorf("writing the status of provider instruction %s: %w", instruction.Name, err))
	}
	old := meta.FindStatusCondition(before.Status.Conditions, broker.ConditionEnforced)
	enforced := meta.FindStatusCondition(status.Conditions, broker.ConditionEnforced)
	if old != nil && old.Reason == enforced.Reason && old.Message == enforced.Message {
		return nil
	}
	kind := corev1.EventTypeNormal
	if enforced.Status == metav1.ConditionFalse && enforced.Reason != broker.ReasonReleased {
		kind = corev1.EventTypeWarning
	}
	r.recorder.Eventf(instruction, nil, kind, enforced.Reason, "Enforce", "%s", enforced.Message)
	log.FromContext(ctx).Info("Decided on a ProviderInstruction", "reservation", instruction.Spec.ReservationName, "consumer", instruction.Spec.RequesterClusterID,
		"attempt", instruction.Spec.Attempt, "reason", enforced.Reason, "message", enforced.Message)
	return nil
}
