package waiting

import (
	"maps"
	"time"

	corev1 "k8s.io/api/core/v1"
	corelisters "k8s.io/client-go/listers/core/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/usage"
)

// Waker opens the gate for the pods that an attempt may succeed for, and activates
// them. It reads what has changed, and needs no state: to run it again is harmless.
type Waker struct {
	Gate       *Gate
	Grants     *usage.GrantCache
	Placements *usage.Placements
	Pools      *usage.PoolCache
	// MayUse reports whether a pod may use a pool.
	MayUse func(*corev1.Pod, *usage.Pool) bool
	Nodes  corelisters.NodeLister
	// Settled reports whether preemption no longer waits for capacity for a key.
	Settled  func(demand.Key) bool
	Activate func(map[string]*corev1.Pod)
	// CountedAt is when placements became complete.
	CountedAt time.Time
}

// Wake opens the gate for the keys and the nodes of this cluster that have changed, for
// the pools if any has, and for pods whose retry is due.
func (w *Waker) Wake(keys map[demand.Key]bool, nodes map[string]bool, pools bool) {
	if w.Gate.Len() == 0 {
		return
	}
	var pods []*corev1.Pod
	opened := func(reason string, more []*corev1.Pod) {
		GateOpenings.WithLabelValues(reason).Add(float64(len(more)))
		pods = append(pods, more...)
	}
	due, unused := w.Gate.openDue()
	opened(openedForRetry, due)
	if len(unused) > 0 {
		more := newWork()
		maps.Copy(more.Keys, keys)
		maps.Copy(more.Nodes, nodes)
		more.Pools = pools
		for _, of := range unused {
			more.AddOpening(of)
		}
		keys, nodes, pools = more.Keys, more.Nodes, more.Pools
	}
	for key := range keys {
		if w.Settled(key) {
			opened(openedForDecision, w.Gate.openDecided(key, Coming(w.Grants, w.Placements, key), w.Placements.Placed))
		}
		if g := w.Grants.Get(key); g != nil {
			opened(openedForGrant, w.Gate.openForSlots(key, w.slots(g)))
		}
	}
	var rooms []usage.Room
	if len(nodes) > 0 {
		rooms = w.Placements.RoomOn(nodes)
	}
	if pools {
		rooms = append(rooms, w.poolRooms()...)
	}
	if len(rooms) > 0 {
		opened(openedForRoom, w.Gate.OpenForRoom(rooms))
	}
	if len(pods) == 0 {
		return
	}
	byName := make(map[string]*corev1.Pod, len(pods))
	for _, pod := range pods {
		byName[NameOf(pod).String()] = pod
	}
	w.Activate(byName)
}

// Coming returns for how many pods of a key without a place there is capacity in other
// clusters, or may be soon by what is requested.
func Coming(grants *usage.GrantCache, placements *usage.Placements, key demand.Key) int32 {
	n := grants.Expected(key)
	if g := grants.Get(key); g != nil {
		for provider := range g.Slots {
			n -= placements.UsedOf(key, broker.VirtualNodeName(provider), g.Charges[provider])
		}
	}
	return n
}

// poolRooms returns the room in pools, in their order.
func (w *Waker) poolRooms() (rooms []usage.Room) {
	for _, pool := range w.Pools.All() {
		node := w.nodeOf(pool.Provider)
		if node == nil {
			continue
		}
		r := w.Placements.RoomIn(pool, node)
		if w.CountedAt.After(r.ChangedAt) {
			r.ChangedAt = w.CountedAt
		}
		selects := r.Selects
		r.Selects = func(pod *corev1.Pod) bool {
			return (selects == nil || selects(pod)) && usage.ToleratesOverflow(pod, node)
		}
		r.Need = func(pod *corev1.Pod) (capacity.Vector, bool) {
			need := usage.NeedOf(pod)
			takes := capacity.Vector{corev1.ResourcePods: capacity.Unit}
			if len(pool.Totals) > 0 {
				takes.Add(need.Requests, 1)
			}
			return takes, w.MayUse(pod, pool) && w.Placements.InPool(pool, node.Name, need)
		}
		rooms = append(rooms, r)
	}
	return rooms
}

// slots returns the places that grants have on the virtual nodes.
func (w *Waker) slots(g *usage.Grants) []slots {
	var all []slots
	for provider := range g.Slots {
		node := w.nodeOf(provider)
		if node == nil {
			continue
		}
		changedAt := g.ChangedAt
		for _, at := range []time.Time{w.Placements.ChangedAt(node.Name), w.CountedAt} {
			if at.After(changedAt) {
				changedAt = at
			}
		}
		all = append(all, slots{node: node, free: w.Placements.FreeOf(g, provider, node.Name), changedAt: changedAt})
	}
	return all
}

// nodeOf returns the virtual node of a provider, or nil.
func (w *Waker) nodeOf(provider string) *corev1.Node {
	if node, err := w.Nodes.Get(broker.VirtualNodeName(provider)); err == nil && usage.ProviderOf(node) == provider {
		return node
	}
	return nil
}

// ChangedKeys returns the keys whose pods may have to be woken.
func (w *Waker) ChangedKeys(work Work) map[demand.Key]bool {
	keys := maps.Clone(work.Keys)
	for key := range work.Reservations {
		keys[key] = true
	}
	if work.AllKeys {
		for _, key := range w.Gate.keys() {
			keys[key] = true
		}
		return keys
	}
	// What concerns some pods of a gang concerns those of its other shapes.
	gangs := maps.Clone(keys)
	maps.DeleteFunc(gangs, func(key demand.Key, _ bool) bool { return key != key.OfReservation() || !key.IsGang() })
	if len(gangs) > 0 {
		for _, key := range w.Gate.keys() {
			if gangs[key.OfReservation()] {
				keys[key] = true
			}
		}
	}
	return keys
}
