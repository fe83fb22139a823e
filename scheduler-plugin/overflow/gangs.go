package overflow

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	framework "k8s.io/kube-scheduler/framework"
	podutil "k8s.io/kubernetes/pkg/api/v1/pod"
	"k8s.io/utils/clock"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/compatibility"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/usage"
	"github.com/spillway-dev/spillway/scheduler-plugin/waiting"
)

const (
	errGangWaits   = "waiting for places for %d pods of %s"
	errGangRefused = "only %d of the %d pods of %s have places"
	errGangEnded   = "another pod of %s has lost its place"
	errGangUnknown = "waiting for %s to be created"
	errGangAbsent  = "waiting for %s, and the API server serves no such groups to the scheduler: enable API group %s, or create the pod without a group"
)

// gangIndex indexes the pods of gangs by namespace and the OwnerUID of their keys.
const gangIndex = "spillway-gang"

// workloadsUntil is the last minor of Kubernetes whose pods have a workloadRef.
const workloadsUntil compatibility.Minor = 35

// gangResources returns the resources that describe gangs by their API group: those of the
// coscheduling plugins, and of an API server of a minor of Kubernetes with feature
// GenericWorkload.
func gangResources(minor compatibility.Minor) map[string]schema.GroupVersionResource {
	native := schema.GroupVersionResource{Group: demand.KubernetesGangs, Version: "v1beta1", Resource: "podgroups"}
	switch minor {
	case workloadsUntil:
		native.Version, native.Resource = "v1alpha1", "workloads"
	case 36:
		native.Version = "v1alpha2"
	}
	return map[string]schema.GroupVersionResource{
		demand.CoschedulingGangs: {Group: demand.CoschedulingGangs, Version: "v1alpha1", Resource: "podgroups"},
		demand.KubernetesGangs:   native,
	}
}

// gangs are the groups of pods of which none is bound before all have places. A pod whose
// PodGroup or Workload does not exist waits for it; where no PodGroups of the coscheduling
// plugins are served, the label that names one means nothing.
type gangs struct {
	// informers by API group.
	informers map[string]*gangInformer
	minor     compatibility.Minor
	pods      cache.Indexer
	clock     clock.PassiveClock
	// refusePodResources is that of OverflowArgs.
	refusePodResources bool

	mu sync.Mutex
	// held pods wait until it is known what describes their gang.
	held map[types.UID]heldPod
	// permits are the pods that wait in Permit, or have waited there and are not bound yet.
	permits map[types.UID]*permit
}

// permitMargin is how long before the end of its time in Permit a pod is no longer allowed to be
// bound: the scheduler ends it by a timer of its own.
const permitMargin = 50 * time.Millisecond

// permit is how a pod waits in Permit: until the time, or until it is allowed to be bound, or
// rejected. What comes first is final; a rejected pod has its place until Unreserve.
type permit struct {
	until             time.Time
	allowed, rejected bool
}

type heldPod struct {
	pod *corev1.Pod
	// released: it is to be tried again, however long that takes.
	released bool
	// unserved: it has said that the API server serves nothing that describes its gang.
	unserved bool
}

func newGangs(log klog.Logger, clock clock.PassiveClock, config *rest.Config, minor compatibility.Minor, pods cache.SharedIndexInformer) (*gangs, error) {
	client, err := dynamic.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("creating a client for PodGroups and Workloads: %w", err)
	}
	// The profiles of a scheduler share the informer.
	if _, indexed := pods.GetIndexer().GetIndexers()[gangIndex]; !indexed {
		if err := pods.AddIndexers(cache.Indexers{gangIndex: indexByGang}); err != nil {
			return nil, fmt.Errorf("indexing the pods of gangs: %w", err)
		}
	}
	g := &gangs{informers: map[string]*gangInformer{}, minor: minor, pods: pods.GetIndexer(), clock: clock, held: map[types.UID]heldPod{}, permits: map[types.UID]*permit{}}
	for group, resource := range gangResources(minor) {
		if g.informers[group], err = newGangInformer(log, client, resource); err != nil {
			return nil, err
		}
	}
	return g, nil
}

func indexByGang(obj any) ([]string, error) {
	if pod, ok := obj.(*corev1.Pod); ok {
		if gang, ok := demand.GangOf(pod); ok {
			return []string{pod.Namespace + "/" + string(gang.UID())}, nil
		}
	}
	return nil, nil
}

