package virtualnode

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// Tracker keeps the pods that are on virtual nodes or may overflow, in groups of those that
// count in the same way, with their sums. So the cost of an event does not grow with the
// number of pods, and that of a reconcile grows with the number of groups only. It equals a
// Tracker in which the same pods are set for the first time. It is safe for concurrent use.
type Tracker struct {
	// scheduler is that of the pods without a node that are tracked, none if it is empty.
	scheduler string
	// synced reports whether the pods that existed at the start have been set.
	synced toolscache.InformerSynced

	mu     sync.Mutex
	pods   map[types.NamespacedName]*trackedPod
	groups map[groupKey]*group
	// onNode are the groups by virtual node, candidates by what Reservations may serve them for.
	onNode     map[string]map[*group]bool
	candidates map[candidateKey]map[*group]bool
	// changed are called with both versions of a pod, of which one may be nil.
	changed []func(before, after *trackedPod)
}

// use is how a pod counts.
type use int

const (
	// waits is a pod without a node that may get a virtual one.
	waits use = iota
	// runs is a pod on a virtual node, ended one that has finished there.
	runs
	ended
	// daemon is a pod of a DaemonSet on a virtual node, or that waits for one.
	daemon
)

// groupKey is what pods have in common that count in the same way.
type groupKey struct {
	use use
	// node is the virtual node, by its name only: a node of this cluster may have such a name.
	namespace, node, hold, shape string
	// gang, or else controller, which may have a controller of its own.
	gang       demand.Gang
	controller ownerRef
}

// candidateKey is what pods of a namespace that a Reservation serves have in common: their
// shape, or their gang, of whatever shape they are. Those whose owner is gone have its hold.
type candidateKey struct {
	namespace, shape, hold string
	gang                   types.UID
}

// candidates are the keys by which pods are found that may need a Reservation's capacity.
func (k groupKey) candidates() (keys []candidateKey) {
	switch {
	case k.use != waits && k.use != runs:
		return nil
	case k.gang != demand.Gang{}:
		keys = append(keys, candidateKey{namespace: k.namespace, gang: k.gang.UID()})
	default:
		keys = append(keys, candidateKey{namespace: k.namespace, shape: k.shape})
	}
	if k.hold != "" {
		keys = append(keys, candidateKey{namespace: k.namespace, hold: k.hold})
	}
	return keys
}

// ownerRef is an owner reference that can be compared.
type ownerRef struct {
	apiVersion, kind, name string
	uid                    types.UID
}

// trackedPod is one version of a pod, and how it counts.
type trackedPod struct {
	pod *corev1.Pod
	key groupKey
	// requests are only those of a pod that runs on a virtual node.
	requests corev1.ResourceList
}

// group is the pods that have a key, at least one.
type group struct {
	groupKey
	// member is any of the pods: all have the same owner.
	member   *corev1.Pod
	pods     map[types.NamespacedName]*trackedPod
	requests corev1.ResourceList
}

// NewTracker returns a Tracker of pods that are Set. Scheduler is that which binds pods to
// virtual nodes, empty if none does: of the pods without a node, only its own may get one.
func NewTracker(scheduler string, pods ...*corev1.Pod) *Tracker {
	t := &Tracker{
		scheduler: scheduler, synced: func() bool { return true },
		pods: map[types.NamespacedName]*trackedPod{}, groups: map[groupKey]*group{},
		onNode: map[string]map[*group]bool{}, candidates: map[candidateKey]map[*group]bool{},
	}
	for _, pod := range pods {
		t.Set(pod)
	}
	return t
}

