package virtualnode

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
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
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// IndexNode finds pods by the node they are bound to, indexDaemon those of
// DaemonSets that wait for a node by that node.
const (
	IndexNode   = "spec.nodeName"
	indexDaemon = "spillway.daemonFor"
)

// Options of a Reconciler. Durations that are 0 get the default named.
type Options struct {
	// InstructionNamespace holds the ReservationInstructions.
	InstructionNamespace string
	// ReleaseGrace is how long a place must have been unneeded before it is
	// given back; 30 s.
	ReleaseGrace time.Duration
	// PeeringIdleTime is how long a link without a grant is kept; 30 min.
	PeeringIdleTime time.Duration
	// FinishedPodRetention is how long a finished pod keeps the link, for its
	// logs; 5 min.
	FinishedPodRetention time.Duration
	// Deadline is how long setting up may take before people are told; 2 min.
	Deadline time.Duration
	// RescueAfter is how long a pod may wait on a virtual node for a provider
	// that has refused it, or that has neither begun with it nor, meanwhile, with
	// another; 60 s.
	RescueAfter time.Duration
	// ProviderLostAfter is how long a provider must have been out of reach before
	// the pods that are to end there are removed without its word; 10 min.
	ProviderLostAfter time.Duration
	// Settle is the pause between seeing a node shrink and believing that no
	// pod is on its way there; 2 s.
	Settle time.Duration
	// Clock; the real one where nil.
	Clock clock.PassiveClock
}

func (o *Options) complete() {
	for value, standard := range map[*time.Duration]time.Duration{
		&o.ReleaseGrace: 30 * time.Second, &o.PeeringIdleTime: 30 * time.Minute, &o.FinishedPodRetention: 5 * time.Minute,
		&o.Deadline: 2 * time.Minute, &o.RescueAfter: time.Minute, &o.Settle: 2 * time.Second,
		&o.ProviderLostAfter: 10 * time.Minute,
	} {
		if *value == 0 {
			*value = standard
		}
	}
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
}

const (
	// soonest and latest bound the pauses between two tries of a driver's step.
	soonest, latest = time.Second, 5 * time.Second
	// lookAgain is how often everything is looked at with nothing to do.
	lookAgain = 30 * time.Second
)

// Reconciler is both controllers.
type Reconciler struct {
	Options
	driver    peering.Driver
	client    client.Client
	live      client.Reader
	recorder  events.EventRecorder
	providers chan event.GenericEvent
	requests  chan event.GenericEvent

	mu sync.Mutex
	// links is what is remembered of providers, tracked of Reservations.
	links   map[string]*link
	tracked map[types.NamespacedName]*tracked
}

// link is what is remembered of one provider. All but carried belongs to the
// provider's worker.
type link struct {
	peer peering.Peer
	// lastGrant is when a grant was there last.
	lastGrant time.Time
	// tearing is set from the first call of Teardown until it is done.
	tearing bool
	// waiting is since when a step is not done, told whether people know.
	waiting time.Time
	told    bool
	pause   time.Duration
	// started is how many pods there had started when they were looked at last, nil
	// if never; lately is when they became more.
	started *int
	lately  time.Time
	// stuck are the pods that people were told about.
	stuck map[types.UID]bool
	// carried is how many places of each instruction the node was last seen to
	// carry.
	carried map[types.UID]carried
}

type carried struct {
	places int32
	// since is when it was first seen to carry just so many.
	since time.Time
}

// tracked is what is remembered of one Reservation.
type tracked struct {
	uid   types.UID
	slack Slack
	// release is on its way; nil where none is.
	release *release
}

// release lowers a count. Virtual nodes keep to it from the moment it is
// decided, the Reservation says so when they do.
type release struct {
	target int32
	keep   map[string]int32
}

// New makes a Reconciler.
func New(driver peering.Driver, options Options) *Reconciler {
	options.complete()
	return &Reconciler{
		Options: options, driver: driver,
		providers: make(chan event.GenericEvent, 64), requests: make(chan event.GenericEvent, 64),
		links: map[string]*link{}, tracked: map[types.NamespacedName]*tracked{},
	}
}

// Enqueue has a provider looked at now. It does not block: what does not fit the
// queue is looked at in its turn.
func (r *Reconciler) Enqueue(provider string) {
	wake(r.providers, types.NamespacedName{Name: provider})
}

