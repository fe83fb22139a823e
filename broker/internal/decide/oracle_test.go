package decide_test

import (
	"cmp"
	"fmt"
	"maps"
	"math/big"
	"slices"
	"strconv"
	"strings"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	scheduling "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/guest"
	"github.com/spillway-dev/spillway/broker/internal/decide"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
	"github.com/spillway-dev/spillway/broker/internal/pricing"
	"github.com/spillway-dev/spillway/broker/text"
)

// The oracle is the straightforward implementation that package decide is compared
// with: one cluster after the other, in amounts as Kubernetes writes them, with all
// reasons.

// oracleCluster is what is known of one cluster.
type oracleCluster struct {
	Spec  broker.ClusterAdvertisementSpec
	Holds []broker.Hold
	// Active is whether it advertises; Fresh whether its last advertisement is
	// recent enough for a new placement.
	Active, Fresh bool
}

// oracleSnapshot is what is known of all clusters.
type oracleSnapshot struct {
	Clusters []oracleCluster
}

// oracleDecision is the outcome of a request.
type oracleDecision struct {
	// Cluster that was chosen; "" if not even one pod fits anywhere.
	Cluster string
	// Placement is what fits there; Complete whether that is all of the request.
	Placement broker.HeldCapacity
	Complete  bool
	// Scores of the clusters that were compared, best first.
	Scores []broker.ClusterScore
	// Rejections of all clusters but the chosen one, by cluster ID.
	Rejections []broker.ClusterRejection
}

// oracleChoose picks the cluster with the best score among those where all of the
// request fits, or, if there is none, the one where most pods fit. Ties go to the
// better score, then to the first by cluster ID. An empty request chooses none.
func oracleChoose(request decide.Request, snapshot oracleSnapshot) oracleDecision {
	if request.Want.Empty() {
		return oracleDecision{}
	}
	clusters := slices.SortedFunc(slices.Values(snapshot.Clusters), func(a, b oracleCluster) int { return cmp.Compare(a.Spec.ClusterID, b.Spec.ClusterID) })
	var decision oracleDecision
	var offers []*offer
	for i := range clusters {
		cluster := &clusters[i]
		if rejection := filter(&request, cluster); rejection != nil {
			decision.reject(cluster, rejection)
		} else if offer := fit(&request, cluster); offer.placed.Empty() {
			decision.reject(cluster, offer.rejection)
		} else {
			offers = append(offers, offer)
		}
	}

	candidates := slices.DeleteFunc(slices.Clone(offers), func(o *offer) bool { return !o.complete() })
	if len(candidates) == 0 {
		candidates = offers
	}
	var latencies []broker.ProviderLatency
	for _, c := range clusters {
		if c.Spec.ClusterID == request.Requester {
			latencies = c.Spec.Latencies
		}
	}
	score(&request, latencies, candidates)
	slices.SortStableFunc(candidates, func(a, b *offer) int {
		return cmp.Or(
			cmp.Compare(b.placed.Pods(), a.placed.Pods()),
			cmp.Compare(group(&request, a.cluster), group(&request, b.cluster)),
			cmp.Compare(b.score, a.score),
			cmp.Compare(a.cluster.Spec.ClusterID, b.cluster.Spec.ClusterID),
		)
	})
	if len(candidates) > 0 {
		best := candidates[0]
		decision.Cluster, decision.Placement, decision.Complete = best.cluster.Spec.ClusterID, best.placed, best.complete()
		for _, o := range candidates {
			decision.Scores = append(decision.Scores, broker.ClusterScore{Cluster: o.cluster.Spec.ClusterID, Score: o.score.String()})
		}
		for _, o := range offers {
			if o != best {
				decision.reject(o.cluster, compare(&request, o, best))
			}
		}
	}
	slices.SortFunc(decision.Rejections, func(a, b broker.ClusterRejection) int { return cmp.Compare(a.Cluster, b.Cluster) })
	return decision
}

