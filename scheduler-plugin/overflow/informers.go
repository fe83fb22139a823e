package overflow

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	podutil "k8s.io/kubernetes/pkg/api/v1/pod"
	"k8s.io/utils/clock"
	ctrlcache "sigs.k8s.io/controller-runtime/pkg/cache"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/undecoded"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/moves"
	"github.com/spillway-dev/spillway/scheduler-plugin/policies"
	"github.com/spillway-dev/spillway/scheduler-plugin/request"
	"github.com/spillway-dev/spillway/scheduler-plugin/usage"
	"github.com/spillway-dev/spillway/scheduler-plugin/waiting"
)

// start starts the informers and the controllers. It does not wait for them.
func (p *Plugin) start(ctx context.Context) error {
	log := klog.FromContext(ctx).WithName("overflow").WithValues("profile", p.handle.ProfileName())
	client, err := request.NewClient(p.handle.KubeConfig())
	if err != nil {
		return fmt.Errorf("creating a client for %s: %w", broker.GroupVersion, err)
	}
	objects := undecoded.New(log, undecodable, clock.RealClock{})
	newInformer := func(resource, namespace string, example runtime.Object, selector string) (cache.SharedIndexInformer, error) {
		return newInformer(log, objects, client, resource, namespace, example, selector)
	}
	reservations, err := newInformer("reservations", metav1.NamespaceAll, &broker.Reservation{}, "!"+broker.LabelRequester)
	if err != nil {
		return err
	}
	overflowPolicies, err := newInformer("overflowpolicies", metav1.NamespaceAll, &broker.OverflowPolicy{}, "")
	if err != nil {
		return err
	}
	instructions, err := newInformer("reservationinstructions", p.args.InstructionNamespace, &broker.ReservationInstruction{}, "")
	if err != nil {
		return err
	}
	if _, err := instructions.AddEventHandler(p.instructionHandler()); err != nil {
		return fmt.Errorf("watching ReservationInstructions: %w", err)
	}
	reservationEvents, err := reservations.AddEventHandler(p.reservationHandler())
	if err != nil {
		return fmt.Errorf("watching Reservations: %w", err)
	}
	p.synced = lasting(reservationEvents.HasSynced)

	untried := waiting.NewUntriedPods(p.clock)
	noNodes, err := p.watch(untried)
	if err != nil {
		return err
	}
	core := p.handle.SharedInformerFactory().Core().V1()
	p.reservations = request.NewReservations(client, reservations.GetIndexer(), clock.RealClock{})
	controller := request.New(request.Config{
		Log: log, Clock: clock.RealClock{}, Queue: p.queue,
		Batcher: demand.NewBatcher(clock.RealClock{}, demand.Windows{Quiet: 200 * time.Millisecond, Longest: time.Second}),
		Grants:  p.grants, Gate: p.gate, Placements: p.placements,
		Waker: &waiting.Waker{
			Gate: p.gate, Grants: p.grants, Placements: p.placements, Nodes: p.nodes, Settled: p.settled,
			Pools: p.pools, MayUse: func(pod *corev1.Pod, pool *usage.Pool) bool { return slices.Contains(p.poolsOf(pod), pool) },
			Activate: func(pods map[string]*corev1.Pod) { p.handle.Activate(log, pods) },
		},
		Keys: p.keys, Gangs: p.gangs, Untried: untried, Pending: p.pending, AskAfter: p.args.AskAfter.Duration,
		Pods: core.Pods().Lister(), Namespaces: p.namespaces,
		Reservations: p.reservations, Policies: request.PolicyCache{Decoded: overflowPolicies.GetIndexer(), Objects: objects},
		Synced: func() bool { return p.synced() && overflowPolicies.HasSynced() }, Counted: p.counted,
		Active:   func() bool { return p.scheduling.Load() || p.leads() || noNodes() },
		Recorder: p.handle.EventRecorder(), Client: p.handle.ClientSet(),
		Profile: p.handle.ProfileName(), Steers: p.handle.ProfileName() == broker.SchedulerName,
	})
	mover := moves.New(moves.Config{
		Log: log, Clock: clock.RealClock{}, Client: p.handle.ClientSet(), Recorder: p.handle.EventRecorder(),
		Watched: p.watched, Placements: p.placements, Keys: p.keys, Pools: p.pools,
		Reservations: p.reservations, Policies: controller.Policies,
		Nodes: p.nodes, Namespaces: p.namespaces, Pods: controller.Pods,
		Ready: func() bool { return (p.scheduling.Load() || p.leads()) && controller.Synced() && p.counted() },
	})
	statuses := &policies.Writer{
		Log: log, Clock: clock.RealClock{}, Client: client, Policies: controller.Policies, Namespaces: p.namespaces, Reservations: p.reservations,
		Ready: func() bool { return controller.Active() && controller.Synced() && p.counted() },
	}
	go statuses.Run(ctx)
	go objects.Run(ctx, p.handle.EventRecorder())
	go mover.Run(ctx)
	go p.owners.run(ctx, func() {
		p.placements.RetryUnresolved()
		p.queue.Signal()
	})
	go p.gangs.Run(ctx, controller.Waker.Activate, p.queue.AddRequirement)
	go reservations.RunWithContext(ctx)
	go overflowPolicies.RunWithContext(ctx)
	go instructions.RunWithContext(ctx)
	go controller.Run(ctx)
	return nil
}

