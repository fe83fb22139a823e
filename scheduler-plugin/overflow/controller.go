package overflow

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/events"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/klog/v2"
	podutil "k8s.io/kubernetes/pkg/api/v1/pod"
	"k8s.io/utils/clock"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

const (
	// conflictRetryAfter is the delay after a conflict, and after a Reservation
	// changed.
	conflictRetryAfter = 200 * time.Millisecond
	// retryAfter is the delay after a failure, or while something is pending.
	retryAfter = 2 * time.Second
	// blockedRetryAfter is the delay if another object has to change first.
	blockedRetryAfter = 15 * time.Second
	// decisionTimeout is how long a count is not raised again while the last request
	// is undecided: pods that arrive one by one would otherwise restart the
	// processing in the broker and the agents each time.
	decisionTimeout = 3 * time.Second
)

// demandController creates Reservations for unschedulable pods, records their
// progress in events on the pods, and activates the pods when they may be
// schedulable. It recomputes the capacity to request from what it observes, and
// only raises counts: the agent lowers them. It runs in one goroutine, which takes
// its work from the queue.
type demandController struct {
	log          klog.Logger
	clock        clock.WithTicker
	queue        *workQueue
	batcher      *demand.Batcher
	grants       *grantCache
	keys         *keyCache
	pods         corelisters.PodLister
	nodes        corelisters.NodeLister
	namespaces   corelisters.NamespaceLister
	reservations *reservationStore
	policies     cache.Store
	// synced reports whether the caches of Reservations and policies are complete.
	synced func() bool
	// active reports whether this replica has to write requests and events.
	active   func() bool
	activate func(map[string]*corev1.Pod)
	recorder events.EventRecorder
	// profile is the name of the scheduler whose pods count, and assumed has the
	// UIDs of those that are being bound.
	profile string
	assumed *sync.Map

	pending map[types.UID]*pendingPod
	// requestedAt is when a key's count was raised last, for decisionTimeout.
	requestedAt map[demand.Key]time.Time
	// unresolved pods have an owner that no cache shows yet.
	unresolved map[types.UID]types.NamespacedName
}

// pendingPod is a pod that PostFilter reported and that is not bound yet.
type pendingPod struct {
	name types.NamespacedName
	// events has the key of the last event by reason.
	events map[string]string
}

// run processes the queue until ctx ends.
func (c *demandController) run(ctx context.Context) {
	c.pending, c.unresolved, c.requestedAt = map[types.UID]*pendingPod{}, map[types.UID]types.NamespacedName{}, map[demand.Key]time.Time{}
	for {
		c.sync(ctx)
		var timer <-chan time.Time
		if at, ok := c.nextSync(); ok {
			timer = c.clock.After(max(0, at.Sub(c.clock.Now())))
		}
		select {
		case <-ctx.Done():
			return
		case <-c.queue.ready:
		case <-timer:
		}
	}
}

// nextSync returns when to sync even if the queue stays empty.
func (c *demandController) nextSync() (time.Time, bool) {
	if !c.active() {
		return time.Time{}, false
	}
	at, ok := c.batcher.Next()
	if retry := c.clock.Now().Add(retryAfter); len(c.unresolved) > 0 && (!ok || retry.Before(at)) {
		return retry, true
	}
	return at, ok
}

// sync processes the queue and the requests that are due.
func (c *demandController) sync(ctx context.Context) {
	work := c.queue.take()
	for uid := range work.removed {
		c.batcher.Remove(uid)
		delete(c.pending, uid)
		delete(c.unresolved, uid)
	}
	for uid, name := range c.unresolved {
		if _, queued := work.unschedulable[uid]; !queued {
			work.unschedulable[uid] = name
		}
	}
	for uid, name := range work.unschedulable {
		c.addPod(uid, name)
	}
	activate := map[string]*corev1.Pod{}
	for uid, name := range work.activate {
		if pod := c.getPending(uid, name); pod != nil {
			activate[name.String()] = pod
		}
	}
	for key, forPods := range work.reservations {
		c.reservations.dropDeleted(key)
		c.syncPods(key, forPods, activate)
		// The agent may have lowered a count, or a Reservation may be deleted, while
		// pods are pending.
		c.batcher.RequeueAfter(key, conflictRetryAfter)
	}
	if len(activate) > 0 {
		c.activate(activate)
	}
	if !c.active() {
		return
	}
	for _, request := range c.batcher.Due(c.otherPodsCounter()) {
		if delay := c.reconcile(ctx, request); delay > 0 {
			c.batcher.RequeueAfter(request.Key, delay)
		}
	}
}

// addPod adds an unschedulable pod to the request of its key, or records why it
// cannot overflow.
func (c *demandController) addPod(uid types.UID, name types.NamespacedName) {
	delete(c.unresolved, uid)
	pod := c.getPending(uid, name)
	if pod == nil {
		c.queue.untrack(uid)
		return
	}
	if c.pending[uid] == nil {
		c.pending[uid] = &pendingPod{name: name, events: map[string]string{}}
	}
	if ok, reason := demand.Admissible(pod); !ok {
		if reason != "" {
			c.record(uid, notPossible(reason))
		}
		return
	}
	key, ok := c.keys.get(pod)
	if !ok {
		c.unresolved[uid] = name
		return
	}
	c.batcher.Add(uid, key.key, key.owner, key.set)
	c.recordStatus(key.key, uid)
}

