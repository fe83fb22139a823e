package usage

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/component-helpers/resource"
	podutil "k8s.io/kubernetes/pkg/api/v1/pod"
	"k8s.io/utils/clock"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/charge"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// Placements is where the pods of the cluster are: how much of each node is free, and
// how many pods use each grant. It is kept from the events of nodes and pods, and from
// the pods that the scheduler assumes; each event costs the same however many pods
// there are. Safe for concurrent use.
type Placements struct {
	clock clock.PassiveClock
	// keyOf computes the key of a pod; ok is false if its owner is unknown (yet).
	keyOf func(*corev1.Pod) (demand.Key, bool)

	mu    sync.Mutex
	pods  map[types.UID]*placement
	nodes map[string]*nodeState
	// Pooled reports whether a hold is that of a pool, and Grants returns those of a key.
	Pooled func(hold string) bool
	Grants func(demand.Key) *Grants
	// used counts the pods on each virtual node by key and hold, without those whose owner is
	// unknown, the number of which is unresolved.
	used       map[usedBy]map[string]int32
	unresolved int32
	// charged has what pods on each virtual node use, by the hold of their label and namespace.
	charged map[heldAt]map[string]*use
	// living counts the pods on virtual nodes by key and hold that are not terminating.
	living map[demand.Key]map[string]int32
	// Nominees have room that is not free, although no pod is there. It has a lock of its own.
	Nominees *nominees
	// question is what the counts are read for, under the lock.
	question question
}

// use is what the pods of one namespace use of a hold.
type use struct {
	count   int32
	amounts capacity.Vector
	// keys of the pods, zero for those whose owner is unknown.
	keys map[demand.Key]int32
	// shapes of the pods.
	shapes map[string]*shapeUse
}

// shapeUse are pods of one shape.
type shapeUse struct {
	need *PodNeed
	pods int32
}

type heldAt struct{ hold, node string }

type usedBy struct {
	key  demand.Key
	node string
}

type heldBy struct{ namespace, hold, node string }

// placement is one pod on a node.
type placement struct {
	node string
	// amounts that it takes from the node, the slot of one pod included.
	amounts capacity.Vector
	// bound is false while the pod is only assumed to be on the node.
	bound, terminating bool
	// virtual: the node is, by what is known of it.
	virtual bool
	// nodes with the name of a virtual one only: the pod as counted if the node is virtual.
	key      demand.Key
	resolved bool
	hold     heldBy
	need     *PodNeed
	// generation of the pod that need was computed for.
	generation int64
	// pod is kept while its owner is unknown.
	pod *corev1.Pod
}

// nodeState is a node and what is free on it.
type nodeState struct {
	node *corev1.Node // nil if unknown yet
	used capacity.Vector
	// virtual is kept if the node is deleted before its pods.
	virtual bool
	// changedAt is when the node last became able to run more pods than before.
	changedAt time.Time
}

// PodAmounts is what a pod takes from a node.
func PodAmounts(pod *corev1.Pod) capacity.Vector {
	v := capacity.Ceil(resource.PodRequests(pod, resource.PodResourcesOptions{UseStatusResources: true, InPlacePodLevelResourcesVerticalScalingEnabled: true}))
	for name, amount := range v {
		v[name] = min(amount, maxAmount)
	}
	v[corev1.ResourcePods] = capacity.Unit
	return v
}

// maxAmount is what a pod takes at most, 9 TB: sums of more would end at the largest number, and be
// wrong once one of the pods is gone.
const maxAmount = 1 << 53

// NewPlacements returns placements without pods and nodes; keyOf computes the key of a pod.
func NewPlacements(clock clock.PassiveClock, keyOf func(*corev1.Pod) (demand.Key, bool)) *Placements {
	return &Placements{
		clock: clock, keyOf: keyOf,
		pods: map[types.UID]*placement{}, nodes: map[string]*nodeState{},
		Pooled: func(string) bool { return false }, Grants: func(demand.Key) *Grants { return nil },
		used: map[usedBy]map[string]int32{}, charged: map[heldAt]map[string]*use{}, living: map[demand.Key]map[string]int32{},
		Nominees: newNominees(clock),
	}
}

// namedVirtual reports whether a node has the name of a virtual one. A node of this cluster
// may.
func namedVirtual(nodeName string) bool {
	return strings.HasPrefix(nodeName, broker.VirtualNodePrefix)
}