func (d *oracleDecision) reject(cluster *oracleCluster, r *capacity.Rejection) {
	d.Rejections = append(d.Rejections, broker.ClusterRejection{Cluster: cluster.Spec.ClusterID, Reason: r.Reason, Message: r.Message})
}

// compare explains why best was chosen and not o.
func compare(request *decide.Request, o, best *offer) *capacity.Rejection {
	preferred := ""
	if at := group(request, best.cluster); at < group(request, o.cluster) {
		preferred = fmt.Sprintf(" It is in group %d of placement.preferredProviders.", at+1)
	}
	switch chosen := best.cluster.Spec.ClusterID; {
	case o.complete():
		return reject(decide.ReasonNotPreferred, "The request fits with score %s; %s was chosen with score %s.%s", o.score, chosen, best.score, preferred)
	case o.placed.Pods() == best.placed.Pods() && !best.complete():
		return reject(decide.ReasonNotPreferred, "As many pods fit as in %s, which was chosen with score %s against %s.%s %s", chosen, best.score, o.score, preferred, o.rejection.Message)
	}
	return o.rejection
}

// group is the first of the preferred ones that a cluster is in, and their number for none.
func group(request *decide.Request, cluster *oracleCluster) int {
	if request.Placement == nil {
		return 0
	}
	in := func(all []string, one string) bool { return len(all) == 0 || slices.Contains(all, one) }
	for at, g := range request.Placement.PreferredProviders {
		if in(g.Clusters, cluster.Spec.ClusterID) && in(g.Regions, cluster.Spec.Region) && in(g.Zones, cluster.Spec.Zone) {
			return at
		}
	}
	return len(request.Placement.PreferredProviders)
}

// filters reject a cluster for what has nothing to do with its free capacity.
// The first rejection counts.
var filters = []func(*decide.Request, *oracleCluster) *capacity.Rejection{
	notRequester,
	admitsConsumer,
	isActive,
	isFresh,
	isPinned,
	matchesPlacement,
	isNotRejected,
	isWithinBudget,
}

func filter(request *decide.Request, cluster *oracleCluster) *capacity.Rejection {
	for _, f := range filters {
		if rejection := f(request, cluster); rejection != nil {
			return rejection
		}
	}
	return nil
}

func reject(reason, format string, args ...any) *capacity.Rejection {
	return &capacity.Rejection{Reason: reason, Message: fmt.Sprintf(format, args...)}
}

func notRequester(request *decide.Request, cluster *oracleCluster) *capacity.Rejection {
	if cluster.Spec.ClusterID == request.Requester {
		return reject(decide.ReasonRequesterItself, "The cluster is the requester itself.")
	}
	return nil
}

func admitsConsumer(request *decide.Request, cluster *oracleCluster) *capacity.Rejection {
	return capacity.Admit(cluster.Spec.Lending, request.Requester, request.Want.PodSets)
}

func isActive(_ *decide.Request, cluster *oracleCluster) *capacity.Rejection {
	if !cluster.Active {
		return reject(decide.ReasonClusterInactive, "The cluster has stopped advertising. Check that its agent runs and reaches the broker.")
	}
	return nil
}

func isFresh(_ *decide.Request, cluster *oracleCluster) *capacity.Rejection {
	if !cluster.Fresh {
		return reject(decide.ReasonAdvertisementTooOld, "The last advertisement is too old for a placement. The cluster is considered again with its next advertisement.")
	}
	return nil
}

func isPinned(request *decide.Request, cluster *oracleCluster) *capacity.Rejection {
	if request.Pin != "" && request.Pin != cluster.Spec.ClusterID {
		return reject(decide.ReasonPinnedElsewhere, "The Reservation is pinned to %s (targetClusterID).", request.Pin)
	}
	return nil
}

