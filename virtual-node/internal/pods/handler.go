package pods

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"github.com/virtual-kubelet/virtual-kubelet/node/nodeutil"
	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	ctrlcache "sigs.k8s.io/controller-runtime/pkg/cache"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/virtual-node/internal/translate"
)

const (
	// workers is the number of concurrent reconciles, endedWorkers that of deletions.
	workers, endedWorkers = 16, 8
	// syncTimeout bounds one reconcile.
	syncTimeout = 30 * time.Second
	// pruneDelay is the time from a change to the removal of unused copies.
	pruneDelay = 2 * time.Second
	// minBackoff and maxBackoff bound the delay between retries.
	minBackoff, maxBackoff = 100 * time.Millisecond, 20 * time.Second
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
	// Networks of the providers' pods, in which guests have addresses.
	Networks []netip.Prefix
	Recorder events.EventRecorder
	Clock    clock.WithTicker
	Log      logr.Logger
}

// Handler runs the pods of one virtual node.
type Handler struct {
	Options
	nodeName string
	// queue has the keys of pods that are to be reconciled with their guests, ended those of
	// pods that may have ended: their deletion does not wait for the provider.
	queue, ended workqueue.TypedRateLimitingInterface[string]

	consumerInformers informers.SharedInformerFactory
	pods              cache.Indexer
	podsSynced        cache.InformerSynced
	sources           *namespaceCaches

	providerInformers informers.SharedInformerFactory
	guests            cache.Indexer
	configMaps        copies[*corev1.ConfigMap]
	secrets           copies[*corev1.Secret]
	providerSynced    []cache.InformerSynced

	mu     sync.Mutex
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
}

// podState is what the handler remembers of a pod.
type podState struct {
	// refs is nil before they were computed.
	refs *translate.References
	// created is whether a guest may have been created.
	created bool
	// pending is when the guest was first seen to be pending, or was reported since; zero if it
	// was not. pendingGated is whether it waited for its place when it was last seen to be.
	pending      time.Time
	pendingGated bool
	// written is the hash of the status last written, when the pod had resource version
	// writtenTo; 0 if none was.
	written   uint64
	writtenTo string
	// writes is the pace of the writes of the status; nil before the first.
	writes *rate.Limiter
	// applied are the contents of the pod and the guest, if the guest needed no change and
	// refers to no copies.
	applied [2]uint64
	// events are the messages of the last Events, by reason.
	events map[string]string
}

// New returns a handler that does nothing before Run.
func New(o Options) (*Handler, error) {
	newQueue := func(name string) workqueue.TypedRateLimitingInterface[string] {
		return workqueue.NewTypedRateLimitingQueueWithConfig(
			workqueue.NewTypedItemExponentialFailureRateLimiter[string](minBackoff, maxBackoff),
			workqueue.TypedRateLimitingQueueConfig[string]{Name: name + "-" + o.Provider})
	}
	nodeName := broker.VirtualNodeName(o.Provider)
	h := &Handler{
		Options: o, nodeName: nodeName, states: map[types.UID]*podState{}, uids: map[string]types.UID{}, differences: map[difference]bool{},
		queue: newQueue("guests"), ended: newQueue("ended"),
		consumerInformers: informers.NewSharedInformerFactoryWithOptions(o.ConsumerClient, 0, informers.WithTransform(encodePod), nodeutil.PodInformerFilter(nodeName)),
		providerInformers: informers.NewSharedInformerFactoryWithOptions(o.ProviderClient, 0, informers.WithNamespace(o.GuestNamespace),
			informers.WithTransform(ctrlcache.TransformStripManagedFields())),
	}
	h.sources = newNamespaceCaches(o.ConsumerClient, h.enqueueReferring)
	if err := errors.Join(h.watchPods(), h.watchProvider()); err != nil {
		return nil, fmt.Errorf("setting up informers: %w", err)
	}
	return h, nil
}

// watchPods sets up the cache of the pods.
func (h *Handler) watchPods() error {
	pods := h.consumerInformers.Core().V1().Pods().Informer()
	h.pods, h.podsSynced = pods.GetIndexer(), pods.HasSynced
	_, err := pods.AddEventHandler(onChange(func(object any) {
		if pod, ok := object.(*encodedPod); ok {
			h.queue.Add(pod.key())
			if pod.ended {
				h.ended.Add(pod.key())
			}
		}
	}))
	return err
}

