package inventory

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	quota "k8s.io/apiserver/pkg/quota/v1"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/charge"
)

// Tracker keeps what the nodes have free and what uses them, so that the cost of a
// change does not grow with the number of pods. It equals a Tracker in
// which the same objects are set for the first time. It is safe for concurrent use.
type Tracker struct {
	recognizer Recognizer
	// synced report whether the objects that existed at the start have been set.
	synced []toolscache.InformerSynced
	// GuestEnded, if set, is called after a guest of a consumer has ended. It must not
	// block or call the Tracker.
	GuestEnded func(consumer string)
	// PlaceChanged, if set, is called once the Tracker shows that a guest or placeholder of a
	// consumer is new, has changed in what moved compares, or is gone. It must not block.
	PlaceChanged func(consumer string)

	mu         sync.Mutex
	nodes      map[string]*corev1.Node
	namespaces map[string]map[string]string
	pods       map[types.NamespacedName]trackedPod
	// used by node, also of nodes that are not eligible or not known yet.
	used map[string]*usage
	// guests and pending are the pods that Guests and Pending return.
	guests  map[string]map[types.NamespacedName]trackedPod
	pending map[types.NamespacedName]trackedPod
	// placeholders by consumer. They use nothing.
	placeholders map[string]map[types.NamespacedName]trackedPod
	// ofNamespace are the pods of each namespace: its labels decide whose they are.
	ofNamespace map[string]map[types.NamespacedName]bool
	// requests of the last pod of each controller, which most others share.
	requests map[types.UID]corev1.ResourceList
}

// trackedPod is a pod that has not ended, or a placeholder, and how it was counted.
type trackedPod struct {
	pod      *corev1.Pod
	consumer string
	// placeholder is whether it holds a place for the consumer instead of being its guest.
	placeholder bool
	requests    corev1.ResourceList
	// node is the one that it uses, "" for none.
	node string
}

// NewTracker returns a Tracker without nodes and pods.
func NewTracker(recognizer Recognizer) *Tracker {
	return &Tracker{
		recognizer: recognizer,
		nodes:      map[string]*corev1.Node{}, namespaces: map[string]map[string]string{},
		pods: map[types.NamespacedName]trackedPod{}, used: map[string]*usage{},
		guests: map[string]map[types.NamespacedName]trackedPod{}, pending: map[types.NamespacedName]trackedPod{},
		placeholders: map[string]map[types.NamespacedName]trackedPod{}, ofNamespace: map[string]map[types.NamespacedName]bool{},
		requests: map[types.UID]corev1.ResourceList{},
	}
}

// SetupWithManager makes the Tracker follow the manager's cache.
func (t *Tracker) SetupWithManager(mgr ctrl.Manager) error {
	handler := toolscache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { t.Set(o.(client.Object)) },
		UpdateFunc: func(_, o any) { t.Set(o.(client.Object)) },
		DeleteFunc: func(o any) {
			if gone, ok := o.(toolscache.DeletedFinalStateUnknown); ok {
				o = gone.Obj
			}
			t.Delete(o.(client.Object))
		},
	}
	for _, object := range []client.Object{&corev1.Namespace{}, &corev1.Node{}, &corev1.Pod{}} {
		informer, err := mgr.GetCache().GetInformer(context.Background(), object, cache.BlockUntilSynced(false))
		if err != nil {
			return fmt.Errorf("watching %T for the inventory: %w", object, err)
		}
		registration, err := informer.AddEventHandler(handler)
		if err != nil {
			return fmt.Errorf("watching %T for the inventory: %w", object, err)
		}
		t.synced = append(t.synced, registration.HasSynced)
	}
	return nil
}

// WaitSynced waits until the Tracker has every object that existed when it was started.
func (t *Tracker) WaitSynced(ctx context.Context) error {
	if !toolscache.WaitForCacheSync(ctx.Done(), t.synced...) {
		return fmt.Errorf("waiting for the inventory: %w", context.Cause(ctx))
	}
	return nil
}

// Set adds a Node, Pod or Namespace, or replaces it. The Tracker keeps the object: it must not be
// changed.
func (t *Tracker) Set(object client.Object) {
	t.mu.Lock()
	var ended, changed []string
	switch o := object.(type) {
	case *corev1.Node:
		t.nodes[o.Name] = o
	case *corev1.Pod:
		key := client.ObjectKeyFromObject(o)
		before := t.pods[key]
		ended = t.setPod(o)
		changed = placesChanged(before, t.pods[key])
	case *corev1.Namespace:
		if before, known := t.namespaces[o.Name]; !known || !maps.Equal(before, o.Labels) {
			t.namespaces[o.Name] = o.Labels
			for _, key := range slices.Collect(maps.Keys(t.ofNamespace[o.Name])) {
				before := t.pods[key]
				t.setPod(before.pod)
				// It may be a guest from now on.
				changed = append(changed, placesChanged(before, t.pods[key])...)
			}
		}
	}
	t.mu.Unlock()
	t.report(ended, changed)
}