func matchesPlacement(request *decide.Request, cluster *oracleCluster) *capacity.Rejection {
	placement := request.Placement
	if placement == nil {
		return nil
	}
	outside := func(allowed []string, where string) bool { return len(allowed) > 0 && !slices.Contains(allowed, where) }
	switch {
	case slices.Contains(placement.ExcludeClusters, cluster.Spec.ClusterID):
		return reject(decide.ReasonExcluded, "The placement excludes the cluster (excludeClusters).")
	case outside(placement.Regions, cluster.Spec.Region):
		return reject(decide.ReasonOtherRegion, "The region is %q; the placement allows %s.", cluster.Spec.Region, strings.Join(placement.Regions, ", "))
	case outside(placement.Zones, cluster.Spec.Zone):
		return reject(decide.ReasonOtherZone, "The zone is %q; the placement allows %s.", cluster.Spec.Zone, strings.Join(placement.Zones, ", "))
	}
	return nil
}

func isNotRejected(request *decide.Request, cluster *oracleCluster) *capacity.Rejection {
	if rejection, rejected := request.Rejected[cluster.Spec.ClusterID]; rejected {
		return &rejection
	}
	return nil
}

func isWithinBudget(request *decide.Request, cluster *oracleCluster) *capacity.Rejection {
	if request.Budget == nil {
		return nil
	}
	limit, ok := new(big.Rat).SetString(request.Budget.MaxPricePerHour)
	if !ok {
		return reject(decide.ReasonOverBudget, "The budget's maxPricePerHour %q is not a decimal number.", request.Budget.MaxPricePerHour)
	}
	price, currency, known := pricing.Of(cluster.Spec.Cost, request.Want.Totals)
	switch {
	case !known:
		var missing []string
		for name, quantity := range request.Want.Totals.List() {
			cost := ptr.Deref(cluster.Spec.Cost, broker.Cost{})
			price := map[corev1.ResourceName]string{corev1.ResourceCPU: cost.CPUCost, corev1.ResourceMemory: cost.MemoryCost, broker.ResourceGPU: cost.GPUCost, corev1.ResourceEphemeralStorage: cost.StorageCost}
			if !quantity.IsZero() && price[name] == "" {
				missing = append(missing, string(name))
			}
		}
		slices.Sort(missing)
		return reject(decide.ReasonPriceUnknown, "The cluster advertises no price of %s, and the request has a budget.", strings.Join(missing, ", "))
	case currency != request.Budget.Currency:
		return reject(decide.ReasonPriceUnknown, "The price is in %s, the budget in %s.", currency, request.Budget.Currency)
	}
	if request.Committed != nil {
		price = new(big.Rat).Add(price, request.Committed)
	}
	if price.Cmp(limit) > 0 {
		return reject(decide.ReasonOverBudget, "The price is %s per hour; the budget is %s.",
			text.Price(price, currency), text.Price(limit, request.Budget.Currency))
	}
	return nil
}

// offer is the part of a request that fits in one cluster.
type offer struct {
	cluster *oracleCluster
	account oracleAccount
	placed  broker.HeldCapacity
	// rejection explains why not all of the request fits, nil if all does.
	rejection *capacity.Rejection
	score     capacity.Score
}

func (o *offer) complete() bool { return o.rejection == nil }

// fit packs a request into a cluster's free capacity, after all that its holds
// may still claim there.
func fit(request *decide.Request, cluster *oracleCluster) *offer {
	_, available := ledger.Account(&cluster.Spec, &broker.ClusterAdvertisementStatus{Holds: cluster.Holds})
	o := &offer{cluster: cluster, account: oracleAccount{
		Allocatable: capacity.Floor(cluster.Spec.Resources.Allocatable.List()),
		Available:   capacity.Floor(available.List()),
	}}
	packer := newOraclePacker(oracleSlots(cluster.Spec.NodeClasses))
	packer.Reserve(unused(cluster))
	o.placed, o.rejection = packer.Pack(request.Want, &o.account)
	return o
}