// SetupWithManager makes the Tracker follow the manager's cache.
func (t *Tracker) SetupWithManager(mgr ctrl.Manager) error {
	informer, err := mgr.GetCache().GetInformer(context.Background(), &corev1.Pod{}, cache.BlockUntilSynced(false))
	if err != nil {
		return fmt.Errorf("watching pods: %w", err)
	}
	registration, err := informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { t.Set(o.(*corev1.Pod)) },
		UpdateFunc: func(_, o any) { t.Set(o.(*corev1.Pod)) },
		DeleteFunc: func(o any) {
			if gone, ok := o.(toolscache.DeletedFinalStateUnknown); ok {
				o = gone.Obj
			}
			t.Delete(client.ObjectKeyFromObject(o.(*corev1.Pod)))
		},
	})
	if err != nil {
		return fmt.Errorf("watching pods: %w", err)
	}
	t.synced = registration.HasSynced
	return nil
}

// WaitSynced waits until the Tracker has every pod that existed when it was started.
func (t *Tracker) WaitSynced(ctx context.Context) error {
	if !t.synced() && !toolscache.WaitForCacheSync(ctx.Done(), t.synced) {
		return fmt.Errorf("waiting for the pods: %w", context.Cause(ctx))
	}
	return nil
}

// Set adds a pod, or replaces it. The Tracker keeps it: it must not be changed.
func (t *Tracker) Set(pod *corev1.Pod) {
	name := client.ObjectKeyFromObject(pod)
	t.mu.Lock()
	before := t.pods[name]
	after := t.track(pod, before)
	t.remove(name, before)
	t.add(name, after)
	changed := t.changed
	t.mu.Unlock()
	notify(changed, before, after)
}

// Delete removes a pod.
func (t *Tracker) Delete(name types.NamespacedName) {
	t.mu.Lock()
	before := t.pods[name]
	t.remove(name, before)
	changed := t.changed
	t.mu.Unlock()
	notify(changed, before, nil)
}

func notify(changed []func(before, after *trackedPod), before, after *trackedPod) {
	if before == nil && after == nil {
		return
	}
	for _, f := range changed {
		f(before, after)
	}
}

// track returns how a pod counts, nil if it does not. before is the version before it, if
// that was tracked.
func (t *Tracker) track(pod *corev1.Pod, before *trackedPod) *trackedPod {
	p := &trackedPod{pod: pod, key: groupKey{namespace: pod.Namespace, node: pod.Spec.NodeName, hold: pod.Labels[broker.LabelHold]}}
	switch virtual := ProviderOf(pod.Spec.NodeName) != ""; {
	case pod.Spec.NodeName != "" && !virtual:
		return nil
	case RunsOnEveryNode(pod):
		if p.key = (groupKey{use: daemon, namespace: pod.Namespace, node: nodeOfDaemonPod(pod)}); ProviderOf(p.key.node) == "" {
			return nil
		}
		return p
	case inventory.Finished(pod) && virtual:
		p.key = groupKey{use: ended, namespace: pod.Namespace, node: pod.Spec.NodeName}
		return p
	case virtual:
		p.key.use, p.requests = runs, inventory.Requests(pod)
	case !t.mayOverflow(pod):
		return nil
	}
	if gang, ok := demand.GangOf(pod); ok {
		p.key.gang = gang
	} else if owner := metav1.GetControllerOfNoCopy(pod); owner != nil {
		p.key.controller = ownerRef{owner.APIVersion, owner.Kind, owner.Name, owner.UID}
	}
	if before != nil && before.key.shape != "" && sameShape(before.pod, pod) {
		p.key.shape = before.key.shape
	} else {
		p.key.shape, _ = demand.ShapeOf(pod)
	}
	return p
}

// sameShape reports whether two versions of a pod surely have the same shape.
func sameShape(before, after *corev1.Pod) bool {
	return before.UID == after.UID && after.Generation != 0 && before.Generation == after.Generation &&
		before.Spec.NodeName == after.Spec.NodeName && before.Labels[broker.LabelShape] == after.Labels[broker.LabelShape]
}

// mayOverflow reports whether a pod without a node may get a virtual one: it can overflow, and
// it is not one of another scheduler, which may not bind it there.
func (t *Tracker) mayOverflow(pod *corev1.Pod) bool {
	if cmp.Or(pod.Spec.SchedulerName, corev1.DefaultSchedulerName) != t.scheduler {
		return false
	}
	ok, _ := demand.Admissible(pod)
	return ok
}

