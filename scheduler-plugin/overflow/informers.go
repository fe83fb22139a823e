package overflow

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	podutil "k8s.io/kubernetes/pkg/api/v1/pod"
	"k8s.io/utils/clock"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// requestsPerSecond limits the requests for Reservations to the API server.
const requestsPerSecond = 50

// start starts the informers and the demand controller. It does not wait for them.
func (p *Plugin) start(ctx context.Context) error {
	log := klog.FromContext(ctx).WithName("overflow").WithValues("profile", p.handle.ProfileName())
	client, err := restClient(p.handle.KubeConfig())
	if err != nil {
		return fmt.Errorf("creating a client for %s: %w", broker.GroupVersion, err)
	}
	reservations, err := newInformer(log, client, "reservations", &broker.Reservation{}, "!"+broker.LabelRequester)
	if err != nil {
		return err
	}
	policies, err := newInformer(log, client, "overflowpolicies", &broker.OverflowPolicy{}, "")
	if err != nil {
		return err
	}
	reservationEvents, err := reservations.AddEventHandler(p.reservationHandler())
	if err != nil {
		return fmt.Errorf("watching Reservations: %w", err)
	}
	p.synced = reservationEvents.HasSynced

	core := p.handle.SharedInformerFactory().Core().V1()
	var nodes atomic.Int64
	nodeEvents, err := core.Nodes().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { nodes.Add(1) },
		DeleteFunc: func(any) { nodes.Add(-1) },
	})
	if err != nil {
		return fmt.Errorf("watching nodes: %w", err)
	}
	// In a cluster without nodes, scheduling cycles end before any plugin runs, and
	// so do not show which replica leads. All replicas are active then: they apply
	// the same totals, which results in one write.
	noNodes := func() bool { return nodeEvents.HasSynced() && nodes.Load() == 0 }
	if _, err := core.Pods().Informer().AddEventHandler(p.podHandler(noNodes)); err != nil {
		return fmt.Errorf("watching pods: %w", err)
	}

	controller := &demandController{
		log:          log,
		clock:        clock.RealClock{},
		queue:        p.queue,
		batcher:      demand.NewBatcher(clock.RealClock{}, p.args.windows()),
		grants:       p.grants,
		keys:         p.keys,
		pods:         core.Pods().Lister(),
		nodes:        p.nodes,
		namespaces:   p.namespaces,
		reservations: newReservationStore(client, reservations.GetIndexer(), clock.RealClock{}),
		policies:     policies.GetIndexer(),
		synced:       func() bool { return p.synced() && policies.HasSynced() },
		active:       func() bool { return p.scheduling.Load() || noNodes() },
		activate:     func(pods map[string]*corev1.Pod) { p.handle.Activate(log, pods) },
		recorder:     p.handle.EventRecorder(),
		profile:      p.handle.ProfileName(),
		assumed:      p.assumed,
	}
	go reservations.RunWithContext(ctx)
	go policies.RunWithContext(ctx)
	go controller.run(ctx)
	return nil
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

// reservationHandler updates the grant cache.
func (p *Plugin) reservationHandler() cache.ResourceEventHandler {
	update := func(obj any, apply func(*broker.Reservation) (demand.Key, bool)) {
		if r, ok := objectOf[*broker.Reservation](obj); ok {
			if key, changed := apply(r); key != (demand.Key{}) {
				p.queue.addReservation(key, changed)
			}
		}
	}
	return cache.ResourceEventHandlerFuncs{
		AddFunc:    func(obj any) { update(obj, p.grants.set) },
		UpdateFunc: func(_, obj any) { update(obj, p.grants.set) },
		DeleteFunc: func(obj any) { update(obj, p.grants.delete) },
	}
}

