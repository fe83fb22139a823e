package virtualnode

import (
	"cmp"
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
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

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/podindex"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// Options of a Reconciler. All fields but SchedulerName, Owners, Asked and Clock are required.
type Options struct {
	// InstructionNamespace holds the ReservationInstructions.
	InstructionNamespace string
	// SchedulerName is that of the pods that the scheduler with plugin Overflow schedules:
	// pending pods of others need no capacity. It is empty in a cluster without one.
	SchedulerName string
	// PeeringIdleTime is how long a peering is kept without a grant.
	PeeringIdleTime time.Duration
	// FinishedPodRetention is how long a finished pod keeps the peering, for its logs.
	FinishedPodRetention time.Duration
	// ReadyTimeout is how long a virtual node may take before an event reports it.
	ReadyTimeout time.Duration
	// ShrinkDelay is how long pods may still be bound to capacity after its removal.
	ShrinkDelay time.Duration
	// Owners looks up the controllers of other owners than ReplicaSets, StatefulSets and
	// Jobs, which have none if it is nil.
	Owners demand.Resolve
	// Asked returns how to reach a provider that has been asked for capacity and has not
	// answered: it is peered with meanwhile. None if it is nil.
	Asked func(provider string) (peer peering.Peer, asked bool)
	// Clock; the real one if nil.
	Clock clock.PassiveClock
}

const (
	// minRetry and maxRetry bound the delay between two tries of a driver's step.
	minRetry, maxRetry = time.Second, 5 * time.Second
	// askedRetry is the delay between two tries to peer with a provider that has been asked.
	askedRetry = 500 * time.Millisecond
	// ResyncPeriod is the interval at which every peering is reconciled.
	ResyncPeriod = 30 * time.Second
)

// stepBackoff is the backoff of a driver's step that has not failed.
var stepBackoff = wait.Backoff{Duration: minRetry, Factor: 2, Cap: maxRetry, Steps: 3}

// ControllerOptions are those of this controller and of package pods.
var ControllerOptions = controller.Options{MaxConcurrentReconciles: 4, ReconciliationTimeout: time.Minute}

// Reconciler keeps the virtual node of each provider.
type Reconciler struct {
	Options
	// Pods that are on virtual nodes or may overflow.
	Pods     *podindex.Index
	driver   peering.Driver
	client   client.Client
	live     client.Reader
	recorder events.EventRecorder
	// providers are enqueued here, reservations in package pods.
	providers, reservations chan event.GenericEvent

	mu       sync.Mutex
	peerings map[string]*peeringState
	// carried is by provider and instruction.
	carried  map[string]map[types.UID]carriedPods
	releases map[types.NamespacedName]release
	// inUse is whether pods use a Reservation's capacity, by provider and by its UID.
	inUse map[string]map[types.UID]bool
	// changed are the providers for which the driver is to be called.
	changed map[string]bool
}

// New returns a Reconciler that reads with c, which may be behind the API server,
// and with live, which is not.
func New(c client.Client, live client.Reader, recorder events.EventRecorder, driver peering.Driver, options Options) *Reconciler {
	options.Clock = cmp.Or[clock.PassiveClock](options.Clock, clock.RealClock{})
	if options.Asked == nil {
		options.Asked = func(string) (peering.Peer, bool) { return peering.Peer{}, false }
	}
	return &Reconciler{
		Options: options, driver: driver, client: c, live: live, recorder: recorder,
		providers: make(chan event.GenericEvent, 64), reservations: make(chan event.GenericEvent, 64),
		peerings: map[string]*peeringState{}, carried: map[string]map[types.UID]carriedPods{}, releases: map[types.NamespacedName]release{},
		inUse: map[string]map[types.UID]bool{}, changed: map[string]bool{}, Pods: podindex.New(options.SchedulerName),
	}
}

// SetupWithManager adds the controller and makes Pods follow the manager's cache.
func (r *Reconciler) SetupWithManager(mgr ctrl.Manager) error {
	if err := r.Pods.SetupWithManager(mgr); err != nil {
		return err
	}
	err := ctrl.NewControllerManagedBy(mgr).Named("virtual-nodes").
		Watches(&broker.ReservationInstruction{}, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
			return requestFor(o.(*broker.ReservationInstruction).Spec.TargetClusterID)
		})).
		Watches(&corev1.Node{}, handler.EnqueueRequestsFromMapFunc(ProviderRequests), builder.WithPredicates(NodeChanged)).
		Watches(&broker.Reservation{}, handler.EnqueueRequestsFromMapFunc(r.providersOf), builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		WatchesRawSource(r.Pods.SumsOnNodes(r.Clock)).
		WatchesRawSource(source.Channel(r.providers, &handler.EnqueueRequestForObject{})).
		WithOptions(ControllerOptions).
		Complete(r)
	if err != nil {
		return fmt.Errorf("setting up the virtual node controller: %w", err)
	}
	return mgr.Add(manager.RunnableFunc(r.resync))
}