// run watches PodGroups and Workloads until ctx ends, and activates the pods that were held
// because they were not known yet. changed is called with the key of the Reservation of a
// gang whose PodGroup has changed: that may require another number of pods. What a Workload
// requires does not change.
func (g *gangs) run(ctx context.Context, activate func(map[string]*corev1.Pod), changed func(demand.Key)) {
	release := func() { g.release(activate) }
	report := func(obj any) {
		if group, ok := objectOf[*unstructured.Unstructured](obj); ok && group.GetKind() == "PodGroup" {
			gang := demand.Gang{API: group.GroupVersionKind().Group, PodGroup: group.GetName()}
			changed(demand.Key{Namespace: group.GetNamespace(), OwnerUID: gang.UID(), Shape: demand.GangShape})
		}
	}
	var running sync.WaitGroup
	for _, informer := range g.informers {
		running.Go(func() {
			informer.run(ctx, cache.ResourceEventHandlerFuncs{
				AddFunc: func(obj any) {
					if informer.HasSynced() { // otherwise it is called for all of them later
						release()
					}
					report(obj)
				},
				UpdateFunc: func(before, after any) {
					if !equality.Semantic.DeepEqual(specOf(before), specOf(after)) {
						report(after)
					}
				},
				DeleteFunc: report,
			}, release)
		})
	}
	running.Wait()
}

// release activates the held pods whose gang is known by now. It holds no lock then: the
// scheduling queue has its own when it asks hold.
func (g *gangs) release(activate func(map[string]*corev1.Pod)) {
	if pods := g.released(); len(pods) > 0 {
		activate(pods)
	}
}

func (g *gangs) released() map[string]*corev1.Pod {
	g.mu.Lock()
	defer g.mu.Unlock()
	pods := map[string]*corev1.Pod{}
	for uid, held := range g.held {
		if held.released {
			continue
		}
		gang, _ := demand.GangOf(held.pod)
		held.released = !g.waits(held.pod, gang)
		unserved := g.unserved(gang)
		if held.released || held.unserved != unserved { // the latter are to say what they wait for
			pods[waiting.NameOf(held.pod).String()] = held.pod
			held.unserved = unserved
			g.held[uid] = held
		}
	}
	return pods
}

// specOf returns the spec of an object.
func specOf(obj any) any {
	if object, ok := objectOf[*unstructured.Unstructured](obj); ok {
		return object.Object["spec"]
	}
	return nil
}

// waits reports whether it is not known yet what the gang of a pod requires.
func (g *gangs) waits(pod *corev1.Pod, gang demand.Gang) bool {
	if gang.Workload != "" && g.minor != workloadsUntil {
		return false // the API server has dropped the pod's workloadRef
	}
	if informer := g.informerOf(gang); !informer.served() {
		// An API server that is being upgraded does not serve the version that is watched.
		return !informer.absent() || gang.API == demand.KubernetesGangs
	}
	_, exists := policyOf(g.group(pod.Namespace, gang), gang)
	return !exists
}

// unserved reports whether a gang is one of Kubernetes itself, and the API server serves nothing
// that describes it.
func (g *gangs) unserved(gang demand.Gang) bool {
	return gang.API == demand.KubernetesGangs && g.informerOf(gang).absent()
}

// informerOf returns the informer of what describes a gang.
func (g *gangs) informerOf(gang demand.Gang) *gangInformer { return g.informers[gang.API] }

// hold keeps a pod until its gang is known, and reports what it waits for; "" if nothing.
func (g *gangs) hold(pod *corev1.Pod) (waitsFor string) {
	gang, ok := demand.GangOf(pod)
	if g == nil || !ok {
		return ""
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	held := heldPod{pod: pod, released: !g.waits(pod, gang), unserved: g.unserved(gang)}
	switch {
	case held.released && g.informerOf(gang).served():
		delete(g.held, pod.UID)
	case g.exists(pod):
		g.held[pod.UID] = held // until it is forgotten, at the latest
	}
	if held.released {
		return ""
	}
	if held.unserved {
		return fmt.Sprintf(errGangAbsent, gang, gang.API)
	}
	return fmt.Sprintf(errGangUnknown, gang)
}

// forget drops a pod that is no longer pending.
func (g *gangs) forget(pod types.UID) {
	if g == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.held, pod)
	delete(g.permits, pod)
}

// await notes that a pod is about to wait in Permit.
func (g *gangs) await(pod types.UID, atMost time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.permits[pod] = &permit{until: g.clock.Now().Add(atMost - permitMargin)}
}

// left notes that a pod no longer waits in Permit, and has lost its place.
func (g *gangs) left(pod types.UID) {
	if g == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.permits, pod)
}