// podHandler removes pods that are no longer pending from the queue, and adds those
// that are unschedulable because there is no node.
func (p *Plugin) podHandler(noNodes func() bool) cache.ResourceEventHandler {
	remove := func(uid types.UID) {
		p.assumed.Delete(uid)
		p.queue.remove(uid)
	}
	update := func(obj any) {
		pod, ok := obj.(*corev1.Pod)
		if !ok || pod.Spec.SchedulerName != p.handle.ProfileName() {
			return
		}
		switch {
		case pod.Spec.NodeName != "" || pod.DeletionTimestamp != nil || podutil.IsPodTerminal(pod):
			remove(pod.UID)
		case unschedulable(pod) && noNodes() && optedIn(p.namespaces, pod.Namespace):
			p.queue.addUnschedulable(pod)
		}
	}
	return cache.ResourceEventHandlerFuncs{
		AddFunc: update,
		UpdateFunc: func(old, obj any) {
			update(obj)
			before, _ := old.(*corev1.Pod)
			if pod, ok := obj.(*corev1.Pod); ok && before != nil && len(pod.Spec.Tolerations) > len(before.Spec.Tolerations) {
				p.queue.addActivate(pod)
			}
		},
		DeleteFunc: func(obj any) {
			if pod, ok := objectOf[*corev1.Pod](obj); ok {
				remove(pod.UID)
			}
		},
	}
}

func unschedulable(pod *corev1.Pod) bool {
	_, c := podutil.GetPodCondition(&pod.Status, corev1.PodScheduled)
	return c != nil && c.Status == corev1.ConditionFalse && c.Reason == corev1.PodReasonUnschedulable
}

// restClient returns a client for Spillway's objects with the scheduler's
// identity.
func restClient(base *rest.Config) (rest.Interface, error) {
	scheme := runtime.NewScheme()
	if err := broker.AddToScheme(scheme); err != nil {
		return nil, err
	}
	config := rest.CopyConfig(base)
	config.APIPath = "/apis"
	config.GroupVersion = &broker.GroupVersion
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	config.ContentType, config.AcceptContentTypes = runtime.ContentTypeJSON, runtime.ContentTypeJSON
	config.QPS, config.Burst = requestsPerSecond, 2*requestsPerSecond
	config.RateLimiter = nil
	return rest.RESTClientFor(config)
}

// newInformer returns an informer for one kind of Spillway's objects in all
// namespaces. If the kind does not exist, the informer retries with backoff.
func newInformer(log klog.Logger, client rest.Interface, resource string, example runtime.Object, selector string) (cache.SharedIndexInformer, error) {
	source := cache.NewFilteredListWatchFromClient(client, resource, metav1.NamespaceAll, func(o *metav1.ListOptions) { o.LabelSelector = selector })
	informer := cache.NewSharedIndexInformer(source, example, 0, cache.Indexers{
		cache.NamespaceIndex: cache.MetaNamespaceIndexFunc,
		keyIndex:             indexByKey,
	})
	if err := informer.SetTransform(stripManagedFields); err != nil {
		return nil, fmt.Errorf("watching %s: %w", resource, err)
	}
	var lastLogged atomic.Int64
	err := informer.SetWatchErrorHandlerWithContext(func(_ context.Context, _ *cache.Reflector, err error) {
		switch {
		case apierrors.IsResourceExpired(err) || apierrors.IsGone(err):
			return
		// A missing CRD or permission may last: log it once a minute.
		case time.Now().Unix()-lastLogged.Load() < 60:
			return
		case apierrors.IsNotFound(err) || meta.IsNoMatchError(err):
			log.Info("Spillway's CRDs are not installed; pods are scheduled in this cluster only", "resource", resource)
		default:
			log.Info("Watching failed; retrying", "resource", resource, "reason", err.Error())
		}
		lastLogged.Store(time.Now().Unix())
	})
	if err != nil {
		return nil, fmt.Errorf("watching %s: %w", resource, err)
	}
	return informer, nil
}

// stripManagedFields drops what the plugin does not read from the cache.
func stripManagedFields(obj any) (any, error) {
	if o, ok := obj.(metav1.Object); ok {
		o.SetManagedFields(nil)
	}
	return obj, nil
}