// lasting returns a function that calls f until it has returned true once: HasSynced of an
// informer takes the lock of its queue, and scheduling cycles ask for it.
func lasting(f func() bool) func() bool {
	var done atomic.Bool
	return func() bool {
		if !done.Load() && f() {
			done.Store(true)
		}
		return done.Load()
	}
}

// watch adds the handlers for the objects of the scheduler's own informers. noNodes
// reports whether the cluster has no node.
//
// In a cluster without nodes, scheduling cycles end before any plugin runs, and so do
// not show which replica leads. All replicas are active then: they apply the same
// totals, which results in one write.
func (p *Plugin) watch(untried *waiting.UntriedPods) (noNodes func() bool, err error) {
	informers := p.handle.SharedInformerFactory()
	core := informers.Core().V1()
	var nodes atomic.Int64
	nodeEvents, err := core.Nodes().Informer().AddEventHandler(p.nodeHandler(&nodes))
	if err != nil {
		return nil, fmt.Errorf("watching nodes: %w", err)
	}
	noNodes = func() bool { return nodes.Load() == 0 && nodeEvents.HasSynced() }
	podEvents, err := core.Pods().Informer().AddEventHandler(p.podHandler(noNodes, untried))
	if err != nil {
		return nil, fmt.Errorf("watching pods: %w", err)
	}
	p.counted = lasting(func() bool { return podEvents.HasSynced() && nodeEvents.HasSynced() })
	if err := p.owners.watch(p.placements.RetryUnresolved); err != nil {
		return nil, err
	}
	_, err = core.Namespaces().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(obj any) { // its first pods may have been tried before
			if namespace, ok := obj.(*corev1.Namespace); ok && namespace.Labels[broker.LabelOverflow] == broker.OverflowEnabled {
				p.queue.AddNamespace(namespace.Name)
			}
		},
		UpdateFunc: func(old, obj any) {
			before, _ := old.(*corev1.Namespace)
			after, ok := obj.(*corev1.Namespace)
			if ok && before != nil && before.Labels[broker.LabelOverflow] != after.Labels[broker.LabelOverflow] {
				p.queue.AddNamespace(after.Name)
			}
		},
	})
	if err != nil {
		return nil, fmt.Errorf("watching namespaces: %w", err)
	}
	return noNodes, nil
}