func wake(queue chan<- event.GenericEvent, name types.NamespacedName) {
	object := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name}}
	select {
	case queue <- event.GenericEvent{Object: object}:
	default:
	}
}

// SetupWithManager adds the controllers and the index they need.
func (r *Reconciler) SetupWithManager(mgr ctrl.Manager) error {
	r.client, r.live, r.recorder = mgr.GetClient(), mgr.GetAPIReader(), mgr.GetEventRecorder("spillway-agent")
	err := mgr.GetFieldIndexer().IndexField(context.Background(), &corev1.Pod{}, IndexNode, func(o client.Object) []string {
		return []string{o.(*corev1.Pod).Spec.NodeName}
	})
	if err != nil {
		return fmt.Errorf("indexing pods by node: %w", err)
	}
	if err := mgr.GetFieldIndexer().IndexField(context.Background(), &corev1.Pod{}, indexDaemon, daemonFor); err != nil {
		return fmt.Errorf("indexing pods of DaemonSets: %w", err)
	}
	err = ctrl.NewControllerManagedBy(mgr).Named("consume-provider").
		Watches(&broker.ReservationInstruction{}, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
			return one(types.NamespacedName{Name: o.(*broker.ReservationInstruction).Spec.TargetClusterID})
		})).
		Watches(&corev1.Pod{}, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
			if provider := providerOfNode(o.(*corev1.Pod).Spec.NodeName); provider != "" {
				return one(types.NamespacedName{Name: provider})
			}
			return nil
		})).
		Watches(&corev1.Node{}, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
			if provider := providerOfNode(o.GetName()); provider != "" {
				return one(types.NamespacedName{Name: provider})
			}
			return nil
		}), builder.WithPredicates(nodeMatters)).
		Watches(&broker.Reservation{}, handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, o client.Object) []reconcile.Request {
			instructions, err := r.instructions(ctx, o.(*broker.Reservation))
			if err != nil {
				log.FromContext(ctx).Error(err, "Looking for the providers of a reservation")
			}
			var out []reconcile.Request
			for _, in := range instructions {
				out = append(out, one(types.NamespacedName{Name: in.Spec.TargetClusterID})...)
			}
			return out
		}), builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		WatchesRawSource(source.Channel(r.providers, &handler.EnqueueRequestForObject{})).
		WithOptions(controller.Options{MaxConcurrentReconciles: 4}).
		Complete(reconcile.Func(r.reconcileProvider))
	if err != nil {
		return fmt.Errorf("setting up consumption by provider: %w", err)
	}
	err = ctrl.NewControllerManagedBy(mgr).Named("consume-reservation").
		Watches(&broker.Reservation{}, &handler.EnqueueRequestForObject{}).
		Watches(&broker.ReservationInstruction{}, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
			spec := o.(*broker.ReservationInstruction).Spec
			return one(types.NamespacedName{Namespace: spec.SourceNamespace, Name: spec.SourceName})
		})).
		Watches(&corev1.Pod{}, handler.EnqueueRequestsFromMapFunc(r.reservationOfPod)).
		WatchesRawSource(source.Channel(r.requests, &handler.EnqueueRequestForObject{})).
		WithOptions(controller.Options{MaxConcurrentReconciles: 4}).
		Complete(reconcile.Func(r.reconcileReservation))
	if err != nil {
		return fmt.Errorf("setting up consumption by reservation: %w", err)
	}
	return mgr.Add(leading{r.adopt})
}

// leading is a manager.Runnable for the leader only.
type leading struct{ manager.RunnableFunc }

func (leading) NeedLeaderElection() bool { return true }

// nodeMatters leaves out heartbeats.
var nodeMatters = predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
	before, after := e.ObjectOld.(*corev1.Node), e.ObjectNew.(*corev1.Node)
	return nodeReady(before) != nodeReady(after) || !equality.Semantic.DeepEqual(before.Status.Allocatable, after.Status.Allocatable)
}}