// IsVirtual reports whether a node is a virtual one. One that was never seen counts as what
// its name says.
func (p *Placements) IsVirtual(nodeName string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.virtual(nodeName)
}

func (p *Placements) virtual(nodeName string) bool {
	if n := p.nodes[nodeName]; n != nil {
		return n.virtual
	}
	return namedVirtual(nodeName)
}

// SetPod records a pod that an informer shows. freed is the node that has more room
// than before, "" if none has; key is that of a pod that left a virtual node.
func (p *Placements) SetPod(pod *corev1.Pod) (freed string, key demand.Key) {
	if pod.Spec.NodeName == "" {
		return "", demand.Key{}
	}
	if podutil.IsPodTerminal(pod) {
		return p.RemovePod(pod.UID)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	before := p.pods[pod.UID]
	hold := pod.Labels[broker.LabelHold]
	if before != nil && before.node != pod.Spec.NodeName {
		freed, key = before.node, before.key // it was assumed to be on another node
		p.remove(pod.UID, before)
		before = nil
	}
	if before != nil && namedVirtual(before.node) {
		hold = before.hold.hold // users can change the label
	}
	after := p.newPlacement(pod, pod.Spec.NodeName, hold, before)
	after.bound, after.terminating = true, pod.DeletionTimestamp != nil
	if before != nil {
		if before.resolved {
			// The key that the pod was counted with: its owner may be gone by now.
			after.key, after.resolved, after.pod = before.key, true, nil
		}
		p.remove(pod.UID, before)
		for name, n := range after.amounts {
			if n < before.amounts[name] {
				freed = after.node // it was resized
			}
		}
	}
	p.insert(pod.UID, after)
	if freed != "" {
		p.touch(freed)
	}
	return freed, key
}

// RemovePod removes a pod that is deleted or has ended, with the results of SetPod.
func (p *Placements) RemovePod(uid types.UID) (freed string, key demand.Key) {
	p.mu.Lock()
	defer p.mu.Unlock()
	before := p.pods[uid]
	if before == nil {
		return "", demand.Key{}
	}
	p.remove(uid, before)
	p.touch(before.node)
	return before.node, before.key
}

// Assume records that a node was found for a pod; hold is the one that it is charged
// to, on a virtual node.
func (p *Placements) Assume(pod *corev1.Pod, node, hold string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if before := p.pods[pod.UID]; before != nil {
		p.remove(pod.UID, before)
	}
	p.insert(pod.UID, p.newPlacement(pod, node, hold, nil))
}

// Forget reverts Assume, unless the pod has been bound meanwhile.
func (p *Placements) Forget(uid types.UID) (freed string, key demand.Key) {
	p.mu.Lock()
	defer p.mu.Unlock()
	before := p.pods[uid]
	if before == nil || before.bound {
		return "", demand.Key{}
	}
	p.remove(uid, before)
	p.touch(before.node)
	return before.node, before.key
}

// newPlacement is a pod on a node; before is what it was there so far, or nil.
func (p *Placements) newPlacement(pod *corev1.Pod, node, hold string, before *placement) *placement {
	pl := &placement{node: node, amounts: PodAmounts(pod), virtual: p.virtual(node), generation: pod.Generation}
	if namedVirtual(node) {
		pl.hold = heldBy{namespace: pod.Namespace, hold: hold, node: node}
		if before != nil && before.generation == pod.Generation {
			pl.need = before.need
		} else {
			pl.need = NeedOf(pod)
		}
		if pl.key, pl.resolved = p.keyOf(pod); !pl.resolved {
			pl.key, pl.pod = demand.Key{}, pod
		}
	}
	return pl
}

func (p *Placements) insert(uid types.UID, pl *placement) {
	p.pods[uid] = pl
	p.count(pl, 1)
}

func (p *Placements) remove(uid types.UID, pl *placement) {
	delete(p.pods, uid)
	p.count(pl, -1)
}

func (p *Placements) count(pl *placement, n int32) {
	node := p.state(pl.node)
	node.used.Add(pl.amounts, int64(n))
	if node.node == nil && node.used[corev1.ResourcePods] == 0 {
		delete(p.nodes, pl.node)
	}
	if !pl.virtual {
		return
	}
	p.charge(pl, n)
	if !pl.resolved {
		p.unresolved += n
		return
	}
	addTo(p.used, usedBy{pl.key, pl.node}, pl.hold.hold, n)
	if !pl.terminating {
		addTo(p.living, pl.key, pl.hold.hold, n)
	}
}

// charge counts a pod on a virtual node for its hold.
func (p *Placements) charge(pl *placement, n int32) {
	at := heldAt{pl.hold.hold, pl.node}
	byNamespace := p.charged[at]
	if byNamespace == nil {
		byNamespace = map[string]*use{}
		p.charged[at] = byNamespace
	}
	u := byNamespace[pl.hold.namespace]
	if u == nil {
		u = &use{amounts: capacity.Vector{}, keys: map[demand.Key]int32{}, shapes: map[string]*shapeUse{}}
		byNamespace[pl.hold.namespace] = u
	}
	u.count += n
	add(u.keys, pl.key, n)
	u.amounts.Add(pl.amounts, int64(n))
	shape := u.shapes[pl.need.Shape]
	if shape == nil {
		shape = &shapeUse{need: pl.need}
		u.shapes[pl.need.Shape] = shape
	}
	if shape.pods += n; shape.pods == 0 {
		delete(u.shapes, pl.need.Shape)
	}
	if u.count == 0 {
		if delete(byNamespace, pl.hold.namespace); len(byNamespace) == 0 {
			delete(p.charged, at)
		}
	}
}

// addTo is add for the counts of a key.
func addTo[K comparable](counts map[K]map[string]int32, key K, name string, n int32) {
	if counts[key] == nil {
		counts[key] = map[string]int32{}
	}
	add(counts[key], name, n)
	if len(counts[key]) == 0 {
		delete(counts, key)
	}
}

// add adds to a count and drops it at zero.
func add[K comparable](counts map[K]int32, key K, n int32) {
	if counts[key] += n; counts[key] == 0 {
		delete(counts, key)
	}
}

func (p *Placements) state(name string) *nodeState {
	n := p.nodes[name]
	if n == nil {
		n = &nodeState{used: capacity.Vector{}, virtual: namedVirtual(name)}
		p.nodes[name] = n
	}
	return n
}

func (p *Placements) touch(node string) {
	if n := p.nodes[node]; n != nil {
		n.changedAt = p.clock.Now()
	}
}

// SetNode records a node. grown is true if it may run pods that it could not run
// before.
func (p *Placements) SetNode(node *corev1.Node) (grown bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.state(node.Name)
	grown = n.node == nil || moreRoom(n.node, node)
	n.node = node
	if grown {
		n.changedAt = p.clock.Now()
	}
	if virtual := ProviderOf(node) != ""; virtual != n.virtual {
		n.virtual = virtual
		p.reclassify(node.Name)
	}
	return grown
}

// reclassify counts the pods of a node as what the node turned out to be.
func (p *Placements) reclassify(node string) {
	for _, pl := range p.pods {
		if pl.node == node {
			p.count(pl, -1)
			pl.virtual = p.virtual(node)
			p.count(pl, 1)
		}
	}
}

// DeleteNode removes a node.
func (p *Placements) DeleteNode(name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.nodes[name]
	if n == nil {
		return
	}
	if n.node = nil; n.used[corev1.ResourcePods] == 0 {
		delete(p.nodes, name)
	}
}

// UsedOf returns how many pods use a grant on a virtual node.
func (p *Placements) UsedOf(key demand.Key, node string, holds []Charge) int32 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.countUsed(key, node, holds)
}

