package overflow

import (
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	framework "k8s.io/kube-scheduler/framework"
	podutil "k8s.io/kubernetes/pkg/api/v1/pod"

	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

const (
	errGangWaits   = "waiting for places for %d pods of PodGroup %s"
	errGangRefused = "only %d of the %d pods of PodGroup %s have places"
	errGangEnded   = "another pod of PodGroup %s has lost its place"
	errGangUnknown = "PodGroups are not synced"
)

// gangIndex indexes the pods of gangs by namespace and name of the gang.
const gangIndex = "spillway-gang"

// podGroups is the resource of the coscheduling plugins.
var podGroups = schema.GroupVersionResource{Group: "scheduling.x-k8s.io", Version: "v1alpha1", Resource: "podgroups"}

// gangs are the groups of pods of which none is bound before all have places. A pod whose
// PodGroup does not exist is an ordinary pod.
type gangs struct {
	groups cache.SharedIndexInformer
	pods   cache.Indexer

	mu sync.Mutex
	// absent: the API server has no PodGroups. held pods wait until that, or their
	// PodGroup, is known.
	absent bool
	held   map[types.UID]*corev1.Pod
}

func newGangs(log klog.Logger, config *rest.Config, pods cache.SharedIndexInformer) (*gangs, error) {
	client, err := dynamic.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("creating a client for PodGroups: %w", err)
	}
	// The profiles of a scheduler share the informer.
	if _, indexed := pods.GetIndexer().GetIndexers()[gangIndex]; !indexed {
		if err := pods.AddIndexers(cache.Indexers{gangIndex: indexByGang}); err != nil {
			return nil, fmt.Errorf("indexing the pods of gangs: %w", err)
		}
	}
	g := &gangs{pods: pods.GetIndexer(), held: map[types.UID]*corev1.Pod{}}
	g.groups = dynamicinformer.NewFilteredDynamicInformer(client, podGroups, metav1.NamespaceAll, 0, cache.Indexers{}, nil).Informer()
	failed := logWatchErrors(log, podGroups.Resource, "The PodGroups of the coscheduling plugins are not installed")
	err = g.groups.SetWatchErrorHandlerWithContext(func(ctx context.Context, r *cache.Reflector, err error) {
		if isMissing(err) {
			g.mu.Lock()
			g.absent = true
			g.mu.Unlock()
		}
		failed(ctx, r, err)
	})
	if err != nil {
		return nil, fmt.Errorf("watching PodGroups: %w", err)
	}
	return g, nil
}

func indexByGang(obj any) ([]string, error) {
	if pod, ok := obj.(*corev1.Pod); ok && demand.GangOf(pod) != "" {
		return []string{pod.Namespace + "/" + demand.GangOf(pod)}, nil
	}
	return nil, nil
}

