package decide

import (
	"math/big"
	"slices"
	"sync"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
	"github.com/spillway-dev/spillway/broker/internal/spread"
)

// search is a request that is compared with all clusters. Its memory is used again by
// later ones.
type search struct {
	request  Request
	catalog  *capacity.Catalog
	activity func(cluster string) (active, fresh bool)
	entries  []*entry
	// unreachable are the clusters that the requester reports as such.
	unreachable []string
	// latencies are those that it has measured.
	latencies []broker.ProviderLatency
	// own is whether the entries are not those of the snapshot any more.
	own bool

	demand *capacity.Demand
	units  units
	// limit is the request's budget without what is committed; nil if it is not a number.
	limit *big.Rat
	// spread is nil for a request without one, dear are the clusters that do not count for their price.
	spread *spread.Division
	dear   []bool

	packer capacity.Packer
	// offers of the entries, and how many pods of each shape each of them takes.
	offers []offer
	pods   []int64

	// candidates are the offers that are compared: those that are complete or, if there
	// is none, all. best is the index of the best entry, -1 if nothing fits anywhere.
	candidates []int
	complete   bool
	best       int
	// ratings of the candidates by each rule; empty for one that does not count.
	ratings [][]float64
}

// offer is the part of a request that fits in one cluster.
type offer struct {
	// reason why not all of the request fits, "" if all does.
	reason string
	// packed is whether the cluster passed the filters, and so the rest is about the
	// request.
	packed  bool
	outcome capacity.Outcome
	// pods are those of its share, of those that fit.
	pods, fits int64
	// share of the cluster that is available after the placement, where known.
	share      float64
	shareKnown bool
	// points are the score before it is rounded.
	points float64
	score  capacity.Score
	// group is the first of the preferred ones that the cluster is in, and their number for none.
	group int
}

var searches = sync.Pool{New: func() any { return &search{} }}

func newSearch(request Request, snapshot Snapshot) *search {
	s := searches.Get().(*search)
	s.request, s.catalog, s.activity, s.entries, s.own = request, snapshot.catalog, snapshot.activity.of, snapshot.entries, false
	s.unreachable, s.latencies = nil, nil
	if at, found := find(s.entries, request.Requester); found {
		s.unreachable, s.latencies = s.entries[at].spec.Unreachable, s.entries[at].spec.Latencies
	}
	s.demand = capacity.NewDemand(s.catalog, request.Want)
	s.units = unitsOf(request.Want.Totals)
	s.prepareBudget()
	s.spread = newDivision(&s.request, s.entries)
	s.findDear()
	n := len(s.entries)
	s.offers = slices.Grow(s.offers[:0], n)[:n]
	s.pods = slices.Grow(s.pods[:0], n*s.demand.Shapes())[:n*s.demand.Shapes()]
	return s
}

// free gives the memory back. It keeps nothing of the request or the snapshot.
func (s *search) free() {
	s.demand.Learn(s.catalog)
	s.request, s.entries, s.unreachable, s.latencies, s.activity, s.demand, s.catalog, s.spread = Request{}, nil, nil, nil, nil, nil, nil, nil
	searches.Put(s)
}

func (s *search) id(i int) string { return s.entries[i].spec.ClusterID }

// podsOf is how many pods of each shape an entry takes.
func (s *search) podsOf(i int) []int64 {
	shapes := s.demand.Shapes()
	return s.pods[i*shapes : (i+1)*shapes]
}

// evaluate packs the request in each cluster.
func (s *search) evaluate() {
	for i, e := range s.entries {
		s.offers[i] = offer{reason: s.filter(e)}
		if s.offers[i].reason == "" {
			s.pack(i)
		}
	}
}

func (s *search) pack(i int) {
	e, pods := s.entries[i], s.podsOf(i)
	e.prepare()
	o := offer{packed: true, outcome: s.packer.Fit(s.demand, e.room, e.available, pods)}
	o.reason = o.outcome.Reason()
	for _, n := range pods {
		o.fits += n
	}
	o.pods = o.fits
	s.offers[i] = o
}

// want changes what is wanted, of the same shapes.
func (s *search) want(want broker.HeldCapacity) {
	s.request.Want = want
	s.demand.Want(want)
	s.units = unitsOf(want.Totals)
	s.prepareBudget()
}

// commit adds what an amount costs in a cluster to what the Reservation costs, so many times.
func (s *search) commit(i int, amount broker.HeldCapacity, times int64) {
	spec := s.entries[i].spec
	if price, known := s.request.PriceOf(spec.Region, ledger.CostOf(spec, amount), amount); known {
		s.request.Committed.Add(s.request.Committed, price.Mul(price, big.NewRat(times, 1)))
	}
}

// take takes what the best cluster holds now from what is wanted. Only that cluster,
// and those whose offer is too large now, are packed again.
func (s *search) take(holds []broker.Hold, amount broker.HeldCapacity) {
	if !s.own {
		s.entries, s.own = slices.Clone(s.entries), true
	}
	s.entries[s.best] = s.entries[s.best].next(s.entries[s.best].spec, holds)
	if s.spread != nil {
		s.spread.Of(s.best).Held += int64(amount.Pods())
	}
	shapes := s.demand.Wanted()
	if s.want(capacity.Sub(s.request.Want, amount)); s.request.Want.Empty() {
		return
	}
	// A shape that is not wanted any more cannot be the reason that no node matches.
	fewer := s.demand.Wanted() < shapes
	for i, e := range s.entries {
		o := &s.offers[i]
		switch reason := s.filter(e); {
		case reason != "":
			*o = offer{reason: reason}
		case i == s.best, !o.packed, !s.demand.Within(s.podsOf(i)), fewer && o.fits == 0:
			s.pack(i)
		case s.demand.Equals(s.podsOf(i)):
			o.outcome, o.reason = capacity.FitsAll, ""
		}
	}
}

// reject rejects the best cluster from now on.
func (s *search) reject(rejection capacity.Rejection) {
	if s.request.Rejected == nil {
		s.request.Rejected = map[string]capacity.Rejection{}
	}
	s.request.Rejected[s.id(s.best)] = rejection
	s.offers[s.best] = offer{reason: rejection.Reason}
}

// placement is what the best cluster takes.
func (s *search) placement() broker.HeldCapacity {
	e := s.entries[s.best]
	s.packer.Reset(e.room)
	placed, _ := s.packer.Pack(s.request.Want, &e.account)
	if s.spread != nil {
		placed = capacity.First(placed, int32(s.offers[s.best].pods))
	}
	return placed
}