// unused is what holds are charged for and guests do not use yet: what guests
// use is not advertised as free.
func unused(cluster *oracleCluster) (sets []broker.PodSet, total capacity.Vector) {
	holds := slices.SortedStableFunc(slices.Values(cluster.Holds), func(a, b broker.Hold) int {
		return cmp.Or(cmp.Compare(a.Requester, b.Requester), cmp.Compare(a.ReservationName, b.ReservationName))
	})
	total = capacity.Vector{}
	for len(holds) > 0 {
		requester := holds[0].Requester
		var held []broker.PodSet
		divisible := capacity.Vector{}
		for ; len(holds) > 0 && holds[0].Requester == requester; holds = holds[1:] {
			charged := ledger.Charged(holds[0])
			if held = append(held, charged.PodSets...); len(charged.PodSets) == 0 {
				divisible.Add(capacity.Ceil(charged.Totals.List()), 1)
			}
		}
		held = capacity.Decreasing(held)
		running, unattributed := attribute(held, cluster, requester)
		for i := range held {
			held[i].Count -= int32(running[i])
		}
		sets = append(sets, held...)
		total.Add(divisible.Minus(unattributed, 1), 1)
	}
	return sets, total
}

// attribute reports how many pods of each set (in decreasing order) are among a
// consumer's guests, of which only the number and the sum are known, and how
// much of what they use belongs to no set. If no attribution is exact, the guests
// are attributed to the smaller pods, so that the larger claims stay.
func attribute(sets []broker.PodSet, cluster *oracleCluster, requester string) (running []int64, rest capacity.Vector) {
	used, guests := capacity.Vector{}, int64(0)
	for _, hold := range cluster.Spec.ObservedHolds {
		if hold.Requester == requester {
			guests += int64(hold.Pods)
			used.Add(capacity.Floor(hold.Used.List()), 1)
		}
	}
	try := func(order []int) (running []int64, rest capacity.Vector, exact bool) {
		running, rest = make([]int64, len(sets)), used
		left := guests
		for _, i := range order {
			request := capacity.Ceil(sets[i].Requests.List())
			n := min(left, int64(sets[i].Count), request.FitsIn(rest))
			running[i], rest, left = n, rest.Minus(request, n), left-n
		}
		return running, rest, left == 0 && rest.IsZero()
	}
	order := make([]int, len(sets))
	for i := range order {
		order[i] = i
	}
	if running, rest, exact := try(order); exact {
		return running, rest
	}
	slices.Reverse(order)
	running, rest, _ = try(order)
	return running, rest
}

// score rates the offers against each other: by what is left of the requested
// resources after the placement, by price, by kept promises, and by latency.
func score(request *decide.Request, latencies []broker.ProviderLatency, offers []*offer) {
	weights := request.Weights
	if weights == (broker.ScoreWeights{}) {
		weights = decide.DefaultWeights
	}
	cheapness, closeness := cheapness(request, offers), closeness(latencies, offers)
	for i, o := range offers {
		placed := capacity.Ceil(o.placed.Totals.List())
		share := capacity.AvailableShare(placed.Kinds(), o.account.Available.Minus(placed, 1), o.account.Allocatable)
		reliability := request.Records[o.cluster.Spec.ClusterID].Reliability()
		o.score = capacity.NewScore(float64(weights.Resources)*share + float64(weights.Cost)*cheapness[i] + float64(weights.Reliability)*reliability + float64(weights.Latency)*closeness[i])
	}
}

// cheapness is 1 for the cheapest offer and 0 for the dearest, by the price of
// all that is requested. It is one half where the price is unknown, and everywhere
// if the prices are in several currencies.
func cheapness(request *decide.Request, offers []*offer) []float64 {
	prices := map[int]float64{}
	currencies := map[string]bool{}
	for i, o := range offers {
		if _, currency, known := pricing.Of(o.cluster.Spec.Cost, request.Want.Totals); known {
			prices[i] = approximatePrice(o.cluster.Spec.Cost, request.Want.Totals)
			currencies[currency] = true
		}
	}
	if len(currencies) > 1 {
		clear(prices)
	}
	return lowest(prices, len(offers))
}

