package gang

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/cache"
	podutil "k8s.io/kubernetes/pkg/api/v1/pod"
	"k8s.io/utils/clock"

	"github.com/spillway-dev/spillway/scheduler-plugin/compatibility"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/waiting"
)

const (
	errGangUnknown = "waiting for %s to be created"
	errGangUnread  = "waiting until %s can be read"
	errGangGone    = "this version of Kubernetes has no Workloads as %s: create the pod again with a PodGroup"
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

// Gangs are the groups of pods of which none is bound before all have places. A pod whose
// PodGroup or Workload does not exist waits for it; where no PodGroups of the coscheduling
// plugins are served, the label that names one means nothing once the API server has said so
// after the pod came: they may have been installed together.
type Gangs struct {
	// informers by API group.
	informers map[string]*gangInformer
	minor     compatibility.Minor
	pods      cache.Indexer
	clock     clock.PassiveClock
	// RefusePodResources is that of OverflowArgs.
	RefusePodResources bool

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
	pod   *corev1.Pod
	since time.Time
	// released: it is to be tried again, however long that takes.
	released bool
	// unserved: it has said that the API server serves nothing that describes its gang.
	unserved bool
}

// New returns the gangs of the pods of an informer, which are described by what client reads from an
// API server of a minor.
func New(clock clock.PassiveClock, client dynamic.Interface, minor compatibility.Minor, pods cache.SharedIndexInformer, onError watchErrors) (g *Gangs, err error) {
	// The profiles of a scheduler share the informer.
	if _, indexed := pods.GetIndexer().GetIndexers()[gangIndex]; !indexed {
		if err := pods.AddIndexers(cache.Indexers{gangIndex: indexByGang}); err != nil {
			return nil, fmt.Errorf("indexing the pods of gangs: %w", err)
		}
	}
	g = &Gangs{informers: map[string]*gangInformer{}, minor: minor, pods: pods.GetIndexer(), clock: clock, held: map[types.UID]heldPod{}, permits: map[types.UID]*permit{}}
	for group, resource := range gangResources(minor) {
		if g.informers[group], err = newGangInformer(clock, client, resource, onError); err != nil {
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

// Run watches PodGroups and Workloads until ctx ends, and activates the pods that were held
// because they were not known yet. changed is called with the key of the Reservation of a
// gang whose PodGroup has changed: that may require another number of pods. What a Workload
// requires does not change.
func (g *Gangs) Run(ctx context.Context, activate func(map[string]*corev1.Pod), changed func(demand.Key)) {
	release := func() { g.release(activate) }
	report := func(obj any) {
		if group := asObject(obj); group != nil && group.GetKind() == "PodGroup" {
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
	wait.UntilWithContext(ctx, func(context.Context) { release() }, time.Minute) // what no event says
	running.Wait()
}

// release activates the held pods whose gang is known by now. It holds no lock then: activate takes
// that of the scheduling queue.
func (g *Gangs) release(activate func(map[string]*corev1.Pod)) {
	if pods := g.released(); len(pods) > 0 {
		activate(pods)
	}
}

func (g *Gangs) released() map[string]*corev1.Pod {
	g.mu.Lock()
	defer g.mu.Unlock()
	pods := map[string]*corev1.Pod{}
	for uid, held := range g.held {
		if held.released {
			continue
		}
		gang, _ := demand.GangOf(held.pod)
		held.released = !g.waits(held, gang)
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
	if object := asObject(obj); object != nil {
		return object.Object["spec"]
	}
	return nil
}

// asObject returns the object of an informer's event, the last known one of a deletion, or nil.
func asObject(obj any) *unstructured.Unstructured {
	if last, ok := obj.(cache.DeletedFinalStateUnknown); ok {
		obj = last.Obj
	}
	object, _ := obj.(*unstructured.Unstructured)
	return object
}

// waits reports whether it is not known yet what the gang of a pod requires.
func (g *Gangs) waits(held heldPod, gang demand.Gang) bool {
	if g.isGone(gang) {
		return true
	}
	if informer := g.informerOf(gang); !informer.served() {
		// An API server that is being upgraded does not serve the version that is watched.
		return gang.API == demand.KubernetesGangs || !informer.absentAfter(held.since)
	}
	_, exists := policyOf(g.group(held.pod.Namespace, gang), gang)
	return !exists
}

// isGone reports whether a pod of the gang was created with a workloadRef, which this minor of
// Kubernetes has no more: nothing says how many pods it requires.
func (g *Gangs) isGone(gang demand.Gang) bool {
	return gang.Workload != "" && g.minor != workloadsUntil
}

// unserved reports whether a gang is one of Kubernetes itself, and the API server serves nothing
// that describes it.
func (g *Gangs) unserved(gang demand.Gang) bool {
	return gang.API == demand.KubernetesGangs && g.informerOf(gang).absent()
}

// informerOf returns the informer of what describes a gang.
func (g *Gangs) informerOf(gang demand.Gang) *gangInformer { return g.informers[gang.API] }

// Hold keeps a pod until its gang is known, and reports what it waits for; "" if nothing.
func (g *Gangs) Hold(pod *corev1.Pod) (waitsFor string) {
	gang, ok := demand.GangOf(pod)
	if g == nil || !ok {
		return ""
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	held := heldPod{pod: pod, since: g.clock.Now(), unserved: g.unserved(gang)}
	if before, ok := g.held[pod.UID]; ok {
		held.since = before.since
	}
	held.released = !g.waits(held, gang)
	switch {
	case held.released && g.informerOf(gang).served():
		delete(g.held, pod.UID)
	case g.Exists(pod):
		g.held[pod.UID] = held // until it is forgotten, at the latest
	}
	switch {
	case held.released:
		return ""
	case g.isGone(gang):
		return fmt.Sprintf(errGangGone, gang)
	case held.unserved:
		return fmt.Sprintf(errGangAbsent, gang, gang.API)
	case !g.informerOf(gang).known():
		return fmt.Sprintf(errGangUnread, gang)
	}
	return fmt.Sprintf(errGangUnknown, gang)
}

// Holds reports whether a pod waits until it is known what describes its gang.
func (g *Gangs) Holds(pod types.UID) bool {
	if g == nil {
		return false
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	held, waits := g.held[pod]
	return waits && !held.released
}

// Forget drops a pod that is no longer pending.
func (g *Gangs) Forget(pod types.UID) {
	if g == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.held, pod)
	delete(g.permits, pod)
}

// Await notes that a pod is about to wait in Permit.
func (g *Gangs) Await(pod types.UID, atMost time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.permits[pod] = &permit{until: g.clock.Now().Add(atMost - permitMargin)}
}

// Left notes that a pod no longer waits in Permit, and has lost its place. It reports whether the
// pod has waited there.
func (g *Gangs) Left(pod types.UID) (waited bool) {
	if g == nil {
		return false
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	_, waited = g.permits[pod]
	delete(g.permits, pod)
	return waited
}

// Leaves reports whether a pod that waits in Permit is about to lose its place.
func (g *Gangs) Leaves(pod types.UID) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	w := g.permits[pod]
	return w != nil && !w.allowed && (w.rejected || !g.clock.Now().Before(w.until))
}

// Allow allows pods with places to be bound, unless one of them is about to lose its place.
func (g *Gangs) Allow(pods []*corev1.Pod) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, pod := range pods {
		if w := g.permits[pod.UID]; w != nil && (w.rejected || !w.allowed && !g.clock.Now().Before(w.until)) {
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

// Reject reports whether a pod that waits in Permit is to be rejected: it was not allowed before,
// nor rejected, and the scheduler's timer does not reject it by itself. Kubernetes 1.37 has a
// data race between two rejections of a pod.
func (g *Gangs) Reject(pod types.UID) bool {
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

// Admissible is demand.Admissible, but for pods with pod-level resources where guests have none.
func (g *Gangs) Admissible(pod *corev1.Pod) (ok bool, reason string) {
	ok, reason = demand.Admissible(pod)
	if ok && g != nil && g.RefusePodResources {
		reason = demand.PodResources(pod)
		ok = reason == ""
	}
	return ok, reason
}

// group returns the object that describes a gang, or nil.
func (g *Gangs) group(namespace string, gang demand.Gang) *unstructured.Unstructured {
	if g == nil {
		return nil
	}
	return g.get(gang.API, namespace, cmp.Or(gang.Workload, gang.PodGroup))
}

// Described returns the object that the owner of a gang's key refers to, or nil.
func (g *Gangs) Described(namespace string, owner metav1.OwnerReference) *unstructured.Unstructured {
	api, _, _ := strings.Cut(owner.APIVersion, "/")
	return g.get(api, namespace, owner.Name)
}

func (g *Gangs) get(api, namespace, name string) *unstructured.Unstructured {
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
func (g *Gangs) minMembers(namespace string, gang demand.Gang) int32 {
	n, _ := policyOf(g.group(namespace, gang), gang)
	if n < 2 {
		return 0
	}
	return int32(min(n, math.MaxInt32))
}

// GangOf returns a pod's gang, and how many of its pods must have places; 0 if the pod may
// be bound alone.
func (g *Gangs) GangOf(pod *corev1.Pod) (gang demand.Gang, required int32) {
	gang, ok := demand.GangOf(pod)
	if !ok {
		return gang, 0
	}
	return gang, g.minMembers(pod.Namespace, gang)
}

// Members returns the pods of a gang that have neither ended nor are terminating, and that
// can be scheduled: a gang cannot count on one with scheduling gates.
func (g *Gangs) Members(namespace string, gang types.UID) []*corev1.Pod {
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

// Pending reports whether a pod of a gang exists, and has no node.
func (g *Gangs) Pending(pod *corev1.Pod) bool {
	current := g.Current(pod)
	return current != nil && current.DeletionTimestamp == nil && current.Spec.NodeName == ""
}

// Exists reports whether a pod was not deleted yet.
func (g *Gangs) Exists(pod *corev1.Pod) bool { return g.Current(pod) != nil }

// Current returns a pod as its informer shows it, or nil.
func (g *Gangs) Current(pod *corev1.Pod) *corev1.Pod {
	obj, exists, err := g.pods.GetByKey(pod.Namespace + "/" + pod.Name)
	current, ok := obj.(*corev1.Pod)
	if err != nil || !exists || !ok || current.UID != pod.UID {
		return nil
	}
	return current
}

// MembersOf returns the members of the gang of a key, and how many must have places.
func (g *Gangs) MembersOf(key demand.Key) (members []*corev1.Pod, required int32) {
	if members = g.Members(key.Namespace, key.OwnerUID); len(members) > 0 {
		_, required = g.GangOf(members[0])
	}
	return members, required
}

// Keeps reports whether anything is kept of a pod.
func (g *Gangs) Keeps(pod types.UID) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	_, held := g.held[pod]
	return held || g.permits[pod] != nil
}
