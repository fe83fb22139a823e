package decide

import (
	"math"
	"slices"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// KeepFree is a snapshot in which each cluster keeps free what it could take of a request
// if it held nothing for others. Those that must not be chosen for the request at present
// keep nothing free. The request is known by its address, and must not change; nil for none.
func (s Snapshot) KeepFree(first *Request, rejected map[string]capacity.Rejection) Snapshot {
	if first == nil {
		return s
	}
	var c *claimant
	shares, _ := s.shares(first, rejected)
	s.entries = slices.Clone(s.entries)
	for at, e := range s.entries {
		if _, refuses := rejected[e.spec.ClusterID]; refuses {
			continue
		}
		share := int64(math.MaxInt32)
		if shares != nil {
			share = shares[at].pods
		}
		beside := e.beside.Load()
		if beside == nil || beside.request != first || beside.share != share {
			if c == nil {
				c = newClaimant(first, s.catalog)
			}
			beside = &keptFree{first, share, e}
			claim := c.couldTake(e)
			if shares != nil {
				claim = capacity.First(claim, int32(share))
			}
			if !claim.Empty() {
				beside.entry = e.claimed(claim)
			}
			e.beside.Store(beside)
		}
		s.entries[at] = beside.entry
	}
	return s
}

// keptFree is a cluster beside what it keeps free for a request.
type keptFree struct {
	request *Request
	// share of a request with a spread.
	share int64
	entry *entry
}

// CouldTake reports whether the clusters that advertise could take at least as many pods
// of a request, and any of it at all, if they held nothing for others.
func (s Snapshot) CouldTake(request Request, pods int32) bool {
	if shares, all := s.shares(&request, nil); shares != nil {
		return all >= int64(max(pods, 1))
	}
	c := newClaimant(&request, s.catalog)
	var most []int
	for _, e := range s.entries {
		if active, _ := s.activity.of(e.spec.ClusterID); !active {
			continue
		}
		claim := c.couldTake(e)
		if claim.Empty() {
			continue
		}
		most = insert(most, int(claim.Pods()), MaxProviders, func(a, b int) int { return b - a })
		sum := 0
		for _, n := range most {
			sum += n
		}
		if sum >= int(pods) {
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
	c.request = *request
	c.activity = Activity(nil).of
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
	if held, holds := c.request.Held[e.spec.ClusterID]; holds && c.spread != nil { // what it holds itself stays
		unallocated = unallocated.Minus(capacity.Ceil(held.Totals.List()), 1)
	}
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
		return slices.ContainsFunc(capacity.ClassesOf(spec), func(class broker.NodeClass) bool {
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