// run watches PodGroups until ctx ends, and activates the pods that were held because
// they were not known yet.
func (g *gangs) run(ctx context.Context, activate func(map[string]*corev1.Pod)) {
	go g.groups.RunWithContext(ctx)
	ticker := time.NewTicker(100 * time.Millisecond)
	defer ticker.Stop()
	for !g.known() {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	pods := map[string]*corev1.Pod{}
	for _, pod := range g.held {
		pods[nameOf(pod).String()] = pod
	}
	g.held = nil
	if len(pods) > 0 {
		activate(pods)
	}
}

// known reports whether the PodGroups are known, or that there are none.
func (g *gangs) known() bool {
	if g.groups.HasSynced() {
		return true
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.absent
}

// hold keeps a pod for run, and reports whether its PodGroup is not known yet.
func (g *gangs) hold(pod *corev1.Pod) bool {
	if g == nil || demand.GangOf(pod) == "" || g.known() {
		return false
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.held == nil {
		return false
	}
	g.held[pod.UID] = pod
	return true
}

// group returns the PodGroup of a name, or nil.
func (g *gangs) group(namespace, name string) *unstructured.Unstructured {
	if g == nil {
		return nil
	}
	obj, exists, err := g.groups.GetIndexer().GetByKey(namespace + "/" + name)
	if err != nil || !exists {
		return nil
	}
	group, _ := obj.(*unstructured.Unstructured)
	return group
}

// minMembers returns how many pods of a gang must have places; 0 if its PodGroup does not
// exist, or requires one.
func (g *gangs) minMembers(namespace, name string) int32 {
	if name == "" {
		return 0
	}
	group := g.group(namespace, name)
	if group == nil {
		return 0
	}
	n, found, err := unstructured.NestedInt64(group.Object, "spec", "minMember")
	if err != nil || !found || n < 2 {
		return 0
	}
	return int32(min(n, maxPriority))
}

// members returns the pods of a gang that have neither ended nor are terminating.
func (g *gangs) members(namespace, name string) []*corev1.Pod {
	objs, err := g.pods.ByIndex(gangIndex, namespace+"/"+name)
	if err != nil {
		return nil // the index exists
	}
	var pods []*corev1.Pod
	for _, obj := range objs {
		if pod, ok := obj.(*corev1.Pod); ok && pod.DeletionTimestamp == nil && !podutil.IsPodTerminal(pod) {
			pods = append(pods, pod)
		}
	}
	return pods
}

// Permit lets a pod of a gang wait until as many pods as its PodGroup requires have
// places. Then all of them are bound.
func (p *Plugin) Permit(_ context.Context, _ framework.CycleState, pod *corev1.Pod, _ string) (*framework.Status, time.Duration) {
	gang := demand.GangOf(pod)
	required := p.gangs.minMembers(pod.Namespace, gang)
	if required == 0 {
		return nil, 0
	}
	var placed, possible int32
	others := map[string]*corev1.Pod{}
	for _, member := range p.gangs.members(pod.Namespace, gang) {
		switch {
		case p.placements.has(member.UID):
			placed++
		case p.gate.passes(member):
			possible++
			others[nameOf(member).String()] = member
		}
	}
	key, resolved := p.keys.keyOf(pod)
	switch {
	case placed >= required:
		p.forWaiting(pod, func(w framework.WaitingPod) { w.Allow(Name) })
		return nil, 0
	case placed+possible < required && resolved && p.settled(key):
		return framework.NewStatus(framework.UnschedulableAndUnresolvable, fmt.Sprintf(errGangRefused, placed, required, gang)), 0
	}
	p.handle.Activate(klog.Background(), others)
	return framework.NewStatus(framework.Wait, fmt.Sprintf(errGangWaits, required, gang)), p.args.GangTimeout.Duration
}

// unreserveGang frees the places of the other pods of a gang when one has lost its place,
// and makes sure that all are tried again.
func (p *Plugin) unreserveGang(pod *corev1.Pod) {
	gang := demand.GangOf(pod)
	if p.gangs.minMembers(pod.Namespace, gang) == 0 {
		return
	}
	if key, ok := p.keys.keyOf(pod); ok {
		p.queue.track(pod.UID)
		p.gate.retry(pod, key)
	}
	p.forWaiting(pod, func(w framework.WaitingPod) { w.Reject(Name, fmt.Sprintf(errGangEnded, gang)) })
}

// forWaiting calls f for the other pods of a pod's gang that wait in Permit.
func (p *Plugin) forWaiting(pod *corev1.Pod, f func(framework.WaitingPod)) {
	p.handle.IterateOverWaitingPods(func(w framework.WaitingPod) {
		if other := w.GetPod(); other.UID != pod.UID && other.Namespace == pod.Namespace && demand.GangOf(other) == demand.GangOf(pod) {
			f(w)
		}
	})
}

// refuseGang frees the places of a gang when one of its pods has none and gets none in
// other clusters.
func (p *Plugin) refuseGang(pod *corev1.Pod) {
	gang := demand.GangOf(pod)
	if p.gangs.minMembers(pod.Namespace, gang) == 0 {
		return
	}
	if key, ok := p.keys.keyOf(pod); ok && p.settled(key) {
		p.forWaiting(pod, func(w framework.WaitingPod) { w.Reject(Name, fmt.Sprintf(errGangEnded, gang)) })
	}
}

// retry makes sure that a pod that had a place and lost it is woken as those that wait, but
// for some time not for room at home, which may then be another pod's.
func (g *gate) retry(pod *corev1.Pod, key demand.Key) {
	g.track(pod, key)
	g.mu.Lock()
	defer g.mu.Unlock()
	if w := g.pods[pod.UID]; w != nil && w.open {
		now := g.clock.Now()
		w.tracked, w.triedAt, w.retryAt, w.lostUntil = true, now, now.Add(minRetry), now.Add(minRetry)
	}
}

// gangCounter counts the pods of a gang's key that need capacity beside the pending ones.
// A gang is requested as a whole: its pods that have found a node of this cluster do not
// keep it if the others find none.
func (c *demandController) gangCounter(key demand.Key, name string) (n int32) {
	for _, pod := range c.gangs.members(key.Namespace, name) {
		if k, ok := c.keys.keyOf(pod); !ok || k != key || c.pending.has(pod.UID) || pod.Spec.NodeName != "" && !c.placements.isVirtual(pod.Spec.NodeName) {
			continue
		}
		if ok, _ := demand.Admissible(pod); ok || pod.Spec.NodeName != "" {
			n++
		}
	}
	return n
}

// minAvailable returns how many pods of a request are of use: as many as the gang requires
// beside those that are bound in this cluster.
func (c *demandController) minAvailable(request demand.Request) int32 {
	if !request.Key.IsGang() {
		return 0
	}
	name := request.Owner.Name
	required := c.gangs.minMembers(request.Key.Namespace, name)
	if required == 0 {
		return 0
	}
	for _, pod := range c.gangs.members(request.Key.Namespace, name) {
		if pod.Spec.NodeName != "" && !c.placements.isVirtual(pod.Spec.NodeName) {
			required--
		}
	}
	return max(0, min(required, request.PodSet.Count))
}