func (p *Placements) countUsed(key demand.Key, node string, holds []Charge) int32 {
	p.question = question{of: p, key: key, provider: strings.TrimPrefix(node, broker.VirtualNodePrefix)}
	n := p.question.sum(p.used[usedBy{key, node}])
	for _, hold := range holds {
		u := p.charged[heldAt{hold.Label, node}][key.Namespace]
		if u == nil {
			continue
		}
		for other, pods := range u.keys {
			if other != key && p.question.counts(hold.Label, other) {
				n += pods
			}
		}
	}
	return n
}

// question is which pods use the grant of a key at a provider. It is asked for the pods of that
// key, whatever their hold, and for others whose label names a hold of the grant.
type question struct {
	of       *Placements
	key      demand.Key
	provider string
}

// counts reports whether pods with the label of a hold and a key, zero if that is unknown, do.
func (q *question) counts(hold string, key demand.Key) bool {
	of, ok := charge.Of(charge.Pod[demand.Key]{Namespace: q.key.Namespace, Label: hold, Key: key, Keyed: key != demand.Key{}}, q)
	return ok && of == q.key
}

// sum adds up counts of pods of the key by hold.
func (q *question) sum(byHold map[string]int32) (n int32) {
	for hold, pods := range byHold {
		if q.counts(hold, q.key) {
			n += pods
		}
	}
	return n
}