// Delete removes a Node, Pod or Namespace.
func (t *Tracker) Delete(object client.Object) {
	t.mu.Lock()
	var ended, changed []string
	switch o := object.(type) {
	case *corev1.Node:
		delete(t.nodes, o.Name)
	case *corev1.Pod:
		key := client.ObjectKeyFromObject(o)
		changed = placesChanged(t.pods[key], trackedPod{})
		ended = t.removePod(key)
	case *corev1.Namespace:
		delete(t.namespaces, o.Name)
	}
	t.mu.Unlock()
	t.report(ended, changed)
}

func (t *Tracker) report(ended, changed []string) {
	if t.PlaceChanged != nil {
		for _, consumer := range changed {
			t.PlaceChanged(consumer)
		}
	}
	if t.GuestEnded != nil {
		for _, consumer := range ended {
			t.GuestEnded(consumer)
		}
	}
}

// placesChanged are the consumers of a guest or placeholder that has changed; a pod that is
// not tracked is zero.
func placesChanged(before, after trackedPod) (consumers []string) {
	if before.pod != nil && after.pod != nil && before.consumer == after.consumer && !moved(before.pod, after.pod) {
		return nil
	}
	for _, consumer := range []string{before.consumer, after.consumer} {
		if consumer != "" && !slices.Contains(consumers, consumer) {
			consumers = append(consumers, consumer)
		}
	}
	return consumers
}

// moved reports whether a pod has another place than before, waits for another one, has
// ended, or whether the scheduler says something else about it.
func moved(before, after *corev1.Pod) bool {
	return before.Spec.NodeName != after.Spec.NodeName || Finished(before) != Finished(after) ||
		before.Status.NominatedNodeName != after.Status.NominatedNodeName || len(before.Spec.SchedulingGates) != len(after.Spec.SchedulingGates) ||
		!equality.Semantic.DeepEqual(scheduled(before), scheduled(after))
}

func scheduled(pod *corev1.Pod) *corev1.PodCondition {
	for i := range pod.Status.Conditions {
		if pod.Status.Conditions[i].Type == corev1.PodScheduled {
			return &pod.Status.Conditions[i]
		}
	}
	return nil
}

// setPod replaces what is counted of a pod, and returns its consumer if it is a guest that has ended.
func (t *Tracker) setPod(pod *corev1.Pod) (ended []string) {
	key := client.ObjectKeyFromObject(pod)
	ended = t.removePod(key)
	tracked := trackedPod{pod: pod, requests: t.requestsOf(pod)}
	consumer, placeholder := t.recognizer.PlaceholderFor(pod)
	if Finished(pod) && !placeholder {
		return ended
	}
	if placeholder {
		tracked.consumer, tracked.placeholder = consumer, true
		t.pods[key] = tracked
		if t.placeholders[consumer] == nil {
			t.placeholders[consumer] = map[types.NamespacedName]trackedPod{}
		}
		t.placeholders[consumer][key] = tracked
		return nil
	}
	tracked.consumer, _ = t.recognizer.Guest(pod, func(name string) map[string]string { return t.namespaces[name] })
	tracked.node = nodeOf(pod, tracked.consumer)
	t.pods[key] = tracked
	if t.ofNamespace[pod.Namespace] == nil {
		t.ofNamespace[pod.Namespace] = map[types.NamespacedName]bool{}
	}
	t.ofNamespace[pod.Namespace][key] = true
	if node := tracked.node; node != "" {
		if t.used[node] == nil {
			t.used[node] = &usage{}
		}
		t.used[node].add(tracked.consumer, tracked.requests, 1)
	}
	switch {
	case tracked.consumer != "":
		if t.guests[tracked.consumer] == nil {
			t.guests[tracked.consumer] = map[types.NamespacedName]trackedPod{}
		}
		t.guests[tracked.consumer][key] = tracked
	case waits(pod) && tracked.node == "":
		t.pending[key] = tracked
	}
	return nil
}