// leaves reports whether a pod that waits in Permit is about to lose its place.
func (g *gangs) leaves(pod types.UID) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	w := g.permits[pod]
	return w != nil && !w.allowed && (w.rejected || !g.clock.Now().Before(w.until))
}

// allow allows pods with places to be bound, unless one of them is about to lose its place.
func (g *gangs) allow(pods []*corev1.Pod) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, pod := range pods {
		if w := g.permits[pod.UID]; w != nil && w.rejected {
			return false
		}
	}
	for _, pod := range pods {
		if w := g.permits[pod.UID]; w != nil {
			w.allowed = true
		}
	}
	return true
}

// reject reports whether a pod that waits in Permit is to be rejected: it was not allowed before,
// nor rejected, and the scheduler's timer does not reject it by itself. Kubernetes 1.37 has a
// data race between two rejections of a pod.
func (g *gangs) reject(pod types.UID) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	w := g.permits[pod]
	if w == nil { // it is being deleted
		return true
	}
	leaves := w.rejected || !g.clock.Now().Before(w.until)
	w.rejected = !w.allowed
	return w.rejected && !leaves
}

// admissible is demand.Admissible, but for pods with pod-level resources where guests have none.
func (g *gangs) admissible(pod *corev1.Pod) (ok bool, reason string) {
	ok, reason = demand.Admissible(pod)
	if ok && g != nil && g.refusePodResources {
		reason = demand.PodResources(pod)
		ok = reason == ""
	}
	return ok, reason
}

// group returns the object that describes a gang, or nil.
func (g *gangs) group(namespace string, gang demand.Gang) *unstructured.Unstructured {
	if g == nil {
		return nil
	}
	return g.get(gang.API, namespace, cmp.Or(gang.Workload, gang.PodGroup))
}

// described returns the object that the owner of a gang's key refers to, or nil.
func (g *gangs) described(namespace string, owner metav1.OwnerReference) *unstructured.Unstructured {
	api, _, _ := strings.Cut(owner.APIVersion, "/")
	return g.get(api, namespace, owner.Name)
}

func (g *gangs) get(api, namespace, name string) *unstructured.Unstructured {
	obj, exists, err := g.informers[api].GetIndexer().GetByKey(namespace + "/" + name)
	if err != nil || !exists {
		return nil
	}
	group, _ := obj.(*unstructured.Unstructured)
	return group
}

// policyOf returns how many pods of a gang the object that describes it requires, 0 if any
// number is of use; exists is false if it does not describe the gang.
func policyOf(group *unstructured.Unstructured, gang demand.Gang) (required int64, exists bool) {
	if group == nil {
		return 0, false
	}
	switch {
	case gang.API == demand.CoschedulingGangs:
		required, _, _ = unstructured.NestedInt64(group.Object, "spec", "minMember")
		return required, true
	case gang.Workload == "":
		required, _, _ = unstructured.NestedInt64(group.Object, "spec", "schedulingPolicy", "gang", "minCount")
		return required, true
	}
	groups, _, _ := unstructured.NestedSlice(group.Object, "spec", "podGroups")
	for _, of := range groups {
		if of, ok := of.(map[string]any); ok && of["name"] == gang.PodGroup {
			required, _, _ = unstructured.NestedInt64(of, "policy", "gang", "minCount")
			return required, true
		}
	}
	return 0, false
}

// minMembers returns how many pods of a gang must have places; 0 if what describes it does
// not exist, or requires one.
func (g *gangs) minMembers(namespace string, gang demand.Gang) int32 {
	n, _ := policyOf(g.group(namespace, gang), gang)
	if n < 2 {
		return 0
	}
	return int32(min(n, maxPriority))
}

// gangOf returns a pod's gang, and how many of its pods must have places; 0 if the pod may
// be bound alone.
func (g *gangs) gangOf(pod *corev1.Pod) (gang demand.Gang, required int32) {
	gang, ok := demand.GangOf(pod)
	if !ok {
		return gang, 0
	}
	return gang, g.minMembers(pod.Namespace, gang)
}

// members returns the pods of a gang that have neither ended nor are terminating, and that
// can be scheduled: a gang cannot count on one with scheduling gates.
func (g *gangs) members(namespace string, gang types.UID) []*corev1.Pod {
	objs, err := g.pods.ByIndex(gangIndex, namespace+"/"+string(gang))
	if err != nil {
		return nil // the index exists
	}
	var pods []*corev1.Pod
	for _, obj := range objs {
		if pod, ok := obj.(*corev1.Pod); ok && pod.DeletionTimestamp == nil && !podutil.IsPodTerminal(pod) && len(pod.Spec.SchedulingGates) == 0 {
			pods = append(pods, pod)
		}
	}
	return pods
}