// ByHand implements charge.Holds: pools are no key's.
func (q *question) ByHand(hold string) (none demand.Key, ok bool) { return none, q.of.Pooled(hold) }

// OfKey implements charge.Holds. The shapes of a gang share the hold, and each has slots of its own.
func (q *question) OfKey(key demand.Key, _ string) (demand.Key, bool) {
	return key, key.OfReservation() == q.key.OfReservation() || q.of.Grants(key).SlotsAt(q.provider) > 0
}

// Named implements charge.Holds.
func (q *question) Named(string, string) (demand.Key, bool) { return q.key, true }

// FreeOf returns how many more pods may use grants on the virtual node of a provider.
func (p *Placements) FreeOf(g *Grants, provider, node string) int32 {
	p.mu.Lock()
	defer p.mu.Unlock()
	var most int32
	for hold, n := range g.most {
		most += max(0, n-p.living[g.Key][hold])
	}
	return min(most, g.Slots[provider]-p.countUsed(g.Key, node, g.Charges[provider]))
}

// UsersOf returns how many pods of a namespace use a hold on a virtual node.
func (p *Placements) UsersOf(namespace, node, hold string) int32 {
	p.mu.Lock()
	defer p.mu.Unlock()
	if u := p.charged[heldAt{hold, node}][namespace]; u != nil {
		return u.count
	}
	return 0
}

// InPool reports whether a pool has room for a pod on a virtual node.
func (p *Placements) InPool(pool *Pool, node string, need *PodNeed) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return pool.fits(need, p.usesOf(pool, node))
}

// usesOf are the uses of a pool on a virtual node. Those of namespaces that it does not
// serve count as well: it may have served them when their pods were bound.
func (p *Placements) usesOf(pool *Pool, node string) []*use {
	return slices.Collect(maps.Values(p.charged[heldAt{pool.Hold, node}]))
}

// ChargedTo returns the first hold with a free slot on a virtual node, the last one if
// there is none.
func (p *Placements) ChargedTo(namespace, node string, holds []Charge) (label string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, hold := range holds {
		label = hold.Label
		if u := p.charged[heldAt{label, node}][namespace]; u == nil || u.count < hold.slots {
			break
		}
	}
	return label
}

// LivingOf returns how many pods of a key run, or are about to, on virtual nodes and use
// no pool.
func (p *Placements) LivingOf(key demand.Key) int32 {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.question = question{of: p, key: key}
	return p.question.sum(p.living[key])
}

// PlaceOf returns the node of an assumed pod and the hold that it is charged to.
func (p *Placements) PlaceOf(uid types.UID) (node, hold string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if pl := p.pods[uid]; pl != nil {
		return pl.node, pl.hold.hold
	}
	return "", ""
}

// Placed reports whether a pod has a place.
func (p *Placements) Placed(uid types.UID) bool {
	node, _ := p.PlaceOf(uid)
	return node != ""
}

// ChangedAt returns when a node last became able to run more pods.
func (p *Placements) ChangedAt(node string) time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := p.nodes[node]; n != nil {
		return n.changedAt
	}
	return time.Time{}
}

// ChangedSince adds the nodes of this cluster that have been able to run more pods
// since a time.
func (p *Placements) ChangedSince(since time.Time, names map[string]bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for name, n := range p.nodes {
		if !n.virtual && n.changedAt.After(since) {
			names[name] = true
		}
	}
}

// Has reports whether a pod has a node.
func (p *Placements) Has(uid types.UID) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.pods[uid] != nil
}

// RoomID identifies a room: a node of this cluster or, with a hold, what the pool of that has on a
// virtual node.
type RoomID struct{ Node, Hold string }

// InPool reports whether a room is that of a pool.
func (id RoomID) InPool() bool { return id.Hold != "" }

// Room is what is free on one node, or in one pool, and since when.
type Room struct {
	RoomID
	Free      capacity.Vector
	ChangedAt time.Time
	// Need returns what a pod takes of it; ok is false if the pod may not run there. Pods of one
	// key differ only in whether selects is true; if it is nil, it is for all.
	Need    func(*corev1.Pod) (need capacity.Vector, ok bool)
	Selects func(*corev1.Pod) bool
}