// resync enqueues every peering that exists, at intervals, so that one without an
// instruction is found after a restart, and the driver renews what expires.
func (r *Reconciler) resync(ctx context.Context) error {
	wait.UntilWithContext(ctx, func(ctx context.Context) {
		peerings, err := r.driver.Observe(ctx)
		if err != nil && ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "Failed to list peerings")
		}
		for _, provider := range peerings {
			r.Enqueue(provider)
		}
	}, ResyncPeriod)
	return nil
}

// Enqueue enqueues a provider of which the driver may have observed a change, without
// blocking. If the queue is full, the provider is reconciled within the resync period.
func (r *Reconciler) Enqueue(provider string) {
	r.mu.Lock()
	r.changed[provider] = true
	r.mu.Unlock()
	enqueue(r.providers, &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: provider}})
}

// EnqueueAsked enqueues a provider that has been asked for capacity, unless it has granted
// some already. It does not block.
func (r *Reconciler) EnqueueAsked(provider string) {
	r.mu.Lock()
	_, granted := r.inUse[provider]
	r.mu.Unlock()
	if !granted {
		enqueue(r.providers, &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: provider}})
	}
}

// CapacityChanges sends a Reservation when the capacity that a virtual node provides
// for it has changed.
func (r *Reconciler) CapacityChanges() <-chan event.GenericEvent { return r.reservations }

// EachVersionOnNodes is a source of requests, with the provider's name, for each version of
// the pods on virtual nodes.
func (r *Reconciler) EachVersionOnNodes() source.Source { return r.Pods.VersionsOnNodes(r.Clock) }

// Candidates is a source of requests, with the name of the Reservation, for the pods that may
// use one.
func (r *Reconciler) Candidates() source.Source {
	return r.Pods.Reservations(r.Clock, r.ResolveOwners)
}

func enqueue(queue chan<- event.GenericEvent, o client.Object) {
	select {
	case queue <- event.GenericEvent{Object: o}:
	default:
	}
}

// ProviderRequests maps a virtual node to a request with the provider's name.
func ProviderRequests(_ context.Context, node client.Object) []reconcile.Request {
	return requestFor(podindex.ProviderOf(node.GetName()))
}

// NodeChanged filters out updates of nodes that change neither readiness nor
// capacity nor a cordon, such as heartbeats.
var NodeChanged = predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
	before, after := e.ObjectOld.(*corev1.Node), e.ObjectNew.(*corev1.Node)
	return nodeReady(before) != nodeReady(after) || before.Spec.Unschedulable != after.Spec.Unschedulable || !equality.Semantic.DeepEqual(before.Status.Allocatable, after.Status.Allocatable)
}}

// providersOf maps a Reservation to the providers of its instructions.
func (r *Reconciler) providersOf(ctx context.Context, o client.Object) []reconcile.Request {
	instructions, err := r.Instructions(ctx, o.(*broker.Reservation))
	if err != nil {
		log.FromContext(ctx).Error(err, "Failed to list the ReservationInstructions of a Reservation")
	}
	var out []reconcile.Request
	for _, in := range instructions {
		out = append(out, requestFor(in.Spec.TargetClusterID)...)
	}
	return out
}

// requestFor is a request for a provider; none if it is empty.
func requestFor(provider string) []reconcile.Request {
	if provider == "" {
		return nil
	}
	return []reconcile.Request{{NamespacedName: types.NamespacedName{Name: provider}}}
}