func (t *Tracker) add(name types.NamespacedName, p *trackedPod) {
	if p == nil {
		return
	}
	t.pods[name] = p
	g := t.groups[p.key]
	if g == nil {
		g = &group{groupKey: p.key, pods: map[types.NamespacedName]*trackedPod{}, requests: corev1.ResourceList{}}
		t.groups[p.key] = g
		insert(t.onNode, p.key.node, g)
		for _, key := range p.key.candidates() {
			insert(t.candidates, key, g)
		}
	}
	for _, other := range g.pods {
		if maps.EqualFunc(p.requests, other.requests, sameAmount) {
			p.requests = other.requests // one list for pods that are alike
		}
		break
	}
	g.pods[name], g.member = p, p.pod
	for resource, amount := range p.requests {
		sum := g.requests[resource]
		sum.Add(amount)
		g.requests[resource] = sum
	}
}

func (t *Tracker) remove(name types.NamespacedName, p *trackedPod) {
	if p == nil {
		return
	}
	delete(t.pods, name)
	g := t.groups[p.key]
	if delete(g.pods, name); len(g.pods) == 0 {
		delete(t.groups, p.key)
		drop(t.onNode, p.key.node, g)
		for _, key := range p.key.candidates() {
			drop(t.candidates, key, g)
		}
		return
	}
	for resource, amount := range p.requests {
		sum := g.requests[resource]
		sum.Sub(amount)
		g.requests[resource] = sum
	}
}

func insert[K comparable](index map[K]map[*group]bool, key K, g *group) {
	if index[key] == nil {
		index[key] = map[*group]bool{}
	}
	index[key][g] = true
}

func drop[K comparable](index map[K]map[*group]bool, key K, g *group) {
	if delete(index[key], g); len(index[key]) == 0 {
		delete(index, key)
	}
}

// observed is a group as it was at one time.
type observed struct {
	groupKey
	member *corev1.Pod
	Pods
}

// observeOn copies the sums of the groups on a virtual node. The pods themselves are read when
// they are asked for.
func (t *Tracker) observeOn(node string) []observed {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := make([]observed, 0, len(t.onNode[node]))
	for g := range t.onNode[node] {
		requests := make(corev1.ResourceList, len(g.requests))
		for resource, amount := range g.requests {
			requests[resource] = amount.DeepCopy()
		}
		out = append(out, observed{groupKey: g.groupKey, member: g.member, Pods: Pods{
			Count: int32(len(g.pods)), Requests: requests, Namespaces: []string{g.namespace}, list: []func() []*corev1.Pod{func() []*corev1.Pod { return t.members(g.groupKey) }},
		}})
	}
	return out
}

// candidate is a group that may belong to a Reservation, as it was at one time.
type candidate struct {
	groupKey
	member *corev1.Pod
	count  int32
}

// candidatesWith returns the groups that have one of some keys.
func (t *Tracker) candidatesWith(keys ...candidateKey) (out []candidate) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i, key := range keys {
		out = slices.Grow(out, len(t.candidates[key]))
		for g := range t.candidates[key] {
			if !slices.ContainsFunc(keys[:i], func(before candidateKey) bool { return t.candidates[before][g] }) {
				out = append(out, candidate{g.groupKey, g.member, int32(len(g.pods))})
			}
		}
	}
	return out
}

// members are the pods of a group as they are now. A group that becomes empty is replaced by
// another one when it has a pod again, so it is looked up by its key.
func (t *Tracker) members(key groupKey) []*corev1.Pod {
	t.mu.Lock()
	defer t.mu.Unlock()
	g := t.groups[key]
	if g == nil {
		return nil
	}
	pods := make([]*corev1.Pod, 0, len(g.pods))
	for _, p := range g.pods {
		pods = append(pods, p.pod)
	}
	return pods
}

