package hold

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/spillway-dev/spillway/agent/internal/hold/handover"
	"github.com/spillway-dev/spillway/agent/internal/hold/verdict"
	"github.com/spillway-dev/spillway/agent/internal/instruction"
	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/placeholder"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// requeueAfter is the delay before a step is repeated that waits for a change
// without an event.
const requeueAfter = verdict.RetryAfter

// conflictRetryAfter is the delay after an instruction was changed while it was judged.
const conflictRetryAfter = 100 * time.Millisecond

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
	// Observe returns the state of nodes and pods.
	Observe func(ctx context.Context) (Observed, error)
	// Placeholders of the holds; none if its namespace is empty: then a hold is only
	// accounted for. With them, PlaceChanged is to be called for each change of a place.
	Placeholders placeholder.Options
	// GuestNamespaces are those in which guests are tried before a hold is accepted; none where
	// it is nil.
	GuestNamespaces GuestNamespaces
	// ProofTimeout is how long the scheduler may take to find the next place for a
	// placeholder, 20 s where 0. An attempt is refused whose guests cannot be tried in that time
	// after it was recorded, or some seconds after it is proven. All of it together takes no longer
	// than the broker waits, if the broker says how long (spec.answerWithin).
	ProofTimeout time.Duration
	// Priority of guests and placeholders.
	Priority int32
	// LeaveWithin is how long guests may stay that use what this cluster withdraws of an
	// accepted hold; 10 min where 0.
	LeaveWithin time.Duration
	// Writers is the number of statuses that are written at a time; 8 where 0.
	Writers int
	// Debounce is how long changes of nodes and pods are collected before the holds are
	// judged again; 1 s where 0.
	Debounce time.Duration
	// Clock; the real one where nil.
	Clock clock.PassiveClock
}

// Observed is the state of nodes and pods.
type Observed interface {
	// Slots are what the nodes have free, less a headroom.
	Slots(headroom corev1.ResourceList) []capacity.Slot
	// Guests are what the guests of each consumer request.
	Guests() map[string]inventory.Guests
	// Pending are the cluster's own pods with at least a priority that wait for a node.
	Pending(priority int32) []broker.PodSet
	// Places are the guests and placeholders of a consumer.
	Places(consumer string) inventory.Places
	// Node returns a node, nil if it does not exist.
	Node(name string) *corev1.Node
}

// Reconciler decides ProviderInstructions, consumer by consumer.
type Reconciler struct {
	Options
	provider peering.Provider
	client   client.Client
	live     client.Reader
	recorder events.EventRecorder
	enqueue  chan event.GenericEvent

	// Only the one worker uses these. memory is what is known of instructions besides their
	// statuses, and written the instructions as last written.
	consumers map[string]*consumer
	memory    *verdict.Memory
	written   written
	places    *places

	mu sync.Mutex
	// changed are the consumers of which the driver has observed a change, moved those that
	// are enqueued because of their guests and placeholders.
	changed, moved map[string]bool
}

// consumer is what is known of one consumer.
type consumer struct {
	// unusedSince is when it was first seen with neither an instruction nor a guest, and gone is set
	// once it has no peering either.
	unusedSince time.Time
	gone        bool
	// grant is what it was granted last, nil if that is not in effect, and grantWaits since when.
	grant      *inEffect
	grantWaits time.Time
	// marking: guests may be on nodes that are not offered. prepared: a namespace to try guests in
	// is being made.
	marking, prepared bool
	// planned is what was planned last for the guests that wait, reported are those of which an
	// event says that there is no place for them, and restsUntil is when places may be planned
	// again because of guests and placeholders.
	planned    handover.Moves
	reported   sets.Set[types.UID]
	restsUntil time.Time
}

// of is what is known of a consumer.
func (r *Reconciler) of(name string) *consumer {
	if r.consumers[name] == nil {
		r.consumers[name] = &consumer{}
	}
	return r.consumers[name]
}

// New makes a Reconciler that reads with c, which may be behind the API server, and
// with live, which is not.
func New(c client.Client, live client.Reader, recorder events.EventRecorder, provider peering.Provider, options Options) *Reconciler {
	options.Clock = cmp.Or[clock.PassiveClock](options.Clock, clock.RealClock{})
	options.Writers = cmp.Or(options.Writers, 8)
	options.ProofTimeout = cmp.Or(options.ProofTimeout, 20*time.Second)
	options.LeaveWithin = cmp.Or(options.LeaveWithin, 10*time.Minute)
	options.Debounce = cmp.Or(options.Debounce, time.Second)
	return &Reconciler{
		Options: options, provider: provider, client: c, live: live, recorder: recorder,
		enqueue: make(chan event.GenericEvent, 1024), changed: map[string]bool{}, moved: map[string]bool{},
		consumers: map[string]*consumer{}, memory: verdict.NewMemory(), written: written{}, places: &places{unseen: map[types.UID]unseen{}},
	}
}