// Permit lets a pod of a gang wait until as many pods as the gang requires have places. Then all of them are bound.
func (p *Plugin) Permit(_ context.Context, _ framework.CycleState, pod *corev1.Pod, _ string) (*framework.Status, time.Duration) {
	if waitsFor := p.gangs.hold(pod); waitsFor != "" {
		return framework.NewStatus(framework.UnschedulableAndUnresolvable, waitsFor), 0
	}
	gang, required := p.gangs.gangOf(pod)
	if required == 0 {
		return nil, 0
	}
	var placed, possible int32
	var unbound []*corev1.Pod // with a place
	others := map[string]*corev1.Pod{}
	for _, member := range p.gangs.members(pod.Namespace, gang.UID()) {
		switch {
		case p.gangs.leaves(member.UID): // it is tried again
		case p.placements.Has(member.UID):
			placed++
			if member.Spec.NodeName == "" {
				unbound = append(unbound, member)
			}
		case p.gate.Passes(member):
			possible++
			others[waiting.NameOf(member).String()] = member
		}
	}
	key, resolved := p.keys.KeyOf(pod)
	switch {
	case placed >= required && !p.allStillGranted(unbound):
		return framework.NewStatus(framework.Unschedulable, fmt.Sprintf(errGangEnded, gang)), 0
	case placed >= required && p.gangs.allow(unbound):
		p.forWaiting(pod, func(w framework.WaitingPod) { w.Allow(Name) })
		return nil, 0
	case placed+possible < required && resolved && p.settled(key):
		return framework.NewStatus(framework.UnschedulableAndUnresolvable, fmt.Sprintf(errGangRefused, placed, required, gang)), 0
	}
	p.gangs.await(pod.UID, p.args.GangTimeout.Duration)
	p.handle.Activate(klog.Background(), others)
	return framework.NewStatus(framework.Wait, fmt.Sprintf(errGangWaits, required, gang)), p.args.GangTimeout.Duration
}

func (p *Plugin) allStillGranted(pods []*corev1.Pod) bool {
	return !slices.ContainsFunc(pods, func(pod *corev1.Pod) bool { return !p.stillGranted(pod) })
}

// unreserveGang frees the places of the other pods of a gang when one has lost its place,
// at a time, and makes sure that all are tried again.
func (p *Plugin) unreserveGang(pod *corev1.Pod, at time.Time) {
	p.gangs.left(pod.UID)
	gang, required := p.gangs.gangOf(pod)
	if required == 0 {
		return
	}
	if key, ok := p.keys.KeyOf(pod); ok {
		p.queue.Track(pod.UID)
		if now := p.gangs.current(pod); now != nil {
			pod = now // not the one that the scheduler has assumed on a node
		}
		p.gate.Retry(pod, key, at)
		if !p.gangs.pending(pod) {
			// Its deletion was reported before: it would be woken for the places of others.
			p.gate.Drop(pod.UID)
			p.queue.Untrack(pod.UID)
		}
	}
	p.rejectOthers(pod, gang)
}

// rejectOthers frees the places of the other pods of a gang that wait in Permit.
func (p *Plugin) rejectOthers(pod *corev1.Pod, gang demand.Gang) {
	p.forWaiting(pod, func(w framework.WaitingPod) {
		if p.gangs.reject(w.GetPod().UID) {
			w.Reject(Name, fmt.Sprintf(errGangEnded, gang))
		}
	})
}

// forWaiting calls f for the other pods of a pod's gang that wait in Permit.
func (p *Plugin) forWaiting(pod *corev1.Pod, f func(framework.WaitingPod)) {
	gang, _ := demand.GangOf(pod)
	p.handle.IterateOverWaitingPods(func(w framework.WaitingPod) {
		if other := w.GetPod(); other.UID != pod.UID && other.Namespace == pod.Namespace {
			if of, ok := demand.GangOf(other); ok && of == gang {
				f(w)
			}
		}
	})
}

// refuseGang frees the places of a gang when one of its pods has none and gets none in
// other clusters.
func (p *Plugin) refuseGang(pod *corev1.Pod) {
	gang, required := p.gangs.gangOf(pod)
	if required == 0 {
		return
	}
	if key, ok := p.keys.KeyOf(pod); ok && p.settled(key) {
		p.rejectOthers(pod, gang)
	}
}