// requestsOf returns what a pod requests, as one list for equal pods of a controller.
func (t *Tracker) requestsOf(pod *corev1.Pod) corev1.ResourceList {
	requests, owner := Requests(pod), metav1.GetControllerOfNoCopy(pod)
	if owner == nil {
		return requests
	}
	last, known := t.requests[owner.UID]
	if known && quota.Equals(requests, last) {
		return last
	}
	if !known && len(t.requests) >= maxControllers {
		clear(t.requests)
	}
	t.requests[owner.UID] = requests
	return requests
}

// removePod removes what was counted of a pod, and returns its consumer if it was a
// guest.
func (t *Tracker) removePod(key types.NamespacedName) (guestOf []string) {
	tracked, known := t.pods[key]
	if !known {
		return nil
	}
	delete(t.pods, key)
	if tracked.placeholder {
		if delete(t.placeholders[tracked.consumer], key); len(t.placeholders[tracked.consumer]) == 0 {
			delete(t.placeholders, tracked.consumer)
		}
		return nil
	}
	delete(t.pending, key)
	if delete(t.ofNamespace[key.Namespace], key); len(t.ofNamespace[key.Namespace]) == 0 {
		delete(t.ofNamespace, key.Namespace)
	}
	if node := tracked.node; node != "" {
		u := t.used[node]
		if u.add(tracked.consumer, tracked.requests, -1); u.local.pods == 0 && len(u.guests) == 0 {
			delete(t.used, node)
		}
	}
	if tracked.consumer == "" {
		return nil
	}
	if delete(t.guests[tracked.consumer], key); len(t.guests[tracked.consumer]) == 0 {
		delete(t.guests, tracked.consumer)
	}
	return []string{tracked.consumer}
}

func (t *Tracker) eligible() []*corev1.Node {
	var out []*corev1.Node
	for _, n := range t.nodes {
		if t.recognizer.Eligible(n) {
			out = append(out, n)
		}
	}
	return out
}

// Measure computes the cluster's advertisement.
func (t *Tracker) Measure(terms Terms, now time.Time, sequence int64) broker.ClusterAdvertisementSpec {
	t.mu.Lock()
	defer t.mu.Unlock()
	return measure(t.eligible(), t.used, !t.recognizer.DropsSelection, terms, now, sequence)
}

// Slots are the eligible nodes less a headroom, sorted by name, each a slot of its own with the
// name of the node class that it is advertised in.
func (t *Tracker) Slots(headroom corev1.ResourceList) []capacity.Slot {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slots(freeNodes(t.eligible(), t.used, headroom))
}

// Guests returns the guests of each consumer, sorted by the pods' names. Those on a node that is
// gone, not Ready or cordoned have no place: they do not run there, or are to leave it.
func (t *Tracker) Guests() map[string]Guests {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := map[string]Guests{}
	for consumer, pods := range t.guests {
		var guests Guests
		for _, key := range sortedKeys(pods) {
			tracked := pods[key]
			guests.Active = append(guests.Active, tracked.requests)
			if n := t.nodes[tracked.pod.Spec.NodeName]; n != nil && t.recognizer.Eligible(n) {
				guests.Placed = append(guests.Placed, charge.Guest{Requests: tracked.requests, Label: tracked.pod.Labels[broker.LabelHold]})
			}
		}
		out[consumer] = guests
	}
	return out
}

// Places are those of a consumer, sorted by the pods' names.
func (t *Tracker) Places(consumer string) Places {
	t.mu.Lock()
	defer t.mu.Unlock()
	var out Places
	for _, key := range sortedKeys(t.guests[consumer]) {
		tracked := t.guests[consumer][key]
		out.Guests, out.Requests = append(out.Guests, tracked.pod), append(out.Requests, tracked.requests)
	}
	for _, key := range sortedKeys(t.placeholders[consumer]) {
		out.Placeholders = append(out.Placeholders, t.placeholders[consumer][key].pod)
	}
	return out
}

// Node returns a node, nil if it does not exist. It must not be changed.
func (t *Tracker) Node(name string) *corev1.Node {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.nodes[name]
}

// Pending returns the cluster's own pods with at least a priority that wait for a node, sorted by
// their names, as the capacity that they need.
func (t *Tracker) Pending(priority int32) []broker.PodSet {
	t.mu.Lock()
	defer t.mu.Unlock()
	var out []broker.PodSet
	for _, key := range sortedKeys(t.pending) {
		if pod := t.pending[key].pod; ptr.Deref(pod.Spec.Priority, 0) >= priority {
			out = append(out, claimOf(pod))
		}
	}
	return out
}

func sortedKeys(pods map[types.NamespacedName]trackedPod) []types.NamespacedName {
	return slices.SortedFunc(maps.Keys(pods), func(a, b types.NamespacedName) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
}
