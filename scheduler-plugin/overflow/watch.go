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
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// requestsPerSecond at most to the API server for Reservations.
const requestsPerSecond = 50

// start begins watching and asking. It waits for nothing.
func (p *Plugin) start(ctx context.Context) error {
	log := klog.FromContext(ctx).WithName("overflow").WithValues("profile", p.handle.ProfileName())
	client, err := restClient(p.handle.KubeConfig())
	if err != nil {
		return fmt.Errorf("making a client for %s: %w", broker.GroupVersion, err)
	}
	reservations, err := newInformer(log, client, "reservations", &broker.Reservation{}, "!"+broker.LabelRequester)
	if err != nil {
		return err
	}
	policies, err := newInformer(log, client, "overflowpolicies", &broker.OverflowPolicy{}, "")
	if err != nil {
		return err
	}
	bookkeeper, err := reservations.AddEventHandler(p.reservationHandler())
	if err != nil {
		return fmt.Errorf("watching Reservations: %w", err)
	}
	p.synced = bookkeeper.HasSynced

	core := p.handle.SharedInformerFactory().Core().V1()
	var nodes atomic.Int64
	nodeCounter, err := core.Nodes().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { nodes.Add(1) },
		DeleteFunc: func(any) { nodes.Add(-1) },
	})
	if err != nil {
		return fmt.Errorf("watching nodes: %w", err)
	}
	// Where there is no node at all, scheduling cycles end before any plugin is
	// called, so nothing tells who leads. Standbys then ask too: they all write
	// the same totals by server-side apply, which comes to one write.
	noNodes := func() bool { return nodeCounter.HasSynced() && nodes.Load() == 0 }
	if _, err := core.Pods().Informer().AddEventHandler(p.podHandler(noNodes)); err != nil {
		return fmt.Errorf("watching pods: %w", err)
	}

	asker := &asker{
		log:          log,
		clock:        clock.RealClock{},
		inbox:        p.inbox,
		batcher:      demand.NewBatcher(clock.RealClock{}, p.args.windows()),
		book:         p.book,
		keys:         p.keys,
		pods:         core.Pods().Lister(),
		nodes:        p.nodes,
		namespaces:   p.namespaces,
		reservations: newReservations(client, reservations.GetIndexer(), clock.RealClock{}),
		policies:     policies.GetIndexer(),
		synced:       func() bool { return p.synced() && policies.HasSynced() },
		acting:       func() bool { return p.scheduling.Load() || noNodes() },
		activate:     func(pods map[string]*corev1.Pod) { p.handle.Activate(log, pods) },
		recorder:     p.handle.EventRecorder(),
		profile:      p.handle.ProfileName(),
		placed:       p.placed,
	}
	go reservations.RunWithContext(ctx)
	go policies.RunWithContext(ctx)
	go asker.run(ctx)
	return nil
}

// reservationHandler keeps the book.
func (p *Plugin) reservationHandler() cache.ResourceEventHandler {
	put := func(obj any) {
		if r, ok := obj.(*broker.Reservation); ok {
			if key, changed := p.book.put(r); key.OwnerUID != "" {
				p.inbox.reservation(key, changed)
			}
		}
	}
	return cache.ResourceEventHandlerFuncs{
		AddFunc:    put,
		UpdateFunc: func(_, obj any) { put(obj) },
		DeleteFunc: func(obj any) {
			if tomb, ok := obj.(cache.DeletedFinalStateUnknown); ok {
				obj = tomb.Obj
			}
			if r, ok := obj.(*broker.Reservation); ok {
				if key, changed := p.book.drop(r); changed {
					p.inbox.reservation(key, true)
				}
			}
		},
	}
}

// podHandler forgets pods that wait no more, and notes those that the scheduler
// found no node for because there is none.
func (p *Plugin) podHandler(noNodes func() bool) cache.ResourceEventHandler {
	see := func(obj any) {
		pod, ok := obj.(*corev1.Pod)
		if !ok || pod.Spec.SchedulerName != p.handle.ProfileName() {
			return
		}
		switch {
		case pod.Spec.NodeName != "" || pod.DeletionTimestamp != nil || finished(pod):
			p.placed.Delete(pod.UID)
			p.inbox.forget(pod.UID)
		case unschedulable(pod) && noNodes() && p.optedIn(pod.Namespace):
			p.inbox.note(pod)
		}
	}
	return cache.ResourceEventHandlerFuncs{
		AddFunc: see,
		UpdateFunc: func(was, obj any) {
			see(obj)
			before, _ := was.(*corev1.Pod)
			if pod, ok := obj.(*corev1.Pod); ok && before != nil && len(pod.Spec.Tolerations) > len(before.Spec.Tolerations) {
				p.inbox.welcome(pod)
			}
		},
		DeleteFunc: func(obj any) {
			if tomb, ok := obj.(cache.DeletedFinalStateUnknown); ok {
				obj = tomb.Obj
			}
			if pod, ok := obj.(*corev1.Pod); ok {
				p.placed.Delete(pod.UID)
				p.inbox.forget(pod.UID)
			}
		},
	}
}

func unschedulable(pod *corev1.Pod) bool {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled {
			return c.Status == corev1.ConditionFalse && c.Reason == corev1.PodReasonUnschedulable
		}
	}
	return false
}

// restClient is a client for Spillway's objects with the scheduler's identity.
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

// newInformer watches one kind of Spillway's objects in all namespaces. Where the
// kind does not exist it keeps trying, ever more slowly.
func newInformer(log klog.Logger, client rest.Interface, resource string, example runtime.Object, selector string) (cache.SharedIndexInformer, error) {
	source := cache.NewFilteredListWatchFromClient(client, resource, metav1.NamespaceAll, func(o *metav1.ListOptions) { o.LabelSelector = selector })
	informer := cache.NewSharedIndexInformer(source, example, 0, cache.Indexers{
		cache.NamespaceIndex: cache.MetaNamespaceIndexFunc,
		keyIndex:             indexByKey,
	})
	if err := informer.SetTransform(withoutManagedFields); err != nil {
		return nil, fmt.Errorf("watching %s: %w", resource, err)
	}
	var told atomic.Int64
	err := informer.SetWatchErrorHandlerWithContext(func(_ context.Context, _ *cache.Reflector, err error) {
		switch {
		case apierrors.IsResourceExpired(err) || apierrors.IsGone(err):
			return
		// A missing CRD or permission may last: once a minute is enough.
		case time.Now().Unix()-told.Load() < 60:
			return
		case apierrors.IsNotFound(err) || meta.IsNoMatchError(err):
			log.Info("Spillway's CRDs are not installed; pods are scheduled at home only", "resource", resource)
		default:
			log.Info("Watching failed; trying again", "resource", resource, "reason", err.Error())
		}
		told.Store(time.Now().Unix())
	})
	if err != nil {
		return nil, fmt.Errorf("watching %s: %w", resource, err)
	}
	return informer, nil
}

// withoutManagedFields drops from the cache what nobody reads.
func withoutManagedFields(obj any) (any, error) {
	if o, ok := obj.(metav1.Object); ok {
		o.SetManagedFields(nil)
	}
	return obj, nil
}