// nodeHandler keeps the nodes of placements, and their number.
func (p *Plugin) nodeHandler(count *atomic.Int64) cache.ResourceEventHandler {
	set := func(obj any) {
		if node, ok := obj.(*corev1.Node); ok && p.placements.SetNode(node) {
			p.queue.AddNode(node.Name)
		}
	}
	return cache.ResourceEventHandlerFuncs{
		AddFunc: func(obj any) {
			count.Add(1)
			set(obj)
		},
		UpdateFunc: func(_, obj any) { set(obj) },
		DeleteFunc: func(obj any) {
			count.Add(-1)
			if node, ok := objectOf[*corev1.Node](obj); ok {
				p.placements.DeleteNode(node.Name)
			}
		},
	}
}

// objectOf returns the object of an informer's event, also of a deletion that the
// informer missed.
func objectOf[T metav1.Object](obj any) (object T, ok bool) {
	if tombstone, missed := obj.(cache.DeletedFinalStateUnknown); missed {
		obj = tombstone.Obj
	}
	object, ok = obj.(T)
	return object, ok
}

// replaced reports whether two objects of one name are not the same: an informer that was
// cut off shows a deletion and a creation as an update.
func replaced(before, after any) bool {
	former, ok := before.(metav1.Object)
	latter, also := after.(metav1.Object)
	return ok && also && former.GetUID() != latter.GetUID()
}

// reservationHandler updates the grant cache and, for those made by hand, the pools.
func (p *Plugin) reservationHandler() cache.ResourceEventHandler {
	update := func(obj any, apply func(*broker.Reservation) (demand.Key, bool), applyPool func(*broker.Reservation) bool) {
		if r, ok := objectOf[*broker.Reservation](obj); ok {
			if key, changed := apply(r); key != (demand.Key{}) {
				p.queue.AddReservation(key, changed)
			}
			if applyPool(r) {
				p.queue.AddPools()
			}
		}
	}
	return cache.ResourceEventHandlerFuncs{
		AddFunc: func(obj any) { update(obj, p.grants.Set, p.pools.SetReservation) },
		UpdateFunc: func(before, obj any) {
			if replaced(before, obj) {
				update(before, p.grants.Delete, p.pools.DeleteReservation)
			}
			update(obj, p.grants.Set, p.pools.SetReservation)
		},
		DeleteFunc: func(obj any) { update(obj, p.grants.Delete, p.pools.DeleteReservation) },
	}
}

// instructionHandler updates the pools.
func (p *Plugin) instructionHandler() cache.ResourceEventHandler {
	update := func(obj any, apply func(*broker.ReservationInstruction) bool) {
		if in, ok := objectOf[*broker.ReservationInstruction](obj); ok && apply(in) {
			p.queue.AddPools()
		}
	}
	return cache.ResourceEventHandlerFuncs{
		AddFunc:    func(obj any) { update(obj, p.pools.SetInstruction) },
		UpdateFunc: func(_, obj any) { update(obj, p.pools.SetInstruction) },
		DeleteFunc: func(obj any) { update(obj, p.pools.DeleteInstruction) },
	}
}

