package overflow

import (
	"maps"
	"time"

	corev1 "k8s.io/api/core/v1"
	corelisters "k8s.io/client-go/listers/core/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// waker opens the gate for the pods that an attempt may succeed for, and activates
// them. It reads what has changed, and needs no state: to run it again is harmless.
type waker struct {
	gate       *gate
	grants     *grantCache
	placements *placements
	pools      *poolCache
	// mayUse reports whether a pod may use a pool.
	mayUse func(*corev1.Pod, *pool) bool
	nodes  corelisters.NodeLister
	// settled reports whether preemption no longer waits for capacity for a key.
	settled  func(demand.Key) bool
	activate func(map[string]*corev1.Pod)
	// countedAt is when placements became complete.
	countedAt time.Time
}

// wake opens the gate for the keys and the nodes of this cluster that have changed, for
// the pools if any has, and for pods whose retry is due.
func (w *waker) wake(keys map[demand.Key]bool, nodes map[string]bool, pools bool) {
	if w.gate.len() == 0 {
		return
	}
	var pods []*corev1.Pod
	opened := func(reason string, more []*corev1.Pod) {
		gateOpenings.WithLabelValues(reason).Add(float64(len(more)))
		pods = append(pods, more...)
	}
	due, unused := w.gate.openDue()
	opened(openedForRetry, due)
	if len(unused) > 0 {
		more := newWork()
		maps.Copy(more.keys, keys)
		maps.Copy(more.nodes, nodes)
		more.pools = pools
		for _, of := range unused {
			more.addOpening(of)
		}
		keys, nodes, pools = more.keys, more.nodes, more.pools
	}
	for key := range keys {
		if w.settled(key) {
			opened(openedForDecision, w.gate.openDecided(key, coming(w.grants, w.placements, key), w.placements.placed))
		}
		if g := w.grants.get(key); g != nil {
			opened(openedForGrant, w.gate.openForSlots(key, w.slots(g)))
		}
	}
	var rooms []room
	if len(nodes) > 0 {
		rooms = w.placements.roomOn(nodes)
	}
	if pools {
		rooms = append(rooms, w.poolRooms()...)
	}
	if len(rooms) > 0 {
		opened(openedForRoom, w.gate.openForRoom(rooms))
	}
	if len(pods) == 0 {
		return
	}
	byName := make(map[string]*corev1.Pod, len(pods))
	for _, pod := range pods {
		byName[nameOf(pod).String()] = pod
	}
	w.activate(byName)
}

// coming returns for how many pods of a key without a place there is capacity in other
// clusters, or may be soon by what is requested.
func coming(grants *grantCache, placements *placements, key demand.Key) int32 {
	n := grants.expected(key)
	if g := grants.get(key); g != nil {
		for provider := range g.slots {
			n -= placements.usedOf(key, broker.VirtualNodeName(provider), g.charges[provider])
		}
	}
	return n
}

// poolRooms returns the room in pools, in their order.
func (w *waker) poolRooms() (rooms []room) {
	for _, pool := range w.pools.all() {
		node := w.nodeOf(pool.provider)
		if node == nil {
			continue
		}
		r := w.placements.roomIn(pool, node)
		if w.countedAt.After(r.changedAt) {
			r.changedAt = w.countedAt
		}
		selects := r.selects
		r.selects = func(pod *corev1.Pod) bool {
			return (selects == nil || selects(pod)) && toleratesOverflow(pod, node)
		}
		r.need = func(pod *corev1.Pod) (amounts, bool) {
			need := needOf(pod)
			takes := amounts{corev1.ResourcePods: 1}
			if len(pool.totals) > 0 {
				takes.add(need.requests, 1)
			}
			return takes, w.mayUse(pod, pool) && w.placements.inPool(pool, node.Name, need)
		}
		rooms = append(rooms, r)
	}
	return rooms
}

// slots returns the places that grants have on the virtual nodes.
func (w *waker) slots(g *grants) []slots {
	var all []slots
	for provider := range g.slots {
		node := w.nodeOf(provider)
		if node == nil {
			continue
		}
		changedAt := g.changedAt
		for _, at := range []time.Time{w.placements.changedAt(node.Name), w.countedAt} {
			if at.After(changedAt) {
				changedAt = at
			}
		}
		all = append(all, slots{node: node, free: w.placements.freeOf(g, provider, node.Name), changedAt: changedAt})
	}
	return all
}

// nodeOf returns the virtual node of a provider, or nil.
func (w *waker) nodeOf(provider string) *corev1.Node {
	if node, err := w.nodes.Get(broker.VirtualNodeName(provider)); err == nil && providerOf(node) == provider {
		return node
	}
	return nil
}

// changedKeys returns the keys whose pods may have to be woken.
func (w *waker) changedKeys(work work) map[demand.Key]bool {
	keys := maps.Clone(work.keys)
	for key := range work.reservations {
		keys[key] = true
	}
	if work.allKeys {
		for _, key := range w.gate.keys() {
			keys[key] = true
		}
		return keys
	}
	// What concerns some pods of a gang concerns those of its other shapes.
	gangs := maps.Clone(keys)
	maps.DeleteFunc(gangs, func(key demand.Key, _ bool) bool { return key != key.OfReservation() || !key.IsGang() })
	if len(gangs) > 0 {
		for _, key := range w.gate.keys() {
			if gangs[key.OfReservation()] {
				keys[key] = true
			}
		}
	}
	return keys
}