// RoomOn returns the room on nodes of this cluster; unknown ones are left out. Beside
// nominees, a room is for those pods only that fit into what is free when they are asked for.
func (p *Placements) RoomOn(names map[string]bool) []Room {
	p.mu.Lock()
	defer p.mu.Unlock()
	var rooms []Room
	for name := range names {
		n := p.nodes[name]
		if n == nil || n.node == nil || n.virtual {
			continue
		}
		free, node := capacity.Floor(n.node.Status.Allocatable), n.node
		free.Add(n.used, -1)
		kept := p.Nominees.On(name, func(uid types.UID) bool { return p.pods[uid] != nil })
		rooms = append(rooms, Room{RoomID: RoomID{Node: name}, Free: free, ChangedAt: n.changedAt, Need: func(pod *corev1.Pod) (capacity.Vector, bool) {
			need := PodAmounts(pod)
			return need, NodeAdmits(node, pod) && (len(kept) == 0 || FitsBeside(kept, pod, need, free))
		}})
	}
	return rooms
}

// RoomIn returns the room that a pool has on a virtual node.
func (p *Placements) RoomIn(pool *Pool, node *corev1.Node) Room {
	p.mu.Lock()
	defer p.mu.Unlock()
	free := maps.Clone(pool.Totals)
	if free == nil {
		free = capacity.Vector{}
	}
	pods := int64(pool.pods())
	for _, u := range p.usesOf(pool, node.Name) {
		free.Add(u.amounts, -1)
		pods -= int64(u.count)
	}
	free[corev1.ResourcePods] = pods * capacity.Unit
	r := Room{RoomID: RoomID{node.Name, pool.Hold}, Free: free, ChangedAt: pool.changedAt}
	if !pool.selector.Empty() {
		r.Selects = func(pod *corev1.Pod) bool { return pool.selector.Matches(labels.Set(pod.Labels)) }
	}
	if n := p.nodes[node.Name]; n != nil && n.changedAt.After(r.ChangedAt) {
		r.ChangedAt = n.changedAt
	}
	return r
}

// RetryUnresolved computes the keys of pods again whose owner was unknown.
func (p *Placements) RetryUnresolved() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.unresolved == 0 {
		return
	}
	for _, pl := range p.pods {
		if pl.pod == nil {
			continue
		}
		if key, ok := p.keyOf(pl.pod); ok {
			p.count(pl, -1)
			pl.key, pl.resolved, pl.pod = key, true, nil
			p.count(pl, 1)
		}
	}
}

// moreRoom reports whether a node may run pods after a change that it could not run
// before.
func moreRoom(before, after *corev1.Node) bool {
	if before.Spec.Unschedulable && !after.Spec.Unschedulable ||
		!maps.Equal(before.Labels, after.Labels) || !equality.Semantic.DeepEqual(before.Spec.Taints, after.Spec.Taints) {
		return true
	}
	for name, quantity := range after.Status.Allocatable {
		if earlier := before.Status.Allocatable[name]; quantity.Cmp(earlier) > 0 {
			return true
		}
	}
	return false
}

// Freed records that a node can run more pods.
func (p *Placements) Freed(node string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.touch(node)
}

// Counted returns all counts but those of zero, by what they count: for tests and debugging.
func (p *Placements) Counted() map[string]int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	counts := map[string]int64{}
	for name, n := range p.nodes {
		counts["pods on "+name] = n.used[corev1.ResourcePods] / capacity.Unit
		counts["CPU on "+name] = n.used[corev1.ResourceCPU]
	}
	for at, byNamespace := range p.charged {
		for namespace, u := range byNamespace {
			counts[fmt.Sprintf("pods of %s charged to hold %q on %s", namespace, at.hold, at.node)] = int64(u.count)
			if unresolved := u.keys[demand.Key{}]; unresolved > 0 {
				counts[fmt.Sprintf("pods that use hold %q on %s", at.hold, at.node)] += int64(unresolved)
			}
		}
	}
	for by, byHold := range p.used {
		for hold, n := range byHold {
			counts[fmt.Sprintf("pods that use hold %q on %s", hold, by.node)] += int64(n)
		}
	}
	for _, byHold := range p.living {
		for hold, n := range byHold {
			counts[fmt.Sprintf("living pods of hold %q", hold)] += int64(n)
		}
	}
	maps.DeleteFunc(counts, func(_ string, n int64) bool { return n == 0 })
	return counts
}
