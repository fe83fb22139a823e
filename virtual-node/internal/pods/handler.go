package pods

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"github.com/virtual-kubelet/virtual-kubelet/errdefs"
	vknode "github.com/virtual-kubelet/virtual-kubelet/node"
	"github.com/virtual-kubelet/virtual-kubelet/node/nodeutil"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	listers "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/tools/record"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	ctrlcache "sigs.k8s.io/controller-runtime/pkg/cache"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/virtual-node/internal/translate"
)

const (
	// workers is the number of concurrent reconciles.
	workers = 8
	// syncTimeout bounds one reconcile.
	syncTimeout = 30 * time.Second
	// pruneDelay is the time from a change to the removal of unused copies.
	pruneDelay = 2 * time.Second
	// minBackoff and maxBackoff bound the delay between retries.
	minBackoff, maxBackoff = 100 * time.Millisecond, 20 * time.Second
	// terminatingInterval is how often virtual-kubelet checks a terminating pod.
	terminatingInterval = 500 * time.Millisecond
	// indexOrigin indexes guests by the key of their pod.
	indexOrigin = "origin"
	// pruneKey is the queue's key for the removal of unused copies.
	pruneKey = "copies"
)

// Options of a Handler; all are required.
type Options struct {
	// Provider is the provider's cluster ID.
	Provider string
	// GuestNamespace is the namespace for guests at the provider.
	GuestNamespace string
	// ProviderClient has access to GuestNamespace.
	ProviderClient kubernetes.Interface
	// ConsumerClient is the client of this cluster.
	ConsumerClient kubernetes.Interface
	DNS            translate.Options
	Recorder       events.EventRecorder
	Clock          clock.WithTicker
	Log            logr.Logger
}

// Handler runs the pods of one virtual node.
type Handler struct {
	Options
	nodeName   string
	queue      workqueue.TypedRateLimitingInterface[string]
	controller *vknode.PodController

	consumerInformers informers.SharedInformerFactory
	pods              listers.PodLister
	podsSynced        cache.InformerSynced
	sources           *namespaceCaches

	providerInformers informers.SharedInformerFactory
	guests            cache.Indexer
	configMaps        copies[*corev1.ConfigMap]
	secrets           copies[*corev1.Secret]
	providerSynced    []cache.InformerSynced

	mu     sync.Mutex
	notify func(*corev1.Pod)
	states map[types.UID]*podState
	// uids are the UIDs of the pods last seen, by key.
	uids map[string]types.UID
	// differences are the messages that were recorded for pods of an owner, at most
	// maxDifferences.
	differences map[difference]bool
	// unreachable is whether the provider is unreachable.
	unreachable bool
	// terminating is whether the virtual node is terminating.
	terminating bool
	// owner is the owner of new guests, and handsOver whether the provider hands places
	// over to them, read at ownerRead.
	owner     metav1.OwnerReference
	handsOver bool
	ownerRead time.Time
	// handedOver is when the provider was last seen to have handed over a place.
	handedOver time.Time
}

// podState is what the handler remembers of a pod.
type podState struct {
	// refs is nil before they were computed.
	refs *translate.References
	// created is whether a guest may have been created.
	created bool
	// pending is when the guest was first seen to be pending, or was reported since, gated
	// when it was first seen to wait for its place; zero if it was not.
	pending, gated time.Time
	// ungated is whether the gate was removed here.
	ungated bool
	// reported is the status last reported, or nil.
	reported *corev1.PodStatus
	// events are the messages of the last Events, by reason.
	events map[string]string
}

var (
	_ vknode.PodLifecycleHandler = (*Handler)(nil)
	_ vknode.PodNotifier         = (*Handler)(nil)
)