// getPending returns a pod from the cache; nil unless it is pending.
func (c *demandController) getPending(uid types.UID, name types.NamespacedName) *corev1.Pod {
	pod, err := c.pods.Pods(name.Namespace).Get(name.Name)
	if err != nil || pod.UID != uid || pod.Spec.NodeName != "" || pod.DeletionTimestamp != nil {
		return nil
	}
	return pod
}

// recordStatus records the status of a key's Reservations on pending pods.
func (c *demandController) recordStatus(key demand.Key, pods ...types.UID) {
	if len(pods) == 0 || !c.active() {
		return
	}
	all, err := c.reservations.byKey(key)
	if err != nil {
		c.log.Error(err, "Failed to read the status of Reservations")
		return
	}
	for _, r := range all {
		for _, e := range statusEvents(r) {
			for _, uid := range pods {
				c.record(uid, e)
			}
		}
	}
}

// syncPods records the status of a key's Reservations on its pending pods. If
// changed, it adds the pods to activate that may be schedulable: those that
// tolerate a virtual node with granted slots, because the agent lets as many pods
// tolerate it as there are slots; and all if capacity was refused, because
// preemption may be possible now.
func (c *demandController) syncPods(key demand.Key, changed bool, activate map[string]*corev1.Pod) {
	pods := c.batcher.Pending(key)
	c.recordStatus(key, pods...)
	if !changed {
		return
	}
	nodes, all := c.grantedNodes(key), c.grants.refused(key)
	if len(nodes) == 0 && !all {
		return
	}
	for _, uid := range pods {
		pending := c.pending[uid]
		if pending == nil {
			continue
		}
		pod := c.getPending(uid, pending.name)
		if pod != nil && (all || slices.ContainsFunc(nodes, func(n *corev1.Node) bool { return c.toleratesProvider(pod, n) })) {
			activate[pending.name.String()] = pod
		}
	}
}

// virtualNodes returns the nodes that provide capacity of other clusters.
func (c *demandController) virtualNodes() []*corev1.Node {
	nodes, err := c.nodes.List(labels.Everything())
	if err != nil {
		c.log.Error(err, "Failed to list nodes")
	}
	return slices.DeleteFunc(nodes, func(n *corev1.Node) bool { return providerOf(n) == "" })
}

// grantedNodes returns the virtual nodes on which a key has slots.
func (c *demandController) grantedNodes(key demand.Key) []*corev1.Node {
	g := c.grants.get(key)
	if g == nil {
		return nil
	}
	return slices.DeleteFunc(c.virtualNodes(), func(n *corev1.Node) bool { return g.slotsAt(providerOf(n)) == 0 })
}

// toleratesProvider reports whether a pod tolerates the overflow taint of a node.
// Other taints may be removed before the pod is scheduled.
func (c *demandController) toleratesProvider(pod *corev1.Pod, node *corev1.Node) bool {
	_, untolerated := corev1helpers.FindMatchingUntoleratedTaint(c.log, node.Spec.Taints, pod.Spec.Tolerations,
		func(t *corev1.Taint) bool { return t.Key == broker.TaintOverflow }, false)
	return !untolerated
}

// otherPodsCounter counts otherPods of a key; it computes all counts on first use.
func (c *demandController) otherPodsCounter() func(demand.Key) int32 {
	counts := sync.OnceValue(c.otherPods)
	return func(key demand.Key) int32 { return counts()[key] }
}

// otherPods counts, by key, the pods that run in other clusters, and those that
// the scheduler has not tried yet: if one pod of a key does not fit, the others
// will not either, and are better requested with it. Terminating pods do not
// count: their replacements use their slots.
func (c *demandController) otherPods() map[demand.Key]int32 {
	virtual := map[string]bool{}
	for _, n := range c.virtualNodes() {
		virtual[n.Name] = true
	}
	// Of all namespaces: the scheduler's cache of pods has no index by namespace.
	pods, err := c.pods.List(labels.Everything())
	if err != nil {
		c.log.Error(err, "Failed to list pods")
	}
	counts := map[demand.Key]int32{}
	for _, pod := range pods {
		// Pending pods are in the batcher, even if they were bound since.
		if pod.DeletionTimestamp != nil || podutil.IsPodTerminal(pod) || c.pending[pod.UID] != nil ||
			!virtual[pod.Spec.NodeName] && !c.untried(pod) {
			continue
		}
		if key, ok := c.keys.get(pod); ok {
			counts[key.key]++
		}
	}
	return counts
}