// closeness is 1 for an offer without latency, one half for 50 ms, less for more, and one half where
// it is unknown.
func closeness(latencies []broker.ProviderLatency, offers []*offer) []float64 {
	out := slices.Repeat([]float64{0.5}, len(offers))
	for i, o := range offers {
		for _, l := range latencies {
			if l.Cluster == o.cluster.Spec.ClusterID {
				out[i] = 1 / (1 + float64(l.Milliseconds)/50)
			}
		}
	}
	return out
}

func lowest(known map[int]float64, n int) []float64 {
	out := slices.Repeat([]float64{0.5}, n)
	if len(known) == 0 {
		return out
	}
	all := slices.Collect(maps.Values(known))
	lowest, highest := slices.Min(all), slices.Max(all)
	for i, figure := range known {
		out[i] = 1
		if highest-lowest > 1e-9*highest {
			out[i] = (highest - figure) / (highest - lowest)
		}
	}
	return out
}

// approximatePrice is a price in floating point.
func approximatePrice(cost *broker.Cost, amount broker.ResourceQuantities) (price float64) {
	add := func(each string, quantity *resource.Quantity, unit float64) {
		if rate, err := strconv.ParseFloat(each, 64); err == nil && quantity != nil {
			price += rate * (quantity.AsApproximateFloat64() / unit)
		}
	}
	add(cost.CPUCost, amount.CPU, 1)
	add(cost.MemoryCost, amount.Memory, 1<<30)
	add(cost.GPUCost, amount.GPU, 1)
	add(cost.StorageCost, amount.Storage, 1<<30)
	return price
}

// oracleSlot is a number of nodes that have the same free capacity each.
type oracleSlot struct {
	// Class has the nodes' labels, taints and architecture. Its name breaks ties
	// between equal amounts.
	Class *broker.NodeClass
	// Node is the node's name where the slot is one node.
	Node string
	// Nodes is how many nodes there are.
	Nodes int64
	// Free is what one node has free, and Pods how many more pods it may run.
	Free capacity.Vector
	Pods int64
}

// Slots are the free shapes of node classes. A class without shapes is one node
// that may run no more pods.
func oracleSlots(classes []broker.NodeClass) []oracleSlot {
	var slots []oracleSlot
	for i := range classes {
		class := &classes[i]
		if len(class.FreeShapes) == 0 {
			slots = append(slots, oracleSlot{Class: class, Nodes: 1, Free: capacity.Vector{}})
		}
		for _, shape := range class.FreeShapes {
			if shape.Nodes > 0 {
				slots = append(slots, oracleSlot{Class: class, Nodes: int64(shape.Nodes), Free: capacity.Floor(shape.Free.List()), Pods: int64(shape.Pods)})
			}
		}
	}
	return slots
}

// oraclePacker places pods into slots: each pod on the fullest node that takes it,
// ties by class. What is placed is taken from the free capacity. Equal nodes
// stay together, so that the cost grows with the number of slots and not of
// nodes. The same slots and calls give the same answer whether equal nodes are
// one slot or several.
type oraclePacker struct {
	// slots, the fullest first.
	slots []oracleSlot
}

// newOraclePacker makes a oraclePacker. It does not change the slots.
func newOraclePacker(slots []oracleSlot) *oraclePacker {
	slots = slices.Clone(slots)
	slices.SortStableFunc(slots, compareSlots)
	return &oraclePacker{slots: slots}
}

func compareSlots(a, b oracleSlot) int {
	return cmp.Or(capacity.Compare(a.Free, b.Free), cmp.Compare(a.Pods, b.Pods), cmp.Compare(a.Class.Name, b.Class.Name))
}

