// Package hosting runs the pods of one virtual node as guests in a namespace of
// the provider, and tells home what becomes of them.
//
// Everything is level-triggered: a pod's key is looked at whenever the pod at
// home, its guest, or something it refers to has changed, and what is to be done
// follows from what is seen then. A fault on the way to the provider changes
// nothing at home; it is tried again.
package hosting

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"github.com/virtual-kubelet/virtual-kubelet/errdefs"
	"github.com/virtual-kubelet/virtual-kubelet/node"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	listers "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	ctrlcache "sigs.k8s.io/controller-runtime/pkg/cache"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/virtual-node/internal/guest"
)

const (
	// workers look at so many pods at once.
	workers = 8
	// pruneAfter is how long after a change copies that nobody needs are looked
	// for.
	pruneAfter = 2 * time.Second
	// soonest and latest bound the pauses between two tries.
	soonest, latest = 100 * time.Millisecond, 20 * time.Second
	// endingEvery is how often a pod is looked at whose guest is ending.
	endingEvery = 500 * time.Millisecond
	// indexOrigin finds guests by the home pod's namespace and name.
	indexOrigin = "origin"
	// pruneKey stands in the queue for the removal of copies.
	pruneKey = "copies"
)

// Options of a Host; all are required.
type Options struct {
	// Provider is its cluster ID; Namespace the one for guests there, and Remote
	// a client that may work in it.
	Provider, Namespace string
	Remote              kubernetes.Interface
	// Home is a client for this cluster.
	Home     kubernetes.Interface
	DNS      guest.Options
	Recorder events.EventRecorder
	Clock    clock.WithTicker
	Log      logr.Logger
}

// Host is the hosting of one virtual node's pods.
type Host struct {
	Options
	nodeName string
	queue    workqueue.TypedRateLimitingInterface[string]

	homePods informers.SharedInformerFactory
	pods     listers.PodLister

	remote              informers.SharedInformerFactory
	guests              cache.Indexer
	configMaps, secrets cache.Indexer
	synced              []cache.InformerSynced
	homeSynced          cache.InformerSynced
	sources             *sources
	controller          *node.PodController

	mu     sync.Mutex
	notify func(*corev1.Pod)
	// refs of the pods, by UID; noted is what people were told about them, by
	// reason.
	refs  map[types.UID]guest.References
	noted map[types.UID]map[string]string
	// made are the pods for which a guest may have been made, seen the last pod of
	// each name.
	made map[types.UID]bool
	// last is the status of each pod that was reported last.
	last map[types.UID]corev1.PodStatus
	seen map[string]types.UID
	// cutOff is while the provider cannot be reached.
	cutOff bool
}

var (
	_ node.PodLifecycleHandler = (*Host)(nil)
	_ node.PodNotifier         = (*Host)(nil)
)

