package overflow

import (
	"maps"
	"time"

	corev1 "k8s.io/api/core/v1"
	corelisters "k8s.io/client-go/listers/core/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/usage"
)

// waker opens the gate for the pods that an attempt may succeed for, and activates
// them. It reads what has changed, and needs no state: to run it again is harmless.
type waker struct {
	gate       *gate
	grants     *usage.GrantCache
	placements *usage.Placements
	pools      *usage.PoolCache
	// mayUse reports whether a pod may use a pool.
	mayUse func(*corev1.Pod, *usage.Pool) bool
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
			opened(openedForDecision, w.gate.openDecided(key, coming(w.grants, w.placements, key), w.placements.Placed))
		}
		if g := w.grants.Get(key); g != nil {
			opened(openedForGrant, w.gate.openForSlots(key, w.slots(g)))
		}
	}
	var rooms []usage.Room
	if len(nodes) > 0 {
		rooms = w.placements.RoomOn(nodes)
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
func coming(grants *usage.GrantCache, placements *usage.Placements, key demand.Key) int32 {
	n := grants.Expected(key)
	if g := grants.Get(key); g != nil {
		for provider := range g.Slots {
			n -= placements.UsedOf(key, broker.VirtualNodeName(provider), g.Charges[provider])
		}
	}
	return n
}

// poolRooms returns the room in pools, in their order.
func (w *waker) poolRooms() (rooms []usage.Room) {
	for _, pool := range w.pools.All() {
		node := w.nodeOf(pool.Provider)
		if node == nil {
			continue
		}
		r := w.placements.RoomIn(pool, node)
		if w.countedAt.After(r.ChangedAt) {
			r.ChangedAt = w.countedAt
		}
		selects := r.Selects
		r.Selects = func(pod *corev1.Pod) bool {
			return (selects == nil || selects(pod)) && usage.ToleratesOverflow(pod, node)
		}
		r.Need = func(pod *corev1.Pod) (usage.Amounts, bool) {
			need := usage.NeedOf(pod)
			takes := usage.Amounts{corev1.ResourcePods: 1}
			if len(pool.Totals) > 0 {
				takes.Add(need.Requests, 1)
			}
			return takes, w.mayUse(pod, pool) && w.placements.InPool(pool, node.Name, need)
		}
		rooms = append(rooms, r)
	}
	return rooms
}

// slots returns the places that grants have on the virtual nodes.
func (w *waker) slots(g *usage.Grants) []slots {
	var all []slots
	for provider := range g.Slots {
		node := w.nodeOf(provider)
		if node == nil {
			continue
		}
		changedAt := g.ChangedAt
		for _, at := range []time.Time{w.placements.ChangedAt(node.Name), w.countedAt} {
			if at.After(changedAt) {
				changedAt = at
			}
		}
		all = append(all, slots{node: node, free: w.placements.FreeOf(g, provider, node.Name), changedAt: changedAt})
	}
	return all
}

// nodeOf returns the virtual node of a provider, or nil.
func (w *waker) nodeOf(provider string) *corev1.Node {
	if node, err := w.nodes.Get(broker.VirtualNodeName(provider)); err == nil && usage.ProviderOf(node) == provider {
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