// adopt queues every link that exists now and then, so that none is forgotten
// that no instruction speaks of any more.
func (r *Reconciler) adopt(ctx context.Context) error {
	ticker := time.NewTicker(lookAgain)
	defer ticker.Stop()
	for {
		links, err := r.driver.Observe(ctx)
		if err != nil && ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "Looking for links")
		}
		for _, l := range links {
			r.Enqueue(l.ClusterID)
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// reservationOfPod names the Reservation that a pod's waiting or ending may
// matter to.
func (r *Reconciler) reservationOfPod(ctx context.Context, o client.Object) []reconcile.Request {
	pod := o.(*corev1.Pod)
	if pod.Spec.NodeName != "" && providerOfNode(pod.Spec.NodeName) == "" && !hasOverflowToleration(pod) {
		return nil
	}
	key, owner, _, ok := demand.KeyOf(pod, r.resolve(ctx))
	if !ok {
		return nil
	}
	return one(types.NamespacedName{Namespace: pod.Namespace, Name: key.Name(owner.Name)})
}

func hasOverflowToleration(pod *corev1.Pod) bool {
	for _, t := range pod.Spec.Tolerations {
		if t.Key == broker.TaintOverflow {
			return true
		}
	}
	return false
}

var replicaSets = schema.GroupVersionKind{Group: "apps", Version: "v1", Kind: "ReplicaSet"}

// resolve looks up a ReplicaSet's controller in the metadata cache.
func (r *Reconciler) resolve(ctx context.Context) demand.Resolve {
	type answer struct {
		above *metav1.OwnerReference
		ok    bool
	}
	known := map[types.UID]answer{}
	return func(namespace string, ref metav1.OwnerReference) (*metav1.OwnerReference, bool) {
		a, asked := known[ref.UID]
		if !asked {
			set := &metav1.PartialObjectMetadata{}
			set.SetGroupVersionKind(replicaSets)
			if err := r.client.Get(ctx, client.ObjectKey{Namespace: namespace, Name: ref.Name}, set); err == nil && set.UID == ref.UID {
				a = answer{metav1.GetControllerOf(set), true}
			}
			known[ref.UID] = a
		}
		return a.above, a.ok
	}
}

func one(name types.NamespacedName) []reconcile.Request {
	return []reconcile.Request{{NamespacedName: name}}
}

// providerOfNode is the provider whose capacity a node carries, empty for a real
// one.
func providerOfNode(name string) string {
	provider, ok := strings.CutPrefix(name, broker.VirtualNodePrefix)
	if !ok {
		return ""
	}
	return provider
}

func nodeReady(node *corev1.Node) bool {
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// link returns what is remembered of a provider.
func (r *Reconciler) link(provider string) *link {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.links[provider]
	if l == nil {
		// What went before is not known: a link that is found idle waits the
		// whole idle time once more.
		l = &link{peer: peering.Peer{ClusterID: provider}, lastGrant: r.Clock.Now(), stuck: map[types.UID]bool{}, carried: map[types.UID]carried{}}
		r.links[provider] = l
	}
	return l
}

func (r *Reconciler) forgetLink(provider string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.links, provider)
}

// daemonFor is the node that a waiting pod of a DaemonSet was made for.
func daemonFor(o client.Object) []string {
	pod := o.(*corev1.Pod)
	if pod.Spec.NodeName != "" || !ofEveryNode(pod) || pod.Spec.Affinity == nil || pod.Spec.Affinity.NodeAffinity == nil ||
		pod.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return nil
	}
	var nodes []string
	for _, term := range pod.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
		for _, field := range term.MatchFields {
			if field.Key == metav1.ObjectNameField {
				nodes = append(nodes, field.Values...)
			}
		}
	}
	return nodes
}

// setCarried records how many places of each instruction a node carries, and
// reports whether that is news.
func (r *Reconciler) setCarried(l *link, grants []Grant, places func(Grant) int32) (changed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.Clock.Now()
	before := l.carried
	l.carried = map[types.UID]carried{}
	for _, g := range grants {
		is := carried{places: places(g), since: now}
		if was, ok := before[g.Instruction.UID]; ok && was.places == is.places {
			is.since = was.since
		} else {
			changed = true
		}
		l.carried[g.Instruction.UID] = is
	}
	return changed
}

// settled reports whether the virtual node has carried at most so many places of
// an instruction for long enough that no pod is on its way to more.
func (r *Reconciler) settled(provider string, instruction types.UID, places int32) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.links[provider]
	if l == nil {
		return false
	}
	c, ok := l.carried[instruction]
	return ok && c.places <= places && !r.Clock.Now().Before(c.since.Add(r.Settle))
}

// releaseOf is the release on its way for a Reservation, nil where none is.
func (r *Reconciler) releaseOf(reservation *broker.Reservation) *release {
	r.mu.Lock()
	defer r.mu.Unlock()
	t := r.tracked[client.ObjectKeyFromObject(reservation)]
	if t == nil || t.uid != reservation.UID {
		return nil
	}
	return t.release
}