// Place places up to count pods of a set and returns how many fit.
func (p *oraclePacker) Place(set broker.PodSet, count int64) (placed int64) {
	if count <= 0 {
		return 0
	}
	request, mismatch := capacity.Ceil(set.Requests.List()), matcher(set)
	kept, changed := make([]oracleSlot, 0, len(p.slots)), []oracleSlot(nil)
	for i, slot := range p.slots {
		if placed == count {
			kept = append(kept, p.slots[i:]...)
			break
		}
		each := min(slot.Pods, request.FitsIn(slot.Free))
		n := min(count-placed, each*slot.Nodes)
		if n <= 0 || mismatch(&slot) != "" {
			kept = append(kept, slot)
			continue
		}
		placed += n
		add := func(to *[]oracleSlot, nodes, pods int64) {
			if nodes > 0 {
				part := slot
				part.Nodes, part.Free, part.Pods = nodes, slot.Free.Minus(request, pods), slot.Pods-pods
				*to = append(*to, part)
			}
		}
		full, partly := n/each, min(n%each, 1)
		add(&changed, full, each)
		add(&changed, partly, n%each)
		add(&kept, slot.Nodes-full-partly, 0)
	}
	p.slots = merge(kept, changed)
	return placed
}

// spread takes a divisible total from the nodes that accept any pod, the fullest
// first, as far as it is there.
func (p *oraclePacker) spread(total capacity.Vector) {
	if total.IsZero() {
		return
	}
	left, mismatch := maps.Clone(total), matcher(broker.PodSet{})
	var kept, changed []oracleSlot
	for _, slot := range p.slots {
		for slot.Nodes > 0 && slot.Pods > 0 && mismatch(&slot) == "" {
			taken, nodes := capacity.Vector{}, slot.Nodes
			for name, amount := range left {
				if part := min(amount, slot.Free[name]); part > 0 {
					taken[name], nodes = part, min(nodes, amount/part)
				}
			}
			if len(taken) == 0 {
				break
			}
			left = left.Minus(taken, nodes)
			part := slot
			part.Nodes, part.Free = nodes, slot.Free.Minus(taken, 1)
			changed = append(changed, part)
			slot.Nodes -= nodes
		}
		if slot.Nodes > 0 {
			kept = append(kept, slot)
		}
	}
	p.slots = merge(kept, changed)
}

// merge sorts changed slots into those that are kept, which are sorted.
func merge(kept, changed []oracleSlot) []oracleSlot {
	if len(changed) == 0 {
		return kept
	}
	slices.SortStableFunc(changed, compareSlots)
	out := make([]oracleSlot, 0, len(kept)+len(changed))
	for _, slot := range changed {
		n := slices.IndexFunc(kept, func(k oracleSlot) bool { return compareSlots(k, slot) > 0 })
		if n < 0 {
			n = len(kept)
		}
		out, kept = append(append(out, kept[:n]...), slot), kept[n:]
	}
	return append(out, kept...)
}

// Reserve takes promised capacity from what is free, as far as it is there: pod
// sets, the largest pods first, then a divisible total.
func (p *oraclePacker) Reserve(sets []broker.PodSet, total capacity.Vector) {
	for _, set := range capacity.Decreasing(sets) {
		p.Place(set, int64(set.Count))
	}
	p.spread(total)
}

// Pack places as much of a capacity as fits beside what is reserved: pod sets,
// the largest pods first, or a divisible total, of which all fits or nothing.
// The rejection explains what does not fit; it is nil if all does. With an
// account, no more is placed than is available by it.
func (p *oraclePacker) Pack(want broker.HeldCapacity, account *oracleAccount) (placed broker.HeldCapacity, rejection *capacity.Rejection) {
	if len(want.PodSets) == 0 {
		if rejection = p.rejectTotal(capacity.Ceil(want.Totals.List()), account); rejection == nil {
			placed = *want.DeepCopy()
		}
		return placed, rejection
	}
	var shortages []shortage
	for _, set := range capacity.Decreasing(want.PodSets) {
		request, count := capacity.Ceil(set.Requests.List()), int64(set.Count)
		if account != nil {
			count = min(count, request.FitsIn(account.Available))
		}
		fit := p.Place(set, count)
		if account != nil {
			account = account.less(request, fit)
		}
		if fit < int64(set.Count) {
			shortages = append(shortages, p.shortage(set, fit, account))
		}
		set.Count = int32(fit)
		placed.PodSets = append(placed.PodSets, set)
	}
	slices.SortFunc(placed.PodSets, func(a, b broker.PodSet) int { return cmp.Compare(a.Name, b.Name) })
	placed = capacity.OfPodSets(placed.PodSets)
	return placed, rejectPods(placed, shortages)
}