// gangSets returns the pods of a gang that need capacity, by shape; none while there are
// fewer pods than the gang requires. It is requested as a whole: its pods that have found
// a node of this cluster do not keep it if the others find none.
func (c *demandController) gangSets(key demand.Key) []broker.PodSet {
	members, required := c.gangs.membersOf(key)
	if int32(len(members)) < required {
		return nil
	}
	sets := map[string]broker.PodSet{}
	for _, pod := range members {
		if pod.Spec.NodeName != "" && !c.placements.IsVirtual(pod.Spec.NodeName) {
			continue
		}
		ok, _ := c.gangs.admissible(pod)
		of, known := c.keys.Get(pod)
		if !known || !ok && pod.Spec.NodeName == "" {
			continue
		}
		set, counted := sets[of.Key.Shape]
		if !counted {
			set = of.Set
		}
		set.Count++
		sets[of.Key.Shape] = set
	}
	return slices.SortedFunc(maps.Values(sets), func(a, b broker.PodSet) int { return cmp.Compare(a.Name, b.Name) })
}

// completeGang adds to the request of a gang what its Reservation, nil if there is none,
// requests for pods of other shapes: that stays, and counts for a policy. If nothing can be
// requested now, it records why, and returns when to requeue the request.
func (c *demandController) completeGang(request demand.Request, current *broker.Reservation) (complete demand.Request, requeueAfter time.Duration) {
	if !request.Key.IsGang() {
		return request, 0
	}
	shapes := len(request.PodSets)
	if current != nil {
		if c.isOutdated(current, request) {
			c.recordAll(request, outdated(current, request))
			return request, retryAfter
		}
		request.PodSets = raised(current.Spec.PodSets, request.PodSets)
	}
	if len(request.PodSets) > maxShapes {
		c.setUnasked(request.Key, true)
		c.recordAll(request, tooManyShapes(request, shapes, current))
		return request, blockedRetryAfter
	}
	return request, 0
}

// isOutdated reports whether a gang's Reservation was made for pods that have come back with
// other requests: it lacks a shape, and requests another that no pod has any more. Then the
// agent deletes it, and capacity is requested for the pods as they are now. While pods run
// with its capacity, further shapes are added to it instead.
func (c *demandController) isOutdated(r *broker.Reservation, request demand.Request) bool {
	lacks := func(sets, others []broker.PodSet) bool {
		return slices.ContainsFunc(others, func(set broker.PodSet) bool { return usage.PodsOf(sets, set.Name) == 0 })
	}
	if !lacks(r.Spec.PodSets, request.PodSets) || !lacks(request.PodSets, r.Spec.PodSets) {
		return false
	}
	members, _ := c.gangs.membersOf(request.Key)
	return !slices.ContainsFunc(members, func(pod *corev1.Pod) bool {
		return pod.Spec.NodeName != "" && c.placements.IsVirtual(pod.Spec.NodeName)
	})
}

// pending reports whether a pod of a gang exists, and has no node.
func (g *gangs) pending(pod *corev1.Pod) bool {
	current := g.current(pod)
	return current != nil && current.DeletionTimestamp == nil && current.Spec.NodeName == ""
}

// exists reports whether a pod was not deleted yet.
func (g *gangs) exists(pod *corev1.Pod) bool { return g.current(pod) != nil }

// current returns a pod as its informer shows it, or nil.
func (g *gangs) current(pod *corev1.Pod) *corev1.Pod {
	obj, exists, err := g.pods.GetByKey(pod.Namespace + "/" + pod.Name)
	current, ok := obj.(*corev1.Pod)
	if err != nil || !exists || !ok || current.UID != pod.UID {
		return nil
	}
	return current
}

// membersOf returns the members of the gang of a key, and how many must have places.
func (g *gangs) membersOf(key demand.Key) (members []*corev1.Pod, required int32) {
	if members = g.members(key.Namespace, key.OwnerUID); len(members) > 0 {
		_, required = g.gangOf(members[0])
	}
	return members, required
}

// minAvailable returns how many pods of a request are of use: as many as the gang requires
// beside those that are bound in this cluster.
func (c *demandController) minAvailable(request demand.Request) int32 {
	if !request.Key.IsGang() {
		return 0
	}
	members, required := c.gangs.membersOf(request.Key)
	if required == 0 {
		return 0
	}
	for _, pod := range members {
		if pod.Spec.NodeName != "" && !c.placements.IsVirtual(pod.Spec.NodeName) {
			required--
		}
	}
	return max(0, min(required, request.Pods()))
}
