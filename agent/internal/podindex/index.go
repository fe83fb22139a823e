package podindex

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	quota "k8s.io/apiserver/pkg/quota/v1"
	toolscache "k8s.io/client-go/tools/cache"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// Index keeps the pods that are on virtual nodes or may overflow, in groups of those that
// count in the same way, with their sums. So the cost of an event does not grow with the
// number of pods, and that of a reconcile grows with the number of groups only. It equals an
// Index in which the same pods are set for the first time. It is safe for concurrent use.
type Index struct {
	// scheduler is that of the pods without a node that are tracked, none if it is empty.
	scheduler string
	// synced reports whether the pods that existed at the start have been set.
	synced toolscache.InformerSynced

	mu     sync.Mutex
	pods   map[types.NamespacedName]*trackedPod
	groups map[Key]*group
	// onNode are the groups by virtual node, candidates by what Reservations may serve them for.
	onNode     map[string]map[*group]bool
	candidates map[candidateKey]map[*group]bool
	// changed are called with both versions of a pod, of which one may be nil.
	changed []func(before, after *trackedPod)
}

// Use is how a pod counts.
type Use int

const (
	// Waits is a pod without a node that may get a virtual one.
	Waits Use = iota
	// Runs is a pod on a virtual node, Ended one that has finished there.
	Runs
	Ended
	// Daemon is a pod of a DaemonSet on a virtual node, or that waits for one.
	Daemon
)

// Key is what pods have in common that count in the same way.
type Key struct {
	Use Use
	// Node is the virtual node, by its name only: a node of this cluster may have such a name.
	Namespace, Node, Hold, Shape string
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
func (k Key) candidates() (keys []candidateKey) {
	switch {
	case k.Use != Waits && k.Use != Runs:
		return nil
	case k.gang != demand.Gang{}:
		keys = append(keys, candidateKey{namespace: k.Namespace, gang: k.gang.UID()})
	default:
		keys = append(keys, candidateKey{namespace: k.Namespace, shape: k.Shape})
	}
	if k.Hold != "" {
		keys = append(keys, candidateKey{namespace: k.Namespace, hold: k.Hold})
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
	key Key
	// requests are only those of a pod that runs on a virtual node.
	requests corev1.ResourceList
}

// group is the pods that have a key, at least one.
type group struct {
	Key
	// member is any of the pods: all have the same owner.
	member   *corev1.Pod
	pods     map[types.NamespacedName]*trackedPod
	requests corev1.ResourceList
}

// New returns an Index without pods. Scheduler is that which binds pods to virtual nodes, empty
// if none does: of the pods without a node, only its own may get one.
func New(scheduler string) *Index {
	return &Index{
		scheduler: scheduler, synced: func() bool { return true },
		pods: map[types.NamespacedName]*trackedPod{}, groups: map[Key]*group{},
		onNode: map[string]map[*group]bool{}, candidates: map[candidateKey]map[*group]bool{},
	}
}

// SetupWithManager makes the Index follow the manager's cache.
func (x *Index) SetupWithManager(mgr ctrl.Manager) error {
	informer, err := mgr.GetCache().GetInformer(context.Background(), &corev1.Pod{}, cache.BlockUntilSynced(false))
	if err != nil {
		return fmt.Errorf("watching pods: %w", err)
	}
	registration, err := informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { x.Set(o.(*corev1.Pod)) },
		UpdateFunc: func(_, o any) { x.Set(o.(*corev1.Pod)) },
		DeleteFunc: func(o any) {
			if gone, ok := o.(toolscache.DeletedFinalStateUnknown); ok {
				o = gone.Obj
			}
			x.Delete(client.ObjectKeyFromObject(o.(*corev1.Pod)))
		},
	})
	if err != nil {
		return fmt.Errorf("watching pods: %w", err)
	}
	x.synced = registration.HasSynced
	return nil
}