// divisible is what the nodes that accept any pod have free together.
func (p *oraclePacker) divisible() capacity.Vector {
	sum, mismatch := capacity.Vector{}, matcher(broker.PodSet{})
	for _, slot := range p.slots {
		if slot.Pods > 0 && mismatch(&slot) == "" {
			sum.Add(slot.Free, slot.Nodes)
		}
	}
	return sum
}

// matcher returns a function that reports why the nodes of a slot cannot run pods
// of a set, "" if they can. Each class is matched once.
func matcher(set broker.PodSet) func(*oracleSlot) string {
	var affinity *nodeaffinity.LazyErrorNodeSelector
	if set.NodeAffinity != nil {
		affinity = nodeaffinity.NewLazyErrorNodeSelector(set.NodeAffinity)
	}
	known := map[*broker.NodeClass]string{}
	return func(slot *oracleSlot) string {
		why, ok := known[slot.Class]
		if !ok {
			why = mismatch(slot, set, affinity)
			known[slot.Class] = why
		}
		return why
	}
}

func mismatch(slot *oracleSlot, set broker.PodSet, affinity *nodeaffinity.LazyErrorNodeSelector) string {
	labels := slot.Class.Labels
	if _, ok := labels[corev1.LabelArchStable]; !ok && slot.Class.Arch != "" {
		labels = map[string]string{corev1.LabelArchStable: slot.Class.Arch}
		maps.Copy(labels, slot.Class.Labels)
	}
	for _, key := range slices.Sorted(maps.Keys(set.NodeSelector)) {
		if have, ok := labels[key]; !ok || have != set.NodeSelector[key] {
			return fmt.Sprintf("label %s=%s is missing", key, set.NodeSelector[key])
		}
	}
	if affinity != nil {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: slot.Node, Labels: labels}}
		if match, err := affinity.Match(node); err != nil {
			return "the node affinity is invalid: " + err.Error()
		} else if !match {
			return "the node affinity does not match"
		}
	}
	// The guest requires both, whether or not its pod selects them.
	if arch, ok := labels[corev1.LabelArchStable]; ok && arch != guest.Arch {
		return fmt.Sprintf("the architecture is %s, and only %s pods can overflow", arch, guest.Arch)
	}
	if system, ok := labels[corev1.LabelOSStable]; ok && system != guest.OS {
		return fmt.Sprintf("the operating system is %s, and only %s pods can overflow", system, guest.OS)
	}
	taint, untolerated := scheduling.FindMatchingUntoleratedTaint(logr.Discard(), slot.Class.Taints, guest.Tolerations(set.Tolerations), func(t *corev1.Taint) bool {
		return t.Effect == corev1.TaintEffectNoSchedule || t.Effect == corev1.TaintEffectNoExecute
	}, false)
	if untolerated {
		return "taint " + taint.ToString() + " is not tolerated"
	}
	return ""
}

// oracleAccount is the ledger's account of a cluster.
type oracleAccount struct{ Allocatable, Available capacity.Vector }

func (a *oracleAccount) less(amount capacity.Vector, n int64) *oracleAccount {
	out := *a
	out.Available = a.Available.Minus(amount, n)
	return &out
}

// insufficient words the lack of each resource that is requested and not available, with
// the amount unless it is what nodes have free: then where names them.
func insufficient(request, available capacity.Vector, where string) string {
	var lacks []string
	for _, name := range request.Kinds() {
		if request[name] <= available[name] {
			continue
		}
		lack := capacity.Insufficient(name, oracleFormat(request, name), oracleFormat(available, name))
		if where != "" {
			lack = fmt.Sprintf("Insufficient %s on %s: requested %s", name, where, oracleFormat(request, name))
		}
		lacks = append(lacks, lack)
	}
	return strings.Join(lacks, "; ") + "."
}