// Enqueue enqueues a consumer for which the driver has observed a change. It does not
// block: if the queue is full, the consumer is reconciled with the next resync.
func (r *Reconciler) Enqueue(consumer string) {
	r.mu.Lock()
	r.changed[consumer] = true
	r.mu.Unlock()
	r.send(eventOf(consumer))
}

// PlaceChanged enqueues a consumer of which Options.Observe shows another guest or
// placeholder than before, unless it is enqueued for another one already. It does not
// block, as Enqueue.
func (r *Reconciler) PlaceChanged(consumer string) {
	if r.Placeholders.Namespace == "" {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.moved[consumer] {
		r.moved[consumer] = r.send(eventOf(consumer))
	}
}

func eventOf(consumer string) event.GenericEvent {
	return event.GenericEvent{Object: &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: consumer}}}
}

func (r *Reconciler) send(e event.GenericEvent) bool {
	select {
	case r.enqueue <- e:
		return true
	default:
		return false
	}
}

// sendAfter enqueues a consumer after a time, until which the cache may not show what was
// written.
func (r *Reconciler) sendAfter(consumer string, after time.Duration) {
	time.AfterFunc(after, func() {
		if !r.send(eventOf(consumer)) {
			r.sendAfter(consumer, requeueAfter) // the queue is full
		}
	})
}

// SetupWithManager adds the controller and the periodic resync of all consumers.
func (r *Reconciler) SetupWithManager(mgr ctrl.Manager) error {
	err := ctrl.NewControllerManagedBy(mgr).Named("holds").
		Watches(&broker.ProviderInstruction{}, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
			return requestFor(o.(*broker.ProviderInstruction).Spec.RequesterClusterID)
		}), builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		Watches(&corev1.Pod{}, handler.EnqueueRequestsFromMapFunc(r.consumerOf), builder.WithPredicates(guestEnded)).
		Watches(&corev1.Pod{}, r.judgeOnPods()).
		Watches(&corev1.Node{}, r.judgeOnNodes()).
		WatchesRawSource(source.Channel(r.enqueue, &handler.EnqueueRequestForObject{})).
		// One at a time: the same capacity must not be promised to two consumers.
		WithOptions(controller.Options{MaxConcurrentReconciles: 1}).
		Complete(r)
	if err != nil {
		return err
	}
	return mgr.Add(manager.RunnableFunc(r.resync))
}

func requestFor(consumer string) []reconcile.Request {
	if consumer == "" {
		return nil
	}
	return []reconcile.Request{{NamespacedName: types.NamespacedName{Name: consumer}}}
}

// guestEnded lets only those events of pods pass after which a pod uses less.
var guestEnded = predicate.Funcs{
	CreateFunc:  func(event.CreateEvent) bool { return false },
	GenericFunc: func(event.GenericEvent) bool { return false },
	UpdateFunc: func(e event.UpdateEvent) bool {
		return !inventory.Finished(e.ObjectOld.(*corev1.Pod)) && inventory.Finished(e.ObjectNew.(*corev1.Pod))
	},
}

// consumerOf maps a guest to its consumer.
func (r *Reconciler) consumerOf(ctx context.Context, o client.Object) []reconcile.Request {
	consumer, ok := r.guestOf(ctx, o.(*corev1.Pod))
	if !ok {
		return nil
	}
	return requestFor(consumer)
}

func (r *Reconciler) guestOf(ctx context.Context, pod *corev1.Pod) (consumer string, ok bool) {
	return r.Recognizer.Guest(pod, func(name string) map[string]string {
		var namespace corev1.Namespace
		if r.client.Get(ctx, client.ObjectKey{Name: name}, &namespace) != nil {
			return nil
		}
		return namespace.Labels
	})
}

// Reconcile decides the instructions of one consumer that are not decided yet, makes
// the grant match what is held, and writes the statuses. JudgeAll judges the holds of
// all consumers again.
func (r *Reconciler) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if request == JudgeAll {
		return r.judgeStanding(ctx)
	}
	if left := r.of(request.Name).restsUntil.Sub(r.Clock.Now()); left > 0 {
		return reconcile.Result{RequeueAfter: left}, nil
	}
	return r.reconcileConsumer(ctx, request.Name)
}