// New returns a handler that does nothing before Run.
func New(o Options) (*Handler, error) {
	nodeName := broker.VirtualNodeName(o.Provider)
	stripped := informers.WithTransform(ctrlcache.TransformStripManagedFields())
	h := &Handler{
		Options: o, nodeName: nodeName, states: map[types.UID]*podState{}, uids: map[string]types.UID{}, differences: map[difference]bool{},
		queue: workqueue.NewTypedRateLimitingQueueWithConfig(
			workqueue.NewTypedItemExponentialFailureRateLimiter[string](minBackoff, maxBackoff),
			workqueue.TypedRateLimitingQueueConfig[string]{Name: "guests-" + o.Provider}),
		consumerInformers: informers.NewSharedInformerFactoryWithOptions(o.ConsumerClient, 0, stripped, nodeutil.PodInformerFilter(nodeName)),
		providerInformers: informers.NewSharedInformerFactoryWithOptions(o.ProviderClient, 0, stripped, informers.WithNamespace(o.GuestNamespace)),
	}
	h.sources = newNamespaceCaches(o.ConsumerClient, h.enqueueReferring)
	pods := h.consumerInformers.Core().V1().Pods()
	h.pods, h.podsSynced = pods.Lister(), pods.Informer().HasSynced
	_, err := pods.Informer().AddEventHandler(onChange(func(object any) {
		if pod, ok := object.(*corev1.Pod); ok {
			h.enqueue(pod)
		}
	}))
	if err := errors.Join(err, h.watchProvider()); err != nil {
		return nil, fmt.Errorf("setting up informers: %w", err)
	}

	// These informers are never started: translate resolves references, and the
	// charts do not authorize this program to list these objects in all namespaces.
	unused := informers.NewSharedInformerFactory(o.ConsumerClient, 0).Core().V1()
	backoff := func() workqueue.TypedRateLimiter[any] {
		return workqueue.NewTypedItemExponentialFailureRateLimiter[any](minBackoff, maxBackoff)
	}
	h.controller, err = vknode.NewPodController(vknode.PodControllerConfig{
		PodClient: statusPatcher{o.ConsumerClient.CoreV1()}, PodInformer: pods, Provider: h,
		// Without a channel it discards virtual-kubelet's Events, which report retries.
		EventRecorder:     &record.FakeRecorder{},
		ConfigMapInformer: unused.ConfigMaps(), SecretInformer: unused.Secrets(), ServiceInformer: unused.Services(),
		SkipDownwardAPIResolution:             true,
		SyncPodsFromKubernetesRateLimiter:     backoff(),
		SyncPodsFromKubernetesShouldRetryFunc: retryTerminating,
		DeletePodsFromKubernetesRateLimiter:   backoff(), DeletePodsFromKubernetesShouldRetryFunc: retryAlways,
		SyncPodStatusFromProviderRateLimiter: backoff(), SyncPodStatusFromProviderShouldRetryFunc: retryAlways,
	})
	if err != nil {
		return nil, fmt.Errorf("setting up the pod controller: %w", err)
	}
	return h, nil
}

// watchProvider sets up the caches of the guests and of the copies.
func (h *Handler) watchProvider() error {
	core := h.providerInformers.Core().V1()
	guests, configMaps, secrets := core.Pods().Informer(), core.ConfigMaps().Informer(), core.Secrets().Informer()
	h.guests = guests.GetIndexer()
	client := h.ProviderClient.CoreV1()
	h.configMaps = copies[*corev1.ConfigMap]{"ConfigMap", client.ConfigMaps(h.GuestNamespace), configMaps.GetIndexer(), compareConfigMaps}
	h.secrets = copies[*corev1.Secret]{"Secret", client.Secrets(h.GuestNamespace), secrets.GetIndexer(), compareSecrets}
	err := guests.AddIndexers(cache.Indexers{indexOrigin: func(object any) ([]string, error) {
		if namespace, name, _, ok := translate.Origin(object.(*corev1.Pod)); ok {
			return []string{namespace + "/" + name}, nil
		}
		return nil, nil
	}})
	_, guestsErr := guests.AddEventHandler(onChange(func(object any) {
		if guest, ok := object.(*corev1.Pod); ok {
			if pod := stub(guest); pod.Name != "" {
				h.enqueue(pod)
			}
		}
	}))
	copyChanged := onChange(func(object any) {
		h.queue.AddAfter(pruneKey, pruneDelay)
		if namespace, _, _, ok := translate.Origin(object.(metav1.Object)); ok {
			h.enqueueReferring(namespace)
		}
	})
	_, configMapsErr := configMaps.AddEventHandler(copyChanged)
	_, secretsErr := secrets.AddEventHandler(copyChanged)
	h.providerSynced = []cache.InformerSynced{guests.HasSynced, configMaps.HasSynced, secrets.HasSynced}
	return errors.Join(err, guestsErr, configMapsErr, secretsErr)
}