// watchProvider sets up the caches of the guests and of the copies.
func (h *Handler) watchProvider() error {
	core := h.providerInformers.Core().V1()
	guests, configMaps, secrets := core.Pods().Informer(), core.ConfigMaps().Informer(), core.Secrets().Informer()
	h.guests = guests.GetIndexer()
	client := h.ProviderClient.CoreV1()
	h.configMaps = copies[*corev1.ConfigMap]{"ConfigMap", client.ConfigMaps(h.GuestNamespace), configMaps.GetIndexer(), compareConfigMaps}
	h.secrets = copies[*corev1.Secret]{"Secret", client.Secrets(h.GuestNamespace), secrets.GetIndexer(), compareSecrets}
	err := errors.Join(guests.SetTransform(encodeGuest), guests.AddIndexers(cache.Indexers{indexOrigin: func(object any) ([]string, error) {
		if origin := object.(*encodedPod).origin; origin != "" {
			return []string{origin}, nil
		}
		return nil, nil
	}}))
	_, guestsErr := guests.AddEventHandler(onChange(func(object any) {
		if guest, ok := object.(*encodedPod); ok && guest.origin != "" {
			h.queue.Add(guest.origin)
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
func (h *Handler) Run(ctx context.Context) {
	var running sync.WaitGroup
	defer running.Wait()
	h.consumerInformers.Start(ctx.Done())
	h.providerInformers.Start(ctx.Done())
	work := func(queue workqueue.TypedRateLimitingInterface[string], count int, reconcile func(context.Context, string) (time.Duration, error)) {
		for range count {
			running.Go(func() {
				for h.processNext(ctx, queue, reconcile) {
				}
			})
		}
	}
	work(h.ended, endedWorkers, h.deleteEnded)
	// With partial caches, guests would be taken for orphans.
	if cache.WaitForCacheSync(ctx.Done(), append([]cache.InformerSynced{h.podsSynced}, h.providerSynced...)...) {
		work(h.queue, workers, h.sync)
		h.queue.AddAfter(pruneKey, pruneDelay)
	}
	<-ctx.Done()
	h.queue.ShutDown()
	h.ended.ShutDown()
	h.sources.stop()
}

func (h *Handler) processNext(ctx context.Context, queue workqueue.TypedRateLimitingInterface[string], reconcile func(context.Context, string) (time.Duration, error)) bool {
	key, shutdown := queue.Get()
	if shutdown || ctx.Err() != nil {
		return false
	}
	defer queue.Done(key)
	reconcileCtx, cancel := context.WithTimeout(ctx, syncTimeout)
	defer cancel()
	requeueAfter, err := reconcile(reconcileCtx, key)
	switch {
	case ctx.Err() != nil:
		return false
	case err != nil:
		syncErrors.WithLabelValues(h.Provider).Inc()
		h.Log.Error(err, "Failed to reconcile; retrying", "pod", key)
		queue.AddRateLimited(key)
	case requeueAfter > 0:
		queue.Forget(key)
		queue.AddAfter(key, requeueAfter)
	default:
		queue.Forget(key)
	}
	return true
}

// enqueueReferring enqueues the pods of a namespace that refer to ConfigMaps or
// Secrets.
func (h *Handler) enqueueReferring(namespace string) {
	pods, err := h.pods.ByIndex(cache.NamespaceIndex, namespace)
	if err != nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, object := range pods {
		pod := object.(*encodedPod)
		if state := h.states[pod.UID]; state != nil && state.refs != nil && len(state.refs.ConfigMaps)+len(state.refs.Secrets) > 0 {
			h.queue.Add(pod.key())
		}
	}
}

// enqueueAll enqueues all pods.
func (h *Handler) enqueueAll() {
	for _, key := range h.pods.ListKeys() {
		h.queue.Add(key)
	}
}

// state returns the state of a pod. The caller holds h.mu.
func (h *Handler) state(uid types.UID) *podState {
	state := h.states[uid]
	if state == nil {
		state = &podState{}
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
	h.enqueueAll()
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
	h.enqueueAll()
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
	h.mu.Lock()
	unreachable := h.unreachable
	h.mu.Unlock()
	status := translate.Status(pod, guest, h.Networks...)
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

// Pods returns copies of the pods of the node, one at a time.
func (h *Handler) Pods() iter.Seq[*corev1.Pod] {
	return func(yield func(*corev1.Pod) bool) {
		for _, object := range h.pods.List() {
			if !yield(object.(*encodedPod).decode()) {
				return
			}
		}
	}
}

// PodsSynced reports whether Pods is complete.
func (h *Handler) PodsSynced() bool { return h.podsSynced() }

// HasNoGuests reports whether the provider is known to have no guest left that this program
// created.
func (h *Handler) HasNoGuests() bool {
	return h.synced() && len(h.guests.ListIndexFuncValues(indexOrigin)) == 0
}

func (h *Handler) synced() bool { return h.podsSynced() && allSynced(h.providerSynced) }

// Locate returns the guest of a pod; ok is false if the node has no such pod, or
// it has no guest.
func (h *Handler) Locate(namespace, name string) (guestNamespace, guestName string, ok bool) {
	object, found, err := h.pods.GetByKey(namespace + "/" + name)
	if err != nil || !found {
		return "", "", false
	}
	guest := h.guestOf(object.(*encodedPod))
	if guest == nil {
		return "", "", false
	}
	return guest.Namespace, guest.Name, true
}

// guestOf returns the guest of the pod with this UID, or nil.
func (h *Handler) guestOf(pod *encodedPod) *encodedPod {
	object, found, err := h.guests.GetByKey(h.GuestNamespace + "/" + pod.guestName())
	if err != nil || !found || object.(*encodedPod).originUID != pod.UID {
		return nil
	}
	return object.(*encodedPod)
}

// event records an Event on a pod, unless the last one of this reason has the same
// message.
func (h *Handler) event(pod *corev1.Pod, kind, reason, message string) {
	h.mu.Lock()
	state := h.state(pod.UID)
	repeated := state.events[reason] == message
	if state.events == nil {
		state.events = map[string]string{}
	}
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
