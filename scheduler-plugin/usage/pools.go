package usage

import (
	"cmp"
	"maps"
	"reflect"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/charge"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// Pool is the capacity that one provider provides for a Reservation made by hand. It is
// not changed once made.
type Pool struct {
	// Reservation is the name for people: namespace/name, or that in the hub.
	Reservation string
	// Hold is the value of the hold label of the pods that use the pool.
	Hold     string
	Provider string
	// Price of it, such as "0.25 EUR" an hour, if the provider states one.
	Price string
	// namespaces whose pods may use it; all if empty, which only one from the hub has.
	// Those of unmapped may not: the provider does not have them.
	namespaces, unmapped []string
	fromHub              bool
	selector             labels.Selector
	// restricted is set if the provider requires that guests comply with the Pod Security
	// Standard restricted.
	restricted bool
	// Totals are a divisible total, places are for one pod each, the smallest first. Neither if
	// no pod may be bound to the pool any more, or none yet.
	Totals capacity.Vector
	places []place
	// changedAt is when the pool last changed.
	changedAt time.Time
}

// place is a pod set of a pool.
type place struct {
	PodNeed
	count int32
}

// PodNeed is what a pod needs of a pool, or what a place is for.
type PodNeed struct {
	Shape    string
	Requests capacity.Vector
	set      broker.PodSet
}

// NeedOf is what a pod needs of a pool.
func NeedOf(pod *corev1.Pod) *PodNeed {
	shape, set := demand.ShapeOf(pod)
	return &PodNeed{Shape: shape, Requests: capacity.Ceil(set.Requests.List()), set: set}
}

// serves reports whether pods of a namespace may use the pool.
func (p *Pool) serves(namespace string) bool {
	return (len(p.namespaces) == 0 || slices.Contains(p.namespaces, namespace)) && !slices.Contains(p.unmapped, namespace)
}

// usable reports whether the pool has any capacity.
func (p *Pool) usable() bool { return len(p.Totals) > 0 || len(p.places) > 0 }

// pods is the number of pods that may use the pool, whatever they request.
func (p *Pool) pods() int32 {
	if len(p.Totals) > 0 {
		return broker.PodsOfTotal
	}
	var n int32
	for _, place := range p.places {
		n += place.count
	}
	return n
}

// fits reports whether the pool has room for a pod beside those that use it.
func (p *Pool) fits(need *PodNeed, used []*use) bool {
	if p.restricted && need.set.PodSecurity != broker.PodSecurityRestricted {
		return false
	}
	if len(p.places) > 0 {
		return p.hasPlace(need, used)
	}
	if len(p.Totals) == 0 || !unconstrained(&need.set) {
		return false
	}
	free, pods := maps.Clone(p.Totals), int32(1)
	for _, u := range used {
		free.Add(u.amounts, -1)
		pods += u.count
	}
	return pods <= broker.PodsOfTotal && need.Requests.FitsIn(free) > 0
}

// unconstrained reports whether a pod may run on every node of a provider: a divisible
// total may be on any of them.
func unconstrained(set *broker.PodSet) bool {
	return set.NodeAffinity == nil && matchesVirtualNode(set.NodeSelector)
}

// matchesVirtualNode reports whether a node selector has only what every virtual node has.
func matchesVirtualNode(selector map[string]string) bool {
	for key := range selector {
		if key != corev1.LabelOSStable && key != corev1.LabelArchStable {
			return false
		}
	}
	return true
}

// admits reports whether a place is large enough for a pod, and on nodes that may run it.
func (p *place) admits(need *PodNeed) bool {
	if need.Requests.FitsIn(p.Requests) == 0 || need.set.NodeAffinity != nil && !equality.Semantic.DeepEqual(p.set.NodeAffinity, need.set.NodeAffinity) {
		return false
	}
	for key, value := range need.set.NodeSelector {
		if p.set.NodeSelector[key] != value && !matchesVirtualNode(map[string]string{key: value}) {
			return false
		}
	}
	// The place may be on a node with a taint that the Reservation tolerates.
	return !slices.ContainsFunc(p.set.Tolerations, func(t corev1.Toleration) bool {
		return !slices.ContainsFunc(need.set.Tolerations, func(own corev1.Toleration) bool { return equality.Semantic.DeepEqual(own, t) })
	})
}

// hasPlace reports whether a pod and those that use the pool all have a place. Those that the
// fewest kinds of places admit choose first, each the smallest: so if of two kinds always one
// admits what the other does, all have one if that is possible at all.
func (p *Pool) hasPlace(need *PodNeed, used []*use) bool {
	pods := []shapeUse{{need, 1}}
	for _, u := range used {
		for _, s := range u.shapes {
			pods = append(pods, *s)
		}
	}
	slices.SortFunc(pods, func(a, b shapeUse) int {
		return cmp.Or(cmp.Compare(p.admitting(a.need), p.admitting(b.need)), cmp.Compare(a.need.Shape, b.need.Shape))
	})
	left, homeless := make([]int32, len(p.places)), int32(0)
	for i := range p.places {
		left[i] = p.places[i].count
	}
	for _, s := range pods {
		if p.admitting(s.need) == 0 {
			if s.need == need {
				return false
			}
			homeless += s.pods // they have a place, although they fit none any more
			continue
		}
		for i := range p.places {
			if p.places[i].admits(s.need) {
				taken := min(left[i], s.pods)
				left[i], s.pods = left[i]-taken, s.pods-taken
			}
		}
		if s.pods > 0 {
			return false
		}
	}
	for _, n := range left {
		homeless -= n
	}
	return homeless <= 0
}

// admitting is the number of kinds of places that admit a pod.
func (p *Pool) admitting(need *PodNeed) (n int) {
	for i := range p.places {
		if p.places[i].admits(need) {
			n++
		}
	}
	return n
}

// PoolCache has the pools: ReservationInstructions of Reservations that were created in
// the hub, or by hand in this cluster. Safe for concurrent use.
type PoolCache struct {
	clock clock.PassiveClock

	mu           sync.RWMutex
	instructions map[types.NamespacedName]*broker.ReservationInstruction
	// sources are this cluster's Reservations that were made by hand.
	sources map[types.NamespacedName]source
	pools   map[types.NamespacedName]*Pool
	// ordered are the usable pools in the order in which pods use them, and holds the
	// hold labels of all.
	ordered []*Pool
	holds   map[string]bool
}

// source is a Reservation that was made by hand.
type source struct {
	uid      types.UID
	deleting bool
}

// NewPoolCache returns a cache without pools.
func NewPoolCache(clock clock.PassiveClock) *PoolCache {
	return &PoolCache{
		clock: clock, instructions: map[types.NamespacedName]*broker.ReservationInstruction{},
		sources: map[types.NamespacedName]source{}, pools: map[types.NamespacedName]*Pool{}, holds: map[string]bool{},
	}
}

// SetInstruction records an instruction, and reports whether a pool has changed.
func (c *PoolCache) SetInstruction(in *broker.ReservationInstruction) (changed bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	name := types.NamespacedName{Namespace: in.Namespace, Name: in.Name}
	c.instructions[name] = in
	return c.refresh(name)
}

// DeleteInstruction removes an instruction, with the result of SetInstruction.
func (c *PoolCache) DeleteInstruction(in *broker.ReservationInstruction) (changed bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	name := types.NamespacedName{Namespace: in.Namespace, Name: in.Name}
	delete(c.instructions, name)
	return c.refresh(name)
}

// SetReservation records a Reservation, with the result of SetInstruction. Those of the
// scheduler plugin are no pools.
func (c *PoolCache) SetReservation(r *broker.Reservation) (changed bool) {
	if _, keyed := demand.KeyOfReservation(r); keyed {
		return c.DeleteReservation(r)
	}
	return c.setSource(types.NamespacedName{Namespace: r.Namespace, Name: r.Name}, source{r.UID, r.DeletionTimestamp != nil})
}

// DeleteReservation removes a Reservation, with the result of SetInstruction.
func (c *PoolCache) DeleteReservation(r *broker.Reservation) (changed bool) {
	return c.setSource(types.NamespacedName{Namespace: r.Namespace, Name: r.Name}, source{})
}

func (c *PoolCache) setSource(name types.NamespacedName, now source) (changed bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.sources[name] == now {
		return false
	}
	if c.sources[name] = now; now == (source{}) {
		delete(c.sources, name)
	}
	for at, in := range c.instructions {
		if in.Spec.SourceNamespace == name.Namespace && in.Spec.SourceName == name.Name {
			changed = c.refresh(at) || changed
		}
	}
	return changed
}

// refresh computes the pool of an instruction again.
func (c *PoolCache) refresh(name types.NamespacedName) (changed bool) {
	before, after := c.pools[name], c.poolOf(c.instructions[name])
	if before != nil && after != nil {
		after.changedAt = before.changedAt
	}
	if reflect.DeepEqual(before, after) {
		return false
	}
	if after == nil {
		delete(c.pools, name)
	} else {
		after.changedAt = c.clock.Now()
		c.pools[name] = after
	}
	c.ordered, c.holds = nil, map[string]bool{}
	for _, p := range c.pools {
		c.holds[p.Hold] = true
		if p.usable() {
			c.ordered = append(c.ordered, p)
		}
	}
	slices.SortFunc(c.ordered, comparePools)
	return true
}

// PoolRanks is the number of different ranks.
const PoolRanks = 4

// Rank is the pool's place in the order in which pods use pools, from 0: those that
// fewest pods may use are first.
func (p *Pool) Rank() (n int64) {
	if p.selector.Empty() {
		n++
	}
	if p.fromHub {
		n += 2
	}
	return n
}

// comparePools orders the pools for pods.
func comparePools(a, b *Pool) int {
	return cmp.Or(cmp.Compare(a.Rank(), b.Rank()), cmp.Compare(a.Reservation, b.Reservation), cmp.Compare(a.Hold, b.Hold), cmp.Compare(a.Provider, b.Provider))
}

// poolOf is the pool of an instruction; nil if it is of the scheduler plugin. It has no
// capacity while its Reservation is being deleted or its provider has not accepted it
// again, and never more than both the grant and the virtual node.
func (c *PoolCache) poolOf(in *broker.ReservationInstruction) *Pool {
	if in == nil {
		return nil
	}
	spec := &in.Spec
	p := &Pool{
		Reservation: spec.ReservationName, Hold: charge.Label(spec.ReservationName), Provider: spec.TargetClusterID, Price: spec.PricePerHour,
		namespaces: spec.Namespaces, unmapped: in.Status.UnmappedNamespaces, fromHub: spec.FromHub(), selector: labels.Everything(),
		restricted: spec.PodSecurity == broker.PodSecurityRestricted,
	}
	usable := in.DeletionTimestamp == nil && !spec.Releasing && !spec.Suspended && in.Status.Carried != nil
	if !p.fromHub {
		from := c.sources[types.NamespacedName{Namespace: spec.SourceNamespace, Name: spec.SourceName}]
		if from.uid != spec.SourceUID {
			return nil
		}
		usable = usable && !from.deleting
		p.Reservation, p.namespaces = spec.SourceNamespace+"/"+spec.SourceName, []string{spec.SourceNamespace}
	}
	if spec.PodSelector != nil {
		selector, err := metav1.LabelSelectorAsSelector(spec.PodSelector)
		if err != nil {
			return p // it selects no pod
		}
		p.selector = selector
	}
	if !usable {
		return p
	}
	held := capacity.Min(broker.HeldCapacity{Totals: spec.RequestedResources, PodSets: spec.PodSets}, *in.Status.Carried)
	if len(spec.PodSets) == 0 {
		p.Totals = capacity.Floor(held.Totals.List())
		return p
	}
	for _, set := range slices.Backward(capacity.Decreasing(held.PodSets)) {
		p.places = append(p.places, place{PodNeed{Requests: capacity.Ceil(set.Requests.List()), set: set}, set.Count})
	}
	return p
}

// Of returns the usable pools for a pod of an opted-in namespace, in their order.
func (c *PoolCache) Of(pod *corev1.Pod) (pools []*Pool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	for _, p := range c.ordered {
		if p.serves(pod.Namespace) && p.selector.Matches(labels.Set(pod.Labels)) {
			pools = append(pools, p)
		}
	}
	return pools
}

// Has reports whether a hold is that of a pool.
func (c *PoolCache) Has(hold string) bool {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.holds[hold]
}

// All returns the usable pools.
func (c *PoolCache) All() []*Pool {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.ordered
}