// retryAlways makes virtual-kubelet retry without limit.
func retryAlways(context.Context, string, int, time.Time, error) (*time.Duration, error) {
	return nil, nil
}

// retryTerminating makes virtual-kubelet check terminating pods often: it ignores
// the status updates that show the end of a guest.
func retryTerminating(_ context.Context, _ string, _ int, _ time.Time, err error) (*time.Duration, error) {
	if errors.Is(err, errTerminating) {
		return ptr.To(terminatingInterval), nil
	}
	return nil, nil
}

// onChange calls f with each object that is added, updated or deleted.
func onChange(f func(object any)) cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		AddFunc:    f,
		UpdateFunc: func(_, object any) { f(object) },
		DeleteFunc: func(object any) {
			if tombstone, ok := object.(cache.DeletedFinalStateUnknown); ok {
				object = tombstone.Obj
			}
			f(object)
		},
	}
}

// Run reconciles until ctx ends. Pods and guests are not changed then.
func (h *Handler) Run(ctx context.Context) error {
	var running sync.WaitGroup
	defer running.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	h.consumerInformers.Start(ctx.Done())
	h.providerInformers.Start(ctx.Done())
	running.Go(func() {
		// With partial caches, guests would be taken for orphans.
		if cache.WaitForCacheSync(ctx.Done(), append([]cache.InformerSynced{h.podsSynced}, h.providerSynced...)...) {
			for range workers {
				running.Go(func() {
					for h.processNext(ctx) {
					}
				})
			}
			h.queue.AddAfter(pruneKey, pruneDelay)
		}
		<-ctx.Done()
		h.queue.ShutDown()
		h.sources.stop()
	})
	return h.controller.Run(ctx, workers)
}

func (h *Handler) processNext(ctx context.Context) bool {
	key, shutdown := h.queue.Get()
	if shutdown || ctx.Err() != nil {
		return false
	}
	defer h.queue.Done(key)
	syncCtx, cancel := context.WithTimeout(ctx, syncTimeout)
	defer cancel()
	var requeueAfter time.Duration
	var err error
	if key == pruneKey {
		err = h.prune(syncCtx)
	} else {
		requeueAfter, err = h.sync(syncCtx, key)
	}
	switch {
	case ctx.Err() != nil:
		return false
	case err != nil:
		syncErrors.WithLabelValues(h.Provider).Inc()
		h.Log.Error(err, "Failed to reconcile; retrying", "pod", key)
		h.queue.AddRateLimited(key)
	case requeueAfter > 0:
		h.queue.Forget(key)
		h.queue.AddAfter(key, requeueAfter)
	default:
		h.queue.Forget(key)
	}
	return true
}

func (h *Handler) enqueue(pod *corev1.Pod) { h.queue.Add(pod.Namespace + "/" + pod.Name) }

// enqueueReferring enqueues the pods of a namespace that refer to ConfigMaps or
// Secrets.
func (h *Handler) enqueueReferring(namespace string) {
	pods, err := h.pods.Pods(namespace).List(labels.Everything())
	if err != nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, pod := range pods {
		if state := h.states[pod.UID]; state != nil && state.refs != nil && len(state.refs.ConfigMaps)+len(state.refs.Secrets) > 0 {
			h.enqueue(pod)
		}
	}
}

// state returns the state of a pod. The caller holds h.mu.
func (h *Handler) state(uid types.UID) *podState {
	state := h.states[uid]
	if state == nil {
		state = &podState{events: map[string]string{}}
		h.states[uid] = state
	}
	return state
}