// WaitingDaemons returns the pods of DaemonSets that wait for a node. They must not be changed.
func (t *Tracker) WaitingDaemons(node string) []*corev1.Pod {
	t.mu.Lock()
	defer t.mu.Unlock()
	var waiting []*corev1.Pod
	for g := range t.onNode[node] {
		if g.use != daemon {
			continue
		}
		for _, p := range g.pods {
			if p.pod.Spec.NodeName == "" {
				waiting = append(waiting, p.pod)
			}
		}
	}
	return waiting
}

// PodsOn returns the pods on a virtual node that have not finished, but those of DaemonSets.
// They must not be changed.
func (t *Tracker) PodsOn(node string) []*corev1.Pod {
	t.mu.Lock()
	defer t.mu.Unlock()
	var pods []*corev1.Pod
	for g := range t.onNode[node] {
		if g.use == runs {
			for _, p := range g.pods {
				pods = append(pods, p.pod)
			}
		}
	}
	return pods
}

// source is one of requests for the pods of which a version differs from the one before,
// and at the beginning for one of each group.
func (t *Tracker) source(clock clock.PassiveClock, differ func(before, after *trackedPod) bool, requestsFor func(ctx context.Context, key groupKey, member *corev1.Pod) []reconcile.Request) source.Source {
	return source.Func(func(ctx context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
		p := &pace{clock: clock, due: map[reconcile.Request]time.Time{}}
		enqueue := func(key groupKey, member *corev1.Pod) {
			for _, request := range requestsFor(ctx, key, member) {
				queue.AddAfter(request, p.next(request))
			}
		}
		t.mu.Lock()
		existing := slices.Collect(maps.Values(t.groups))
		members := make([]*corev1.Pod, len(existing))
		for i, g := range existing {
			members[i] = g.member
		}
		t.changed = append(slices.Clone(t.changed), func(before, after *trackedPod) {
			if before != nil && after != nil && !differ(before, after) {
				return
			}
			if before != nil && (after == nil || before.key != after.key) {
				enqueue(before.key, before.pod)
			}
			if after != nil {
				enqueue(after.key, after.pod)
			}
		})
		t.mu.Unlock()
		for i, g := range existing {
			enqueue(g.groupKey, members[i])
		}
		return nil
	})
}

// onNodes is a source of requests, with the provider's name, for the pods on virtual nodes of
// which a version differs.
func (t *Tracker) onNodes(clock clock.PassiveClock, differ func(before, after *trackedPod) bool) source.Source {
	return t.source(clock, differ, func(_ context.Context, key groupKey, _ *corev1.Pod) []reconcile.Request {
		return requestFor(ProviderOf(key.node))
	})
}

// countsDifferently reports whether a version of a pod changes a sum.
func countsDifferently(before, after *trackedPod) bool {
	return before.key != after.key || !maps.EqualFunc(before.requests, after.requests, sameAmount)
}

func sameAmount(a, b resource.Quantity) bool { return a.Cmp(b) == 0 }

// EachVersionOnNodes is a source of requests, with the provider's name, for each version of
// the pods on virtual nodes.
func (r *Reconciler) EachVersionOnNodes() source.Source {
	return r.Pods.onNodes(r.Clock, func(_, _ *trackedPod) bool { return true })
}

// Candidates is a source of requests, with the name of the Reservation, for the pods that may
// use one.
func (r *Reconciler) Candidates() source.Source {
	differ := func(before, after *trackedPod) bool {
		// A new generation may have other tolerations.
		return countsDifferently(before, after) || after.key.use == waits && (after.pod.Generation == 0 || before.pod.Generation != after.pod.Generation)
	}
	return r.Pods.source(r.Clock, differ, func(ctx context.Context, key groupKey, member *corev1.Pod) []reconcile.Request {
		if key.use == daemon || key.use == ended {
			return nil
		}
		owner, ok := demand.OwnerOf(member, r.ResolveOwners(ctx))
		if !ok {
			return nil
		}
		name := demand.Key{Namespace: key.namespace, OwnerUID: owner.UID, Shape: key.shape}.Name(owner.Name)
		return []reconcile.Request{{NamespacedName: types.NamespacedName{Namespace: key.namespace, Name: name}}}
	})
}