// untried reports whether a pod can overflow and the scheduler has not tried it.
func (c *demandController) untried(pod *corev1.Pod) bool {
	if _, assumed := c.assumed.Load(pod.UID); assumed || pod.Spec.NodeName != "" || pod.Spec.SchedulerName != c.profile || !optedIn(c.namespaces, pod.Namespace) {
		return false
	}
	if _, tried := podutil.GetPodCondition(&pod.Status, corev1.PodScheduled); tried != nil {
		return false
	}
	ok, _ := demand.Admissible(pod)
	return ok
}

// reconcile makes a Reservation request at least what is needed. It returns when
// to requeue the request, or zero.
func (c *demandController) reconcile(ctx context.Context, request demand.Request) (requeueAfter time.Duration) {
	log := c.log.WithValues("namespace", request.Key.Namespace, "owner", request.Owner.Kind+"/"+request.Owner.Name, "shape", request.Key.Shape)
	if !c.synced() {
		return retryAfter
	}
	name := request.Key.Name(request.Owner.Name)
	current := c.reservations.get(request.Key.Namespace, name)
	if current != nil {
		if key, _ := demand.KeyOfReservation(current); key != request.Key {
			c.recordAll(request, failed(name, fmt.Sprintf("Reservation %s already exists for another owner. Delete it to request capacity for this pod.", name), current))
			return 0
		}
		if current.DeletionTimestamp != nil {
			// Its capacity is released; it is created again once it is deleted.
			return retryAfter
		}
		if requestedPods(current) >= request.PodSet.Count {
			return 0
		}
		if wait := decisionTimeout - c.clock.Since(c.requestedAt[request.Key]); wait > 0 && !decided(current) {
			return wait
		}
	}
	maps.DeleteFunc(c.requestedAt, func(_ demand.Key, at time.Time) bool { return c.clock.Since(at) > decisionTimeout })
	policy, allowed, short, err := c.applyPolicy(request, name)
	if err != nil {
		log.Error(err, "Failed to evaluate OverflowPolicies; retrying")
		c.recordAll(request, failed(err.Error(), fmt.Sprintf("Failed to request capacity, retrying: %v.", err), nil))
		return retryAfter
	}
	limited := allowed < request.PodSet.Count
	if limited {
		c.recordAll(request, capped(policy.Name, request, allowed, short, current))
		request.PodSet.Count = allowed
	}
	if request.PodSet.Count == 0 || current != nil && requestedPods(current) >= request.PodSet.Count {
		// Other Reservations of the namespace may shrink.
		return blockedRetryAfter
	}
	applied, err := c.reservations.apply(ctx, request, policy, current)
	switch {
	case err == nil:
		c.requestedAt[request.Key] = c.clock.Now()
		log.Info("Requested capacity in other clusters", "reservation", name, "pods", request.PodSet.Count)
		c.recordAll(request, requested(request, applied))
		if limited {
			return blockedRetryAfter
		}
		return 0
	case apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err):
		return conflictRetryAfter
	case apierrors.IsInvalid(err):
		log.Error(err, "The API server rejected the Reservation")
		c.recordAll(request, failed("invalid", fmt.Sprintf("Failed to request capacity: %v.", err), nil))
		return 0
	case apierrors.IsNotFound(err) || apierrors.IsForbidden(err):
		log.Error(err, "Failed to write a Reservation; retrying. Check that the agent's chart has installed the CRDs and the RBAC rules of the scheduler")
		return blockedRetryAfter
	default:
		log.Error(err, "Failed to write a Reservation; retrying")
		return retryAfter
	}
}

// decided reports whether the current generation of a Reservation is granted,
// queued or failed.
func decided(r *broker.Reservation) bool {
	if r.Status.ObservedGeneration < r.Generation {
		return false
	}
	return r.Status.Phase == broker.ReservationFailed ||
		meta.IsStatusConditionTrue(r.Status.Conditions, broker.ConditionReady) ||
		meta.IsStatusConditionTrue(r.Status.Conditions, broker.ConditionQueued)
}

// applyPolicy returns the policy of a request's namespace, nil if none selects it,
// and how many pods of the request it allows beside the other Reservations of the
// namespace; short is the resource that allows no more.
func (c *demandController) applyPolicy(request demand.Request, name string) (policy *broker.OverflowPolicy, allowed int32, short corev1.ResourceName, err error) {
	namespace, err := c.namespaces.Get(request.Key.Namespace)
	if err != nil {
		return nil, 0, "", fmt.Errorf("getting namespace %s: %w", request.Key.Namespace, err)
	}
	var all []*broker.OverflowPolicy
	for _, obj := range c.policies.List() {
		all = append(all, obj.(*broker.OverflowPolicy))
	}
	policy, err = policyFor(namespace, all)
	if err != nil || policy == nil || policy.Spec.MaxResources == nil {
		return policy, request.PodSet.Count, "", err
	}
	others, err := c.reservations.list(request.Key.Namespace)
	if err != nil {
		return nil, 0, "", err
	}
	allowed, short = maxPods(request.PodSet, *policy.Spec.MaxResources, requestedResources(others, name))
	return policy, allowed, short, nil
}