func (r *Reconciler) reconcileConsumer(ctx context.Context, consumer string) (result reconcile.Result, err error) {
	r.mu.Lock()
	delete(r.moved, consumer)
	r.mu.Unlock()
	// First the decisions, for which the broker waits.
	result, err = r.decideConsumer(ctx, consumer)
	if retryAfter := r.moveGuests(ctx, consumer); retryAfter > 0 && (result.RequeueAfter == 0 || retryAfter < result.RequeueAfter) {
		result.RequeueAfter = retryAfter
	}
	if r.of(consumer).gone {
		delete(r.consumers, consumer)
	}
	return result, err
}

// decideConsumer decides the instructions of a consumer, and plans the moves of its guests.
func (r *Reconciler) decideConsumer(ctx context.Context, consumer string) (result reconcile.Result, err error) {
	of := r.of(consumer)
	of.planned = handover.Moves{}
	in, err := r.read(ctx, consumer, r.Priority)
	if err != nil {
		return reconcile.Result{}, err
	}
	if !slices.ContainsFunc(in.Instructions, func(i *broker.ProviderInstruction) bool { return i.Spec.RequesterClusterID == consumer }) {
		of.grant, of.grantWaits, of.marking, of.prepared = nil, time.Time{}, false, false
		r.takeChanged(consumer)
		if _, err := r.prove(ctx, in, nil); err != nil {
			return reconcile.Result{}, err
		}
		return r.cleanUp(ctx, consumer, in.Nodes().Guests[consumer])
	}
	of.unusedSince = time.Time{}
	decisions, err := r.record(ctx, &in)
	if err == nil {
		var granted peering.Progress
		if decisions, granted, err = r.enforce(ctx, in, decisions); err == nil {
			result, err = r.writeStatuses(ctx, in, decisions, granted)
		}
		if err == nil && granted.Done && slices.ContainsFunc(decisions, verdict.Decision.Deferred) {
			return r.decideConsumer(ctx, consumer)
		}
	}
	if err == nil && of.marking {
		exposed, more, failed := r.markGuests(ctx, in, consumer)
		of.marking = exposed
		switch {
		case more && failed == nil:
			result.RequeueAfter = conflictRetryAfter
		case failed != nil:
			// It must not keep holds from being decided.
			of.marking = true
			result.RequeueAfter = cmp.Or(result.RequeueAfter, requeueAfter)
			log.FromContext(ctx).Info("Guests could not be marked", "consumer", consumer, "reason", failed.Error(), "retryAfter", result.RequeueAfter.String())
		}
	}
	if apierrors.IsConflict(err) {
		return reconcile.Result{RequeueAfter: conflictRetryAfter}, nil
	}
	return result, err
}

// enforce makes places and the grant those of the decisions. What the scheduler or the API
// server refuses is not held any more.
func (r *Reconciler) enforce(ctx context.Context, in input, decisions []verdict.Decision) (enforced []verdict.Decision, granted peering.Progress, err error) {
	r.memory.Note(decisions)
	r.prepareTrials(ctx, in.Consumer, decisions)
	for refused := true; refused; {
		if decisions, err = r.prove(ctx, in, decisions); err != nil {
			return nil, granted, err
		}
		// Before the grant, which may take more than one reconcile to be lowered again.
		if decisions, refused, err = r.try(ctx, in.Consumer, decisions); err != nil {
			return nil, granted, err
		}
	}
	total, pods := verdict.Grant(decisions)
	granted, err = r.ensureGrant(ctx, in.Consumer, total, pods)
	return decisions, granted, err
}

// writeStatuses writes the statuses of the decisions that are not settled.
func (r *Reconciler) writeStatuses(ctx context.Context, in input, decisions []verdict.Decision, granted peering.Progress) (result reconcile.Result, err error) {
	writes, retryAfter := verdict.Statuses(decisions, verdict.Effect{
		Granted: granted, GrantWaits: r.of(in.Consumer).grantWaits, Now: r.Clock.Now(), LeaveWithin: r.LeaveWithin,
		Guests: func() inventory.Guests { return in.Nodes().Guests[in.Consumer] },
	})
	if err = r.writeAll(ctx, writes); err == nil && granted.Done {
		for _, w := range writes {
			r.memory.Written(w.Instruction, r.Clock.Now())
		}
	}
	return reconcile.Result{RequeueAfter: retryAfter}, err
}