// New makes a Host. Nothing happens before Run.
func New(o Options) (*Host, error) {
	h := &Host{
		Options: o, nodeName: broker.VirtualNodeName(o.Provider),
		refs: map[types.UID]guest.References{}, noted: map[types.UID]map[string]string{},
		made: map[types.UID]bool{}, last: map[types.UID]corev1.PodStatus{}, seen: map[string]types.UID{},
		queue: workqueue.NewTypedRateLimitingQueueWithConfig(
			workqueue.NewTypedItemExponentialFailureRateLimiter[string](soonest, latest),
			workqueue.TypedRateLimitingQueueConfig[string]{Name: "guests-" + o.Provider}),
	}
	h.sources = newSources(o.Home, h.changedSource)
	h.homePods = informers.NewSharedInformerFactoryWithOptions(o.Home, 0,
		informers.WithTransform(ctrlcache.TransformStripManagedFields()),
		informers.WithTweakListOptions(func(l *listOptions) {
			l.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", h.nodeName).String()
		}))
	homePods := h.homePods.Core().V1().Pods()
	h.pods, h.homeSynced = homePods.Lister(), homePods.Informer().HasSynced

	h.remote = informers.NewSharedInformerFactoryWithOptions(o.Remote, 0, informers.WithNamespace(o.Namespace),
		informers.WithTransform(ctrlcache.TransformStripManagedFields()))
	guests, configMaps, secrets := h.remote.Core().V1().Pods(), h.remote.Core().V1().ConfigMaps(), h.remote.Core().V1().Secrets()
	if err := guests.Informer().AddIndexers(cache.Indexers{indexOrigin: func(object any) ([]string, error) {
		if namespace, name, _, ok := guest.Origin(object.(*corev1.Pod)); ok {
			return []string{namespace + "/" + name}, nil
		}
		return nil, nil
	}}); err != nil {
		return nil, fmt.Errorf("indexing guests: %w", err)
	}
	h.guests, h.configMaps, h.secrets = guests.Informer().GetIndexer(), configMaps.Informer().GetIndexer(), secrets.Informer().GetIndexer()
	h.synced = []cache.InformerSynced{guests.Informer().HasSynced, configMaps.Informer().HasSynced, secrets.Informer().HasSynced}
	_, err1 := guests.Informer().AddEventHandler(onAny(func(object any) {
		if pod, ok := object.(*corev1.Pod); ok {
			if namespace, name, _, ok := guest.Origin(pod); ok {
				h.queue.Add(namespace + "/" + name)
			}
		}
	}))
	_, err2 := homePods.Informer().AddEventHandler(onAny(func(object any) {
		if pod, ok := object.(*corev1.Pod); ok {
			h.queue.Add(pod.Namespace + "/" + pod.Name)
		}
	}))
	changed := onAny(func(object any) {
		h.queue.AddAfter(pruneKey, pruneAfter)
		if namespace, _, _, ok := guest.Origin(object.(metaObject)); ok {
			h.changedSource(namespace)
		}
	})
	_, err3 := configMaps.Informer().AddEventHandler(changed)
	_, err4 := secrets.Informer().AddEventHandler(changed)
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		return nil, fmt.Errorf("watching: %w", err)
	}

	// Filled by nobody: this package resolves what pods refer to itself, and the
	// library is to ask for nothing that the charts do not allow.
	none := informers.NewSharedInformerFactory(o.Home, 0).Core().V1()
	h.controller, err1 = node.NewPodController(node.PodControllerConfig{
		PodClient: podClient{h.Home.CoreV1()}, PodInformer: homePods, EventRecorder: silent{}, Provider: h,
		ConfigMapInformer: none.ConfigMaps(), SecretInformer: none.Secrets(), ServiceInformer: none.Services(),
		SkipDownwardAPIResolution:             true,
		SyncPodsFromKubernetesRateLimiter:     limiter(),
		SyncPodsFromKubernetesShouldRetryFunc: soon,
		DeletePodsFromKubernetesRateLimiter:   limiter(), DeletePodsFromKubernetesShouldRetryFunc: always,
		SyncPodStatusFromProviderRateLimiter: limiter(), SyncPodStatusFromProviderShouldRetryFunc: always,
	})
	if err1 != nil {
		return nil, fmt.Errorf("setting up the pod controller: %w", err1)
	}
	return h, nil
}

func limiter() workqueue.TypedRateLimiter[any] {
	return workqueue.NewTypedItemExponentialFailureRateLimiter[any](soonest, latest)
}

// always has the library try again as long as it takes.
func always(context.Context, string, int, time.Time, error) (*time.Duration, error) { return nil, nil }

// soon is always, but for pods whose guests are ending: what the guests' end is
// seen by is a change of status, of which the library takes no notice.
func soon(_ context.Context, _ string, _ int, _ time.Time, err error) (*time.Duration, error) {
	if errors.Is(err, errEnding) {
		return ptr.To(endingEvery), nil
	}
	return nil, nil
}