// SetReachable records whether the provider is reachable. While it is not, pods
// keep the condition Ready that this cluster's node lifecycle controller sets.
func (h *Handler) SetReachable(reachable bool) {
	h.mu.Lock()
	recovered := h.unreachable && reachable
	h.unreachable = !reachable
	h.mu.Unlock()
	if !recovered {
		return
	}
	for _, pod := range h.Pods() {
		h.enqueue(pod)
	}
}

// SetTerminating records whether the virtual node is terminating. While it is, no
// guest is created.
func (h *Handler) SetTerminating(terminating bool) {
	h.mu.Lock()
	resumed := h.terminating && !terminating
	h.terminating = terminating
	h.mu.Unlock()
	if !resumed {
		return
	}
	for _, pod := range h.Pods() {
		h.enqueue(pod)
	}
}

func (h *Handler) isTerminating() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.terminating
}

// mirror returns the status of a pod with a guest. The last known readiness of an
// unreachable guest must not replace what the node lifecycle controller wrote,
// which takes the pod out of Services.
func (h *Handler) mirror(pod, guest *corev1.Pod) corev1.PodStatus {
	status := translate.Status(pod, guest)
	h.mu.Lock()
	unreachable := h.unreachable
	h.mu.Unlock()
	if !unreachable {
		return status
	}
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady {
			status.Conditions = setCondition(status.Conditions, c)
		}
	}
	return status
}

// Pods returns the pods of the node. They must not be modified.
func (h *Handler) Pods() []*corev1.Pod {
	pods, err := h.pods.List(labels.Everything())
	if err != nil {
		return nil
	}
	return pods
}

// PodsSynced reports whether Pods is complete.
func (h *Handler) PodsSynced() bool { return h.podsSynced() }

// HasNoGuests reports whether the provider is known to have no guest left.
func (h *Handler) HasNoGuests() bool { return h.synced() && len(h.guests.ListKeys()) == 0 }

func (h *Handler) synced() bool { return h.podsSynced() && allSynced(h.providerSynced) }

// Locate returns the guest of a pod; ok is false if the node has no such pod, or
// it has no guest.
func (h *Handler) Locate(namespace, name string) (guestNamespace, guestName string, ok bool) {
	pod, err := h.pods.Pods(namespace).Get(name)
	if err != nil {
		return "", "", false
	}
	guest := h.guestOf(pod)
	if guest == nil {
		return "", "", false
	}
	return guest.Namespace, guest.Name, true
}

// guestOf returns the guest of the pod with this UID, or nil.
func (h *Handler) guestOf(pod *corev1.Pod) *corev1.Pod {
	object, found, err := h.guests.GetByKey(h.GuestNamespace + "/" + translate.GuestName(pod))
	if err != nil || !found {
		return nil
	}
	guest := object.(*corev1.Pod)
	if _, _, uid, ok := translate.Origin(guest); !ok || uid != pod.UID {
		return nil
	}
	return guest
}

// CreatePod implements vknode.PodLifecycleHandler. It never fails: for an error
// virtual-kubelet would mark a pod that is not to be restarted as failed.
func (h *Handler) CreatePod(_ context.Context, pod *corev1.Pod) error {
	h.enqueue(pod)
	return nil
}

// UpdatePod implements vknode.PodLifecycleHandler.
func (h *Handler) UpdatePod(_ context.Context, pod *corev1.Pod) error {
	h.enqueue(pod)
	return nil
}

// errTerminating makes virtual-kubelet retry a deletion: it deletes the pod once
// no container is running. Without an error it would delete the pod after the
// grace period, even if containers run at a provider that is unreachable.
var errTerminating = errors.New("the guest is terminating")

// DeletePod implements vknode.PodLifecycleHandler.
func (h *Handler) DeletePod(_ context.Context, pod *corev1.Pod) error {
	h.enqueue(pod)
	if _, err := h.pods.Pods(pod.Namespace).Get(pod.Name); err != nil {
		return nil // already deleted: sync deletes the guest
	}
	return errTerminating
}

