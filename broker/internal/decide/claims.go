package decide

import (
	"encoding/json"
	"slices"
	"sync"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

const (
	// maxClaims is the maximum number of requests for which one cluster keeps capacity free:
	// the first ones that could take any there.
	maxClaims = 64
	// maxChain is the maximum number of requests that are known to want capacity of one
	// cluster, with those that it refuses at present.
	maxChain = 2 * maxClaims
	// maxLinks is the number of prepared claims that Claims remembers. Each has the free
	// shapes of a cluster.
	maxLinks = 16 << 10
)

// Claims keeps capacity free for requests that come first. What it has computed for a
// cluster and the first n requests is computed once, as long as neither the cluster nor
// these requests change. The zero value is ready. It is safe for concurrent use.
type Claims struct {
	mu     sync.Mutex
	chains map[string]*chain
	// kinds of the requests that were compared, ids those of the kinds.
	kinds map[*Request]int
	ids   map[string]int
	// links is the number of links in all chains, made is how many requests were ever
	// compared with a cluster.
	links, made int
}

// chain is a cluster after the claims of the first requests, one after the other.
type chain struct {
	base *entry
	// compared are the first requests, of which the links are those that could take any
	// capacity of the cluster.
	compared []*Request
	links    []link
	// takes are the kinds of requests that were compared, and whether they could take any
	// capacity of it.
	takes map[int]bool
}

// link is a cluster after one more claim.
type link struct {
	// at is the position of the request.
	at int
	// allowed is whether the request may claim anything there now.
	allowed bool
	entry   *entry
}

// KeepFree is a snapshot in which each cluster keeps free what it could take of the
// requests ahead, the first one first, if it held nothing for others: of maxClaims at most,
// not counting those that it could take nothing of. It may end the claims on a cluster when
// no pod of want fits there any more. A request is known by its address, and neither it nor
// the list may change. mayAsk reports whether the i-th request may be placed in a cluster
// at present.
func (c *Claims) KeepFree(s Snapshot, ahead []*Request, want broker.HeldCapacity, mayAsk func(i int, cluster string) bool) Snapshot {
	if len(ahead) == 0 {
		return s
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.bound(s, len(ahead))
	k := keeper{Claims: c, snapshot: s, ahead: ahead, wanted: capacity.Requests(want), mayAsk: mayAsk, claimants: make([]*claimant, len(ahead))}
	s.entries = slices.Clone(s.entries)
	for at, e := range s.entries {
		// Another one is not chosen anyway.
		if active, fresh := s.activity(e.spec.ClusterID); active && fresh {
			s.entries[at] = k.claimed(e)
		}
	}
	return s
}

// keeper is one call of KeepFree.
type keeper struct {
	*Claims
	snapshot  Snapshot
	ahead     []*Request
	wanted    []capacity.Vector
	mayAsk    func(i int, cluster string) bool
	claimants []*claimant
	// former is a list that was compared before, of which the first common ones are the
	// same as those ahead.
	former []*Request
	common int
}

// claimed is a cluster after the claims of those ahead.
func (k *keeper) claimed(base *entry) *entry {
	cluster, known := base.spec.ClusterID, k.chain(base)
	if same := k.same(known.compared); same == len(k.ahead) || same < len(known.compared) {
		if same < len(k.ahead) {
			k.cut(known, same)
		}
	} else {
		// The same list for all clusters is compared once.
		known.compared = k.ahead[:same]
	}
	e, claims := base, 0
	for _, l := range known.links {
		if l.at >= len(k.ahead) || claims == maxClaims {
			return e
		}
		if l.allowed != k.mayAsk(l.at, cluster) {
			k.cut(known, l.at)
			break
		}
		if e = l.entry; l.allowed {
			claims++
		}
	}
	for at := len(known.compared); at < len(k.ahead) && claims < maxClaims && len(known.links) < maxChain; at++ {
		if !e.takes(k.wanted) {
			break
		}
		known.compared = k.ahead[:at+1]
		claim := k.couldTake(at, known)
		if claim.Empty() {
			continue
		}
		allowed := k.mayAsk(at, cluster)
		if allowed {
			e = e.claimed(claim)
			claims++
		}
		known.links = append(known.links, link{at, allowed, e})
		k.links++
	}
	return e
}

// same is how many of the requests that were compared are the first of those ahead.
func (k *keeper) same(compared []*Request) int {
	if len(compared) == 0 {
		return 0
	}
	if len(k.former) == 0 || &k.former[0] != &compared[0] || len(k.former) < len(compared) {
		k.former, k.common = compared, 0
		for k.common < min(len(compared), len(k.ahead)) && compared[k.common] == k.ahead[k.common] {
			k.common++
		}
	}
	return min(k.common, len(compared))
}

// couldTake is the part of a request ahead that a cluster could take.
func (k *keeper) couldTake(at int, known *chain) (claim broker.HeldCapacity) {
	request := k.ahead[at]
	if request.Pin != "" && request.Pin != known.base.spec.ClusterID {
		return claim
	}
	kind := k.kind(request)
	if takes, compared := known.takes[kind]; compared && !takes {
		return claim
	}
	k.made++
	if k.claimants[at] == nil {
		k.claimants[at] = newClaimant(request, k.snapshot.catalog)
	}
	claim = k.claimants[at].couldTake(known.base)
	known.takes[kind] = !claim.Empty()
	return claim
}

// Available is what is available, of the resources that a request wants, in the clusters
// that could take any of it if they held nothing for others, whatever is kept free there.
func (c *Claims) Available(s Snapshot, request *Request) capacity.Vector {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.bound(s, 0)
	kind, claims := c.kindOf(request), (*claimant)(nil)
	kinds, sum := capacity.Ceil(request.Want.Totals.List()), capacity.Vector{}
	for _, e := range s.entries {
		if active, _ := s.activity(e.spec.ClusterID); !active {
			continue
		}
		known := c.chain(e)
		takes, compared := known.takes[kind]
		if !compared {
			if claims == nil {
				claims = newClaimant(request, s.catalog)
			}
			c.made++
			takes = !claims.couldTake(e).Empty()
			known.takes[kind] = takes
		}
		if takes {
			e.prepare()
			for name := range kinds {
				sum.Add(capacity.Vector{name: e.account.Available[name]}, 1)
			}
		}
	}
	return sum
}

// bound forgets what was computed if that is too much, for a list of that many requests.
func (c *Claims) bound(s Snapshot, ahead int) {
	if c.chains == nil || c.links > maxLinks || len(c.chains) > 2*len(s.entries)+16 {
		c.chains, c.links = map[string]*chain{}, 0
	}
	if c.kinds == nil || len(c.kinds) > 4*ahead+maxLinks || len(c.ids) > maxLinks {
		c.chains, c.links = map[string]*chain{}, 0
		c.kinds, c.ids = map[*Request]int{}, map[string]int{}
	}
}

// chain is that of a cluster.
func (c *Claims) chain(base *entry) *chain {
	known := c.chains[base.spec.ClusterID]
	if known == nil || known.base != base {
		c.cut(known, 0)
		known = &chain{base: base, takes: map[int]bool{}}
		c.chains[base.spec.ClusterID] = known
	}
	return known
}

// kind is the kindOf of a request, which is computed once.
func (c *Claims) kind(request *Request) int {
	kind, known := c.kinds[request]
	if !known {
		kind = c.kindOf(request)
		c.kinds[request] = kind
	}
	return kind
}

// kindOf is the same for requests that differ in the number of pods only: no cluster could
// take a part of one and nothing of the other.
func (c *Claims) kindOf(request *Request) int {
	of := *request
	if len(of.Want.PodSets) > 0 && of.Budget == nil {
		of.Want = broker.HeldCapacity{PodSets: slices.Clone(of.Want.PodSets)}
		for i := range of.Want.PodSets {
			of.Want.PodSets[i].Count = min(of.Want.PodSets[i].Count, 1)
		}
	}
	// The types of the API always encode.
	key, _ := json.Marshal(of)
	kind, known := c.ids[string(key)]
	if !known {
		kind = len(c.ids)
		c.ids[string(key)] = kind
	}
	return kind
}

// takes reports whether any of the requests of pods fits in what is available.
func (e *entry) takes(requests []capacity.Vector) bool {
	e.prepare()
	return slices.ContainsFunc(requests, func(v capacity.Vector) bool { return v.FitsIn(e.account.Available) > 0 })
}

// cut makes a chain forget the requests from a position on.
func (c *Claims) cut(known *chain, from int) {
	if known == nil || from >= len(known.compared) {
		return
	}
	known.compared = known.compared[:from]
	keep := slices.IndexFunc(known.links, func(l link) bool { return l.at >= from })
	if keep >= 0 {
		c.links -= len(known.links) - keep
		known.links = slices.Delete(known.links, keep, len(known.links))
	}
}

// Made is how many requests were compared with a cluster so far.
func (c *Claims) Made() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.made
}

// CouldPlace reports whether the clusters that advertise could take at least as many pods
// of a request, and any of it at all, if they held nothing for others.
func CouldPlace(request Request, pods int32, snapshot Snapshot) bool {
	c := newClaimant(&request, snapshot.catalog)
	var could int32
	for _, e := range snapshot.entries {
		if active, _ := snapshot.activity(e.spec.ClusterID); !active {
			continue
		}
		claim := c.couldTake(e)
		could += claim.Pods()
		if !claim.Empty() && could >= pods {
			return true
		}
	}
	return false
}

// claimant is a request that is compared with what clusters could take.
type claimant struct {
	search
	// sets of the request, the largest pods first, as in the demand.
	sets   []broker.PodSet
	counts []int64
}

func newClaimant(request *Request, catalog *capacity.Catalog) *claimant {
	c := &claimant{sets: capacity.Decreasing(request.Want.PodSets)}
	c.request, c.units = *request, unitsOf(request.Want.Totals)
	c.activity = func(string) (active, fresh bool) { return true, true }
	c.prepareBudget()
	if catalog != nil {
		c.demand = capacity.NewDemand(catalog, request.Want)
		c.counts = make([]int64, c.demand.Shapes())
	}
	return c
}

// couldTake is the part of the request that a cluster could take if it held nothing for
// others and their guests had ended.
func (c *claimant) couldTake(e *entry) broker.HeldCapacity {
	if c.filter(e) != "" {
		return broker.HeldCapacity{}
	}
	e.prepare()
	unallocated := e.account.Allocatable.Minus(e.account.Allocated, 1)
	if slices.ContainsFunc(e.spec.ObservedHolds, func(o broker.ObservedHold) bool { return o.Pods > 0 }) {
		return c.couldTakeOf(e.spec, unallocated)
	}
	outcome := c.packer.Fit(c.demand, e.free.room, e.free.room.Amounts(unallocated), c.counts)
	switch {
	case len(c.sets) > 0:
		return c.withCounts()
	case outcome == capacity.FitsAll:
		return c.request.Want
	}
	return broker.HeldCapacity{}
}

// couldTakeOf is couldTake while guests run, of which only the sum is known: each pod must
// fit on the largest node of its class, and all together in the cluster.
func (c *claimant) couldTakeOf(spec *broker.ClusterAdvertisementSpec, unallocated capacity.Vector) broker.HeldCapacity {
	used := capacity.Vector{}
	for i := range spec.ObservedHolds {
		used.Add(capacity.Ceil(spec.ObservedHolds[i].Used.List()), 1)
	}
	fits := func(set broker.PodSet, request capacity.Vector) bool {
		return slices.ContainsFunc(spec.NodeClasses, func(class broker.NodeClass) bool {
			return capacity.Matches(&class, set) && (request == nil || request.FitsIn(largestNode(&class, used)) > 0)
		})
	}
	if len(c.sets) == 0 {
		if capacity.Ceil(c.request.Want.Totals.List()).FitsIn(unallocated) == 0 || !fits(broker.PodSet{}, nil) {
			return broker.HeldCapacity{}
		}
		return c.request.Want
	}
	for i, set := range c.sets {
		request := capacity.Ceil(set.Requests.List())
		c.counts[i] = min(int64(set.Count), request.FitsIn(unallocated))
		if c.counts[i] > 0 && !fits(set, request) {
			c.counts[i] = 0
		}
		unallocated = unallocated.Minus(request, c.counts[i])
	}
	return c.withCounts()
}

func (c *claimant) withCounts() broker.HeldCapacity {
	sets := slices.Clone(c.sets)
	for i := range sets {
		sets[i].Count = int32(c.counts[i])
	}
	return capacity.OfPodSets(sets)
}

// largestNode is what one node of a class has free at most when all guests have ended. If
// the advertisement does not say so, all of them may run on that node.
func largestNode(class *broker.NodeClass, used capacity.Vector) capacity.Vector {
	if class.LargestNode != nil {
		return capacity.Floor(class.LargestNode.List())
	}
	largest := capacity.Vector{}
	for i := range class.FreeShapes {
		for name, amount := range capacity.Floor(class.FreeShapes[i].Free.List()) {
			largest[name] = max(largest[name], amount)
		}
	}
	largest.Add(used, 1)
	return largest
}