// onAny has f told of every change.
func onAny(f func(object any)) cache.ResourceEventHandler {
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

// Run hosts until ctx ends. Guests and pods stay as they are then.
func (h *Host) Run(ctx context.Context) error {
	var running sync.WaitGroup
	defer running.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer h.queue.ShutDown()
	h.homePods.Start(ctx.Done())
	h.remote.Start(ctx.Done())
	running.Go(func() {
		<-ctx.Done()
		h.sources.stop()
	})
	running.Go(func() {
		// Nothing is judged before all that there is has been seen.
		if !cache.WaitForCacheSync(ctx.Done(), append([]cache.InformerSynced{h.homeSynced}, h.synced...)...) {
			return
		}
		var working sync.WaitGroup
		for range workers {
			working.Go(func() {
				for h.next(ctx) {
				}
			})
		}
		h.queue.AddAfter(pruneKey, pruneAfter)
		<-ctx.Done()
		h.queue.ShutDown()
		working.Wait()
	})
	return h.controller.Run(ctx, workers)
}

func (h *Host) next(ctx context.Context) bool {
	key, shutdown := h.queue.Get()
	if shutdown || ctx.Err() != nil {
		return false
	}
	defer h.queue.Done(key)
	work, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	var again time.Duration
	var err error
	if key == pruneKey {
		err = h.prune(work)
	} else {
		again, err = h.sync(work, key)
	}
	switch {
	case ctx.Err() != nil:
		return false
	case err != nil:
		syncErrors.WithLabelValues(h.Provider).Inc()
		h.Log.Error(err, "Looking after a pod; it is tried again", "pod", key)
		h.queue.AddRateLimited(key)
	case again > 0:
		h.queue.Forget(key)
		h.queue.AddAfter(key, again)
	default:
		h.queue.Forget(key)
	}
	return true
}

// ready reports whether all that there is has been seen.
func (h *Host) ready() bool {
	for _, synced := range h.synced {
		if !synced() {
			return false
		}
	}
	return h.homeSynced()
}

// changedSource has the pods of a home namespace looked at that refer to
// something.
func (h *Host) changedSource(namespace string) {
	pods, err := h.pods.Pods(namespace).List(labels.Everything())
	if err != nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, pod := range pods {
		if refs := h.refs[pod.UID]; len(refs.ConfigMaps)+len(refs.Secrets) > 0 {
			h.queue.Add(pod.Namespace + "/" + pod.Name)
		}
	}
}

// SetReachable says whether the provider can be reached. Until it can again,
// what home makes of its pods' readiness stands.
func (h *Host) SetReachable(reachable bool) {
	h.mu.Lock()
	back := h.cutOff && reachable
	h.cutOff = !reachable
	h.mu.Unlock()
	if !back {
		return
	}
	for _, pod := range h.HomePods() {
		h.queue.Add(pod.Namespace + "/" + pod.Name)
	}
}

// mirror is the status of a pod that has a guest. Of one that is out of reach
// nobody knows whether it is ready: home has the pods of a node that is not ready
// marked so, and takes them out of Services.
func (h *Host) mirror(home, g *corev1.Pod) corev1.PodStatus {
	status := guest.Status(home, g)
	h.mu.Lock()
	cutOff := h.cutOff
	h.mu.Unlock()
	if !cutOff {
		return status
	}
	for _, c := range home.Status.Conditions {
		if c.Type == corev1.PodReady {
			status.Conditions = setCondition(status.Conditions, c)
		}
	}
	return status
}

// HomePods are the pods of the node.
func (h *Host) HomePods() []*corev1.Pod {
	pods, err := h.pods.List(labels.Everything())
	if err != nil {
		return nil
	}
	return pods
}

// Listed reports whether the node's pods have been listed.
func (h *Host) Listed() bool { return h.homeSynced() }

// Idle reports whether the provider has been seen to have no guest left.
func (h *Host) Idle() bool { return h.ready() && len(h.guests.ListKeys()) == 0 }

// Locate finds the guest of a home pod.
func (h *Host) Locate(namespace, name string) (guestNamespace, guestName string, ok bool) {
	pod, err := h.pods.Pods(namespace).Get(name)
	if err != nil {
		return "", "", false
	}
	g := h.guestOf(pod)
	if g == nil {
		return "", "", false
	}
	return g.Namespace, g.Name, true
}

// guestOf is the guest of just this incarnation of a pod.
func (h *Host) guestOf(pod *corev1.Pod) *corev1.Pod {
	object, found, err := h.guests.GetByKey(h.Namespace + "/" + guest.Name(pod))
	if err != nil || !found {
		return nil
	}
	g := object.(*corev1.Pod)
	if _, _, uid, ok := guest.Origin(g); !ok || uid != pod.UID {
		return nil
	}
	return g
}

// CreatePod implements node.PodLifecycleHandler. It never fails: an error would
// turn a pod that is not to be restarted into a failed one.
func (h *Host) CreatePod(_ context.Context, pod *corev1.Pod) error {
	h.queue.Add(pod.Namespace + "/" + pod.Name)
	return nil
}

// UpdatePod implements node.PodLifecycleHandler.
func (h *Host) UpdatePod(_ context.Context, pod *corev1.Pod) error {
	h.queue.Add(pod.Namespace + "/" + pod.Name)
	return nil
}

// errEnding has the library ask again: it removes the pod at home as soon as no
// container runs any more, and without this error when the grace is over,
// whatever still runs at a provider that cannot be reached.
var errEnding = errors.New("the guest is ending")

// DeletePod implements node.PodLifecycleHandler.
func (h *Host) DeletePod(_ context.Context, pod *corev1.Pod) error {
	h.queue.Add(pod.Namespace + "/" + pod.Name)
	if _, err := h.pods.Pods(pod.Namespace).Get(pod.Name); err != nil {
		return nil // gone at home: the queue sees to the guest
	}
	return errEnding
}

// GetPod implements node.PodLifecycleHandler: the pod as it is at home, if it
// has a guest.
func (h *Host) GetPod(_ context.Context, namespace, name string) (*corev1.Pod, error) {
	found, err := h.guests.ByIndex(indexOrigin, namespace+"/"+name)
	if err != nil || len(found) == 0 {
		return nil, errdefs.NotFoundf("pod %s/%s has no guest", namespace, name)
	}
	return shadow(found[0].(*corev1.Pod)), nil
}

// shadow stands for the home pod of a guest: enough to find it by.
func shadow(g *corev1.Pod) *corev1.Pod {
	pod := &corev1.Pod{}
	pod.Namespace, pod.Name, pod.UID, _ = guest.Origin(g)
	return pod
}

// GetPodStatus implements node.PodLifecycleHandler.
func (h *Host) GetPodStatus(_ context.Context, namespace, name string) (*corev1.PodStatus, error) {
	pod, err := h.pods.Pods(namespace).Get(name)
	if err != nil {
		return nil, errdefs.NotFoundf("pod %s/%s is not on node %s", namespace, name, h.nodeName)
	}
	g := h.guestOf(pod)
	if g == nil {
		return nil, errdefs.NotFoundf("pod %s/%s has no guest", namespace, name)
	}
	status := guest.Status(pod, g)
	return &status, nil
}

// GetPods implements node.PodLifecycleHandler: those of this node.
func (h *Host) GetPods(context.Context) ([]*corev1.Pod, error) {
	if !h.ready() {
		return nil, errors.New("the guests have not been listed yet")
	}
	var pods []*corev1.Pod
	for _, object := range h.guests.List() {
		if pod := shadow(object.(*corev1.Pod)); pod.Name != "" {
			pods = append(pods, pod)
		}
	}
	return pods, nil
}

// NotifyPods implements node.PodNotifier.
func (h *Host) NotifyPods(_ context.Context, notify func(*corev1.Pod)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.notify = notify
}

// report has a pod's status written at home.
func (h *Host) report(pod *corev1.Pod, status corev1.PodStatus) {
	h.mu.Lock()
	notify := h.notify
	if notify != nil {
		h.last[pod.UID] = status
	}
	h.mu.Unlock()
	if notify == nil {
		return
	}
	pod = pod.DeepCopy()
	pod.Status = status
	notify(pod)
}

// told tells whether a status is the last one that was reported for a pod.
func (h *Host) told(pod types.UID, status corev1.PodStatus) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	last, ok := h.last[pod]
	return ok && equality.Semantic.DeepEqual(last, status)
}

// tell makes an Event on a pod at home, once for each text.
func (h *Host) tell(pod *corev1.Pod, kind, reason, text string) {
	h.mu.Lock()
	said := h.noted[pod.UID]
	if said == nil {
		said = map[string]string{}
		h.noted[pod.UID] = said
	}
	again := said[reason] == text
	said[reason] = text
	h.mu.Unlock()
	if again {
		return
	}
	const most = 1000 // what the API takes is 1 kB
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "") + "…"
	}
	h.Recorder.Eventf(pod, nil, kind, reason, "Host", "%s", text)
}
