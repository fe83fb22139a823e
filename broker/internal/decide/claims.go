package decide

import (
	"slices"
	"sync"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// maxLinks is the number of prepared claims that Claims remembers. Each has the free
// shapes of a cluster.
const maxLinks = 16 << 10

// Claims keeps capacity free for requests that come first. What it has computed for a
// cluster and the first n requests is computed once, as long as neither the cluster nor
// these requests change. The zero value is ready. It is safe for concurrent use.
type Claims struct {
	mu     sync.Mutex
	chains map[string]*chain
	// links is the number of links in all chains, made is that of all that were ever made.
	links, made int
}

// chain is a cluster after the claims of the first requests, one after the other.
type chain struct {
	base  *entry
	links []link
}

// link is a cluster after one more claim.
type link struct {
	request *Request
	// allowed is whether the request may claim anything there now.
	allowed bool
	entry   *entry
}

// KeepFree is a snapshot in which each cluster keeps free what it could take of the
// requests ahead, the first one first, if it held nothing for others. It may end the
// claims on a cluster when no pod of want fits there any more. A request is known by its
// address, and must not change. mayAsk reports whether the i-th request may be placed in
// a cluster at present.
func (c *Claims) KeepFree(s Snapshot, ahead []*Request, want broker.HeldCapacity, mayAsk func(i int, cluster string) bool) Snapshot {
	if len(ahead) == 0 {
		return s
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.chains == nil || c.links > maxLinks || len(c.chains) > 2*len(s.entries)+16 {
		c.chains, c.links = map[string]*chain{}, 0
	}
	claimants, wanted := make([]*claimant, len(ahead)), capacity.Requests(want)
	s.entries = slices.Clone(s.entries)
	for at, e := range s.entries {
		cluster := e.spec.ClusterID
		if active, fresh := s.activity(cluster); !active || !fresh {
			// It is not chosen anyway.
			continue
		}
		known := c.chains[cluster]
		if known == nil || known.base != e {
			c.cut(known, 0)
			known = &chain{base: e}
			c.chains[cluster] = known
		}
		for i, request := range ahead {
			allowed := mayAsk(i, cluster)
			if i < len(known.links) && known.links[i].request == request && known.links[i].allowed == allowed {
				e = known.links[i].entry
				continue
			}
			if e.prepare(); !slices.ContainsFunc(wanted, func(v capacity.Vector) bool { return v.FitsIn(e.account.Available) > 0 }) {
				break
			}
			c.cut(known, i)
			if allowed {
				if claimants[i] == nil {
					claimants[i] = newClaimant(request, s.catalog)
				}
				if claim := claimants[i].couldTake(known.base); !claim.Empty() {
					e = e.claimed(claim)
				}
			}
			known.links = append(known.links, link{request, allowed, e})
			c.links++
			c.made++
		}
		s.entries[at] = e
	}
	return s
}

// cut removes the links of a chain from a position on.
func (c *Claims) cut(known *chain, from int) {
	if known != nil && from < len(known.links) {
		c.links -= len(known.links) - from
		known.links = slices.Delete(known.links, from, len(known.links))
	}
}

// Made is the number of claims that were computed so far.
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