func (p *oraclePacker) rejectTotal(total capacity.Vector, account *oracleAccount) *capacity.Rejection {
	if account != nil && total.FitsIn(account.Available) == 0 {
		return &capacity.Rejection{Reason: capacity.ReasonInsufficientCapacity, Message: insufficient(total, account.Available, "")}
	}
	if free := p.divisible(); total.FitsIn(free) == 0 {
		return &capacity.Rejection{Reason: capacity.ReasonInsufficientCapacity, Message: insufficient(total, free, "the nodes without taints")}
	}
	return nil
}

// maxMismatches is how many reasons why nodes do not match a message lists: there may
// be as many as nodes.
const maxMismatches = 3

// shortage explains why not all pods of a set fit.
type shortage struct{ reason, message string }

// shortage explains why not one more pod of a set fits.
func (p *oraclePacker) shortage(set broker.PodSet, fit int64, account *oracleAccount) shortage {
	reason, why := capacity.ReasonInsufficientCapacity, "No node is available."
	request, mismatch := capacity.Ceil(set.Requests.List()), matcher(set)
	var largest *oracleSlot
	var mismatches []string
	for i := range p.slots {
		slot := &p.slots[i]
		if m := mismatch(slot); m == "" && (largest == nil || oracleLarger(request, slot, largest)) {
			largest = slot
		} else if m != "" && !slices.Contains(mismatches, m) {
			mismatches = append(mismatches, m)
		}
	}
	switch {
	case largest == nil && len(mismatches) > 0:
		slices.Sort(mismatches)
		if more := len(mismatches) - maxMismatches; more > 0 {
			mismatches = append(mismatches[:maxMismatches], fmt.Sprintf("and %d other reasons", more))
		}
		reason, why = capacity.ReasonNoMatchingNodes, "No node matches: "+strings.Join(mismatches, ", ")+"."
	case account != nil && request.FitsIn(account.Available) == 0:
		why = insufficient(request, account.Available, "")
	case largest != nil && largest.Pods == 0:
		why = "Too many pods: every matching node runs its maximum number of pods."
	case largest != nil:
		why = insufficient(request, largest.Free, "one node")
	}
	return shortage{reason, fmt.Sprintf("%d of %d pods of pod set %q fit. %s", fit, set.Count, set.Name, why)}
}

// oracleLarger reports whether a has more free than b of what is requested. A node
// that may run no more pods is smaller than any other.
func oracleLarger(request capacity.Vector, a, b *oracleSlot) bool {
	if (a.Pods > 0) != (b.Pods > 0) {
		return a.Pods > 0
	}
	for _, name := range request.Kinds() {
		if c := cmp.Compare(a.Free[name], b.Free[name]); c != 0 {
			return c > 0
		}
	}
	return false
}

func oracleFormat(v capacity.Vector, name corev1.ResourceName) string {
	amount, ok := v.List()[name]
	if !ok {
		amount = capacity.Vector{name: 0}.List()[name]
	}
	return amount.String()
}

// rejectPods sums up shortages, nil if there are none.
func rejectPods(placed broker.HeldCapacity, shortages []shortage) *capacity.Rejection {
	if len(shortages) == 0 {
		return nil
	}
	reason := capacity.ReasonInsufficientCapacity
	switch {
	case !placed.Empty():
		reason = capacity.ReasonPartialCapacity
	case slices.ContainsFunc(shortages, func(s shortage) bool { return s.reason == capacity.ReasonNoMatchingNodes }):
		reason = capacity.ReasonNoMatchingNodes
	}
	var messages []string
	for _, s := range shortages {
		messages = append(messages, s.message)
	}
	slices.Sort(messages)
	return &capacity.Rejection{Reason: reason, Message: strings.Join(messages, " ")}
}