// WaitSynced waits until the Index has every pod that existed when it was started.
func (x *Index) WaitSynced(ctx context.Context) error {
	if !x.synced() && !toolscache.WaitForCacheSync(ctx.Done(), x.synced) {
		return fmt.Errorf("waiting for the pods: %w", context.Cause(ctx))
	}
	return nil
}

// Set adds a pod, or replaces it. The Index keeps it: it must not be changed.
func (x *Index) Set(pod *corev1.Pod) {
	name := client.ObjectKeyFromObject(pod)
	x.mu.Lock()
	before := x.pods[name]
	after := x.track(pod, before)
	x.remove(name, before)
	x.add(name, after)
	changed := x.changed
	x.mu.Unlock()
	notify(changed, before, after)
}

// Delete removes a pod.
func (x *Index) Delete(name types.NamespacedName) {
	x.mu.Lock()
	before := x.pods[name]
	x.remove(name, before)
	changed := x.changed
	x.mu.Unlock()
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
func (x *Index) track(pod *corev1.Pod, before *trackedPod) *trackedPod {
	p := &trackedPod{pod: pod, key: Key{Namespace: pod.Namespace, Node: pod.Spec.NodeName, Hold: pod.Labels[broker.LabelHold]}}
	switch virtual := ProviderOf(pod.Spec.NodeName) != ""; {
	case pod.Spec.NodeName != "" && !virtual:
		return nil
	case runsOnEveryNode(pod):
		if p.key = (Key{Use: Daemon, Namespace: pod.Namespace, Node: nodeOfDaemonPod(pod)}); ProviderOf(p.key.Node) == "" {
			return nil
		}
		return p
	case inventory.Finished(pod) && virtual:
		p.key = Key{Use: Ended, Namespace: pod.Namespace, Node: pod.Spec.NodeName}
		return p
	case virtual:
		p.key.Use, p.requests = Runs, inventory.Requests(pod)
	case !x.mayOverflow(pod):
		return nil
	}
	if gang, ok := demand.GangOf(pod); ok {
		p.key.gang = gang
	} else if owner := metav1.GetControllerOfNoCopy(pod); owner != nil {
		p.key.controller = ownerRef{owner.APIVersion, owner.Kind, owner.Name, owner.UID}
	}
	if before != nil && before.key.Shape != "" && sameShape(before.pod, pod) {
		p.key.Shape = before.key.Shape
	} else {
		p.key.Shape, _ = demand.ShapeOf(pod)
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
func (x *Index) mayOverflow(pod *corev1.Pod) bool {
	if cmp.Or(pod.Spec.SchedulerName, corev1.DefaultSchedulerName) != x.scheduler {
		return false
	}
	ok, _ := demand.Admissible(pod)
	return ok
}

func (x *Index) add(name types.NamespacedName, p *trackedPod) {
	if p == nil {
		return
	}
	x.pods[name] = p
	g := x.groups[p.key]
	if g == nil {
		g = &group{Key: p.key, pods: map[types.NamespacedName]*trackedPod{}, requests: corev1.ResourceList{}}
		x.groups[p.key] = g
		insert(x.onNode, p.key.Node, g)
		for _, key := range p.key.candidates() {
			insert(x.candidates, key, g)
		}
	}
	for _, other := range g.pods {
		if quota.Equals(p.requests, other.requests) {
			p.requests = other.requests // one list for pods that are alike
		}
		break
	}
	g.pods[name], g.member = p, p.pod
	broker.AddTo(g.requests, p.requests)
}

func (x *Index) remove(name types.NamespacedName, p *trackedPod) {
	if p == nil {
		return
	}
	delete(x.pods, name)
	g := x.groups[p.key]
	if delete(g.pods, name); len(g.pods) == 0 {
		delete(x.groups, p.key)
		drop(x.onNode, p.key.Node, g)
		for _, key := range p.key.candidates() {
			drop(x.candidates, key, g)
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

// Group is the pods that have a key, as they were at one time.
type Group struct {
	Key
	// Member is any of the pods: all have the same owner. It must not be changed.
	Member   *corev1.Pod
	Count    int32
	Requests corev1.ResourceList
	// Waiting are all of the pods if they wait. They must not be changed.
	Waiting []*corev1.Pod
}

// OnNode returns the groups on a virtual node.
func (x *Index) OnNode(node string) []Group {
	x.mu.Lock()
	defer x.mu.Unlock()
	out := make([]Group, 0, len(x.onNode[node]))
	for g := range x.onNode[node] {
		requests := make(corev1.ResourceList, len(g.requests))
		for resource, amount := range g.requests {
			requests[resource] = amount.DeepCopy()
		}
		out = append(out, Group{Key: g.Key, Member: g.member, Count: int32(len(g.pods)), Requests: requests})
	}
	return out
}

// candidatesWith returns the groups that have one of some keys, without what they request.
func (x *Index) candidatesWith(keys ...candidateKey) (out []Group) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for i, key := range keys {
		out = slices.Grow(out, len(x.candidates[key]))
		for g := range x.candidates[key] {
			if !slices.ContainsFunc(keys[:i], func(before candidateKey) bool { return x.candidates[before][g] }) {
				found := Group{Key: g.Key, Member: g.member, Count: int32(len(g.pods))}
				if g.Use == Waits {
					found.Waiting = g.list()
				}
				out = append(out, found)
			}
		}
	}
	return out
}

// Members returns the pods of a group as they are now. A group that becomes empty is replaced by
// another one when it has a pod again, so it is looked up by its key.
func (x *Index) Members(key Key) []*corev1.Pod {
	x.mu.Lock()
	defer x.mu.Unlock()
	g := x.groups[key]
	if g == nil {
		return nil
	}
	return g.list()
}

func (g *group) list() []*corev1.Pod {
	pods := make([]*corev1.Pod, 0, len(g.pods))
	for _, p := range g.pods {
		pods = append(pods, p.pod)
	}
	return pods
}

// WaitingDaemons returns the pods of DaemonSets that wait for a node. They must not be changed.
func (x *Index) WaitingDaemons(node string) []*corev1.Pod {
	return slices.DeleteFunc(x.podsOn(node, Daemon), func(pod *corev1.Pod) bool { return pod.Spec.NodeName != "" })
}

// PodsOn returns the pods on a virtual node that have not finished, but those of DaemonSets.
// They must not be changed.
func (x *Index) PodsOn(node string) []*corev1.Pod { return x.podsOn(node, Runs) }

func (x *Index) podsOn(node string, use Use) (pods []*corev1.Pod) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for g := range x.onNode[node] {
		if g.Use != use {
			continue
		}
		for _, p := range g.pods {
			pods = append(pods, p.pod)
		}
	}
	return pods
}

// ProviderOf is the provider whose capacity a node provides, by the node's name; empty
// for a node of this cluster. A node of this cluster may have such a name: see virtualnode.IsVirtual.
func ProviderOf(nodeName string) string {
	if provider, ok := strings.CutPrefix(nodeName, broker.VirtualNodePrefix); ok {
		return provider
	}
	return ""
}

// runsOnEveryNode reports whether a pod comes with each node, as those of
// DaemonSets do, and uses no grant.
func runsOnEveryNode(pod *corev1.Pod) bool {
	if _, mirror := pod.Annotations[corev1.MirrorPodAnnotationKey]; mirror {
		return true
	}
	owner := metav1.GetControllerOfNoCopy(pod)
	return owner != nil && (owner.Kind == "DaemonSet" || owner.Kind == "Node")
}

// nodeOfDaemonPod is the node that a pod of a DaemonSet is on or, while it waits, is for.
func nodeOfDaemonPod(pod *corev1.Pod) string {
	affinity := pod.Spec.Affinity
	if pod.Spec.NodeName != "" || affinity == nil || affinity.NodeAffinity == nil || affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return pod.Spec.NodeName
	}
	for _, term := range affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
		for _, field := range term.MatchFields {
			if field.Key == metav1.ObjectNameField && len(field.Values) > 0 {
				return field.Values[0]
			}
		}
	}
	return ""
}