// record decides, writes what the decisions hold in addition before anything is granted, and
// then reads all instructions from the API server: of two agents that hold the same
// capacity at once, at least one reads what the other has written. It decides again
// if the instructions are not what the decisions assumed.
func (r *Reconciler) record(ctx context.Context, in *input) ([]verdict.Decision, error) {
	decisions := verdict.Decide(in.Input)
	recording := peering.Waiting(verdict.ReasonGrantPending, "Waiting for the grant to be in effect.")
	if r.Placeholders.Namespace != "" {
		recording.Message = "Waiting for the grant to be in effect, and for the scheduler to find a place for each pod."
	}
	writes := verdict.Recordings(decisions, recording, in.Now)
	if len(writes) == 0 {
		return decisions, nil
	}
	r.memory.Recorded(decisions, false)
	if err := r.writeAll(ctx, writes); err != nil {
		return nil, err
	}
	assumed := map[types.UID]broker.HeldCapacity{}
	for _, of := range in.Instructions {
		assumed[of.UID] = heldBy(of)
	}
	var live broker.ProviderInstructionList
	if err := r.live.List(ctx, &live, client.InNamespace(r.Namespace)); err != nil {
		return nil, fmt.Errorf("listing provider instructions: %w", err)
	}
	for i := range live.Items {
		if of := &live.Items[i]; !capacity.Equal(heldBy(of), assumed[of.UID]) {
			in.Instructions = pointers(live.Items)
			return verdict.Decide(in.Input), nil
		}
	}
	r.memory.Recorded(decisions, true)
	return decisions, nil
}

// heldBy is what an instruction holds so far.
func heldBy(of *broker.ProviderInstruction) broker.HeldCapacity {
	return *cmp.Or(instruction.Held(of), &broker.HeldCapacity{})
}

func pointers(items []broker.ProviderInstruction) []*broker.ProviderInstruction {
	out := make([]*broker.ProviderInstruction, len(items))
	for i := range items {
		out[i] = &items[i]
	}
	return out
}

// input is what the instructions of one consumer are decided and enforced on.
type input struct {
	verdict.Input
	observed Observed
}

// read gathers what the instructions of a consumer are decided on. The instructions
// may be behind the API server, but not behind what this Reconciler has written.
// pending is the lowest priority of the pending pods that count.
func (r *Reconciler) read(ctx context.Context, consumer string, pending int32) (input, error) {
	var list broker.ProviderInstructionList
	if err := r.client.List(ctx, &list, client.InNamespace(r.Namespace), client.UnsafeDisableDeepCopy); err != nil {
		return input{}, fmt.Errorf("listing provider instructions: %w", err)
	}
	observed, err := r.Observe(ctx)
	if err != nil {
		return input{}, err
	}
	in := verdict.Input{
		Consumer: consumer, Instructions: r.written.merge(pointers(list.Items)), Lending: r.Lending, Memory: r.memory,
		Nodes: sync.OnceValue(func() verdict.Nodes {
			return verdict.Nodes{Slots: observed.Slots(r.Headroom), Guests: observed.Guests(), Pending: observed.Pending(pending)}
		}),
		Now: r.Clock.Now(), GrantWaits: r.of(consumer).grantWaits,
	}
	r.memory.Keep(in.Instructions)
	return input{in, observed}, nil
}

// ensureGrant lets a consumer use a total and a number of pods, and those of
// DaemonSets that its virtual node runs besides. The driver is not called while the
// same grant is in effect and nothing that it watches has changed.
func (r *Reconciler) ensureGrant(ctx context.Context, consumer string, total corev1.ResourceList, pods int32) (peering.Progress, error) {
	if pods > 0 {
		pods += peering.DaemonSetPodsAllowance
	}
	changed := r.takeChanged(consumer)
	of := r.of(consumer)
	if last := of.grant; last != nil && !changed && last.pods == pods && equality.Semantic.DeepEqual(last.total, total) {
		return last.progress, nil
	}
	of.grant = nil
	granted, err := r.provider.EnsureGrant(ctx, consumer, total, pods)
	if err != nil {
		return granted, fmt.Errorf("granting %s to %s: %w", broker.FromList(total), consumer, err)
	}
	if granted.Done {
		of.grant, of.grantWaits = &inEffect{total, pods, granted}, time.Time{}
	} else if of.grantWaits.IsZero() {
		of.grantWaits = r.Clock.Now()
	}
	return granted, nil
}

// takeChanged reports whether the driver has observed a change for a consumer since the
// last call.
func (r *Reconciler) takeChanged(consumer string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	changed := r.changed[consumer]
	delete(r.changed, consumer)
	return changed
}

// inEffect is a grant that the driver enforces.
type inEffect struct {
	total    corev1.ResourceList
	pods     int32
	progress peering.Progress
}