// GetPod implements vknode.PodLifecycleHandler: the pod, if it has a guest.
func (h *Handler) GetPod(_ context.Context, namespace, name string) (*corev1.Pod, error) {
	found, err := h.guests.ByIndex(indexOrigin, namespace+"/"+name)
	if err != nil || len(found) == 0 {
		return nil, errdefs.NotFoundf("pod %s/%s has no guest", namespace, name)
	}
	return stub(found[0].(*corev1.Pod)), nil
}

// stub returns the identity of a guest's pod; its name is empty if the guest is
// not one of this program's.
func stub(guest *corev1.Pod) *corev1.Pod {
	pod := &corev1.Pod{}
	if namespace, name, uid, ok := translate.Origin(guest); ok {
		pod.Namespace, pod.Name, pod.UID = namespace, name, uid
	}
	return pod
}

// GetPodStatus implements vknode.PodLifecycleHandler.
func (h *Handler) GetPodStatus(_ context.Context, namespace, name string) (*corev1.PodStatus, error) {
	pod, err := h.pods.Pods(namespace).Get(name)
	if err != nil {
		return nil, errdefs.NotFoundf("pod %s/%s is not on node %s", namespace, name, h.nodeName)
	}
	guest := h.guestOf(pod)
	if guest == nil {
		return nil, errdefs.NotFoundf("pod %s/%s has no guest", namespace, name)
	}
	return ptr.To(translate.Status(pod, guest)), nil
}

// GetPods implements vknode.PodLifecycleHandler: the pods with guests.
func (h *Handler) GetPods(context.Context) ([]*corev1.Pod, error) {
	if !h.synced() {
		return nil, errors.New("the cache of guests has not synced")
	}
	var pods []*corev1.Pod
	for _, object := range h.guests.List() {
		if pod := stub(object.(*corev1.Pod)); pod.Name != "" {
			pods = append(pods, pod)
		}
	}
	return pods, nil
}

// NotifyPods implements vknode.PodNotifier.
func (h *Handler) NotifyPods(_ context.Context, notify func(*corev1.Pod)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.notify = notify
}

// report has virtual-kubelet write the status of a pod.
func (h *Handler) report(pod *corev1.Pod, status corev1.PodStatus) {
	h.mu.Lock()
	notify := h.notify
	if notify != nil {
		h.state(pod.UID).reported = &status
	}
	h.mu.Unlock()
	if notify == nil {
		return
	}
	pod = pod.DeepCopy()
	pod.Status = status
	notify(pod)
}

// isReported reports whether this status is the last one reported for the pod.
func (h *Handler) isReported(uid types.UID, status corev1.PodStatus) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	state := h.states[uid]
	return state != nil && state.reported != nil && equality.Semantic.DeepEqual(*state.reported, status)
}

// event records an Event on a pod, unless the last one of this reason has the same
// message.
func (h *Handler) event(pod *corev1.Pod, kind, reason, message string) {
	h.mu.Lock()
	state := h.state(pod.UID)
	repeated := state.events[reason] == message
	state.events[reason] = message
	h.mu.Unlock()
	if !repeated {
		h.Recorder.Eventf(pod, nil, kind, reason, "Sync", "%s", message)
	}
}

// difference is in what the guests of an owner's pods differ from the pods.
type difference struct {
	owner   types.UID
	message string
}

// maxDifferences bounds what is remembered. Beyond it, Events are repeated.
const maxDifferences = 1024

// reportDifferences records an Event that says in what a guest differs from its pod: one for
// all pods of a controller and message.
func (h *Handler) reportDifferences(pod *corev1.Pod, message string) {
	if owner := metav1.GetControllerOfNoCopy(pod); owner != nil {
		d := difference{owner.UID, message}
		h.mu.Lock()
		known := h.differences[d]
		if !known && len(h.differences) >= maxDifferences {
			clear(h.differences)
		}
		h.differences[d] = true
		h.mu.Unlock()
		if known {
			return
		}
	}
	h.event(pod, corev1.EventTypeNormal, reasonGuestDiffers, message)
}