// podHandler keeps the pods of placements, the nominees and the untried ones. It removes pods that
// are no longer pending from the queue, and adds those that are unschedulable because
// there is no node.
func (p *Plugin) podHandler(noNodes func() bool, untried *waiting.UntriedPods) cache.ResourceEventHandler {
	update := func(obj any) {
		pod, ok := obj.(*corev1.Pod)
		if !ok {
			return
		}
		p.watched.Set(pod)
		p.expectLabel(pod)
		p.queue.AddFreed(p.placements.SetPod(pod))
		done := pod.Spec.NodeName != "" || pod.DeletionTimestamp != nil || podutil.IsPodTerminal(pod)
		if done {
			p.queue.Remove(pod.UID)
			p.gangs.Forget(pod.UID)
		} else if p.gate.Observe(pod) {
			p.queue.AddChanged(pod)
		}
		if pod.Spec.SchedulerName == p.handle.ProfileName() {
			if done {
				untried.Remove(pod)
				p.placements.Nominees.Remove(pod.UID)
				return
			}
			_, tried := podutil.GetPodCondition(&pod.Status, corev1.PodScheduled)
			if waiting.Unschedulable(pod) && noNodes() {
				p.queue.AddUnschedulable(pod)
			}
			tracked, waits := p.queue.Has(pod.UID)
			switch {
			case tried == nil || waits: // it is counted until it is pending
				untried.Set(pod, true)
			case tracked:
				untried.Set(pod, false)
			default: // another replica has tried it: no total counts it until this one has
				untried.Remove(pod)
			}
			return
		}
		p.nomineeGone(p.placements.Nominees.Set(pod))
	}
	remove := func(obj any) {
		if pod, ok := objectOf[*corev1.Pod](obj); ok {
			p.watched.Remove(pod.UID)
			if pod.Spec.SchedulerName == p.handle.ProfileName() && pod.Spec.NodeName == "" {
				p.ownNomineeGone(pod.Status.NominatedNodeName)
			}
			p.queue.AddFreed(p.placements.RemovePod(pod.UID))
			p.nomineeGone(p.placements.Nominees.Remove(pod.UID))
			p.queue.Remove(pod.UID)
			untried.Remove(pod)
			p.keys.Forget(pod.UID)
			p.gangs.Forget(pod.UID)
		}
	}
	return cache.ResourceEventHandlerFuncs{
		AddFunc: update,
		UpdateFunc: func(before, obj any) {
			if replaced(before, obj) {
				remove(before)
			}
			update(obj)
			p.ownNomineeChanged(before, obj)
		},
		DeleteFunc: remove,
	}
}

// expectLabel logs, once a minute, that the API server has dropped the labels of a binding.
func (p *Plugin) expectLabel(pod *corev1.Pod) {
	if pod.Spec.NodeName == "" || pod.Labels[broker.LabelHold] != "" {
		return
	}
	now := p.clock.Now().Unix()
	if _, hold := p.placements.PlaceOf(pod.UID); hold != "" && now-p.unlabelled.Load() >= 60 {
		p.unlabelled.Store(now)
		klog.Background().Error(nil, "The API server has dropped the labels of a binding: enable its feature PodTopologyLabelsAdmission, which is on by default. "+
			"Without them, the pods that use a Reservation are not known after a restart, and other schedulers may preempt them", "pod", klog.KObj(pod), "label", broker.LabelHold)
	}
}

// newInformer returns an informer for one kind of Spillway's objects in a namespace, or
// in all. It leaves out what cannot be decoded. If the kind does not exist, the informer retries with backoff.
func newInformer(log klog.Logger, objects *undecoded.Objects, client rest.Interface, resource, namespace string, example runtime.Object, selector string) (cache.SharedIndexInformer, error) {
	source := cache.NewFilteredListWatchFromClient(client, resource, namespace, func(o *metav1.ListOptions) { o.LabelSelector = selector })
	informer := objects.NewInformer(source, example, 0, request.Indexers())
	if err := informer.SetTransform(ctrlcache.TransformStripManagedFields()); err != nil {
		return nil, fmt.Errorf("watching %s: %w", resource, err)
	}
	err := informer.SetWatchErrorHandlerWithContext(logWatchErrors(log, resource, "Spillway's CRDs are not installed; pods are scheduled in this cluster only"))
	if err != nil {
		return nil, fmt.Errorf("watching %s: %w", resource, err)
	}
	return informer, nil
}

// isMissing reports whether a kind does not exist.
func isMissing(err error) bool { return apierrors.IsNotFound(err) || meta.IsNoMatchError(err) }

// logWatchErrors logs the errors of an informer, and that its kind is missing, once a
// minute: that may last.
func logWatchErrors(log klog.Logger, resource, missing string) cache.WatchErrorHandlerWithContext {
	var lastLogged atomic.Int64
	return func(_ context.Context, _ *cache.Reflector, err error) {
		switch {
		case apierrors.IsResourceExpired(err) || apierrors.IsGone(err):
			return
		case time.Now().Unix()-lastLogged.Load() < 60:
			return
		case isMissing(err):
			log.Info(missing, "resource", resource)
		default:
			log.Info("Watching failed; retrying", "resource", resource, "reason", err.Error())
		}
		lastLogged.Store(time.Now().Unix())
	}
}
