package decide

import (
	"math/big"
	"slices"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/answers"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
	"github.com/spillway-dev/spillway/broker/internal/spread"
)

// newDivision is nil for a request without a spread, and for a divisible total.
func newDivision(request *Request, entries []*entry) *spread.Division {
	if request.Placement == nil || request.Placement.Spread == nil || len(request.Want.PodSets) == 0 {
		return nil
	}
	var clusters []*broker.ClusterAdvertisementSpec
	for _, e := range entries {
		clusters = append(clusters, e.spec)
	}
	held := map[string]int32{}
	for cluster, amount := range request.Held {
		held[cluster] = amount.Pods()
	}
	division := spread.New(request.Placement.Spread, clusters, held)
	division.Budget = request.Budget != nil
	return division
}

// findDear finds the clusters where all of the Reservation would be over its budget. That does not depend on
// how it is divided, so neither does which domains count.
func (s *search) findDear() {
	s.dear = nil
	if s.spread == nil || s.request.Budget == nil {
		return
	}
	all := s.request.Want
	for _, held := range s.request.Held {
		all = capacity.Add(all, held)
	}
	limit, ok := new(big.Rat).SetString(s.request.Budget.MaxPricePerHour)
	s.dear = make([]bool, len(s.entries))
	for i, e := range s.entries {
		price, known := s.request.PriceOf(e.spec.Region, ledger.CostOf(e.spec, all), all)
		s.dear[i] = !ok || !known || price.Cmp(limit) > 0
	}
}

// share limits each offer to what its domain is filled with.
func (s *search) share() {
	if s.spread == nil {
		return
	}
	for i := range s.spread.Domains {
		s.spread.Domains[i].Room, s.spread.Domains[i].Counts = 0, false
	}
	for i := range s.offers {
		if d := s.spread.Of(i); d != nil {
			d.Room += s.offers[i].fits
			d.Counts = d.Counts || s.mayChoose(i) && s.hasNodes(i) && (s.dear == nil || !s.dear[i])
		}
	}
	left := int64(s.request.Want.Pods())
	s.spread.Fill(left)
	for i := range s.offers {
		o := &s.offers[i]
		if o.fits == 0 {
			continue
		}
		pods := min(o.fits, s.spread.Share(s.spread.Of(i)))
		o.pods, o.shareKnown = pods, o.shareKnown && pods == o.pods
		switch {
		case o.pods == left:
			o.outcome, o.reason = capacity.FitsAll, ""
		case o.pods == o.fits:
			o.outcome, o.reason = capacity.FitsPartly, capacity.ReasonPartialCapacity
		case o.pods > 0:
			o.outcome, o.reason = capacity.FitsPartly, ReasonShareLimited
		default:
			o.outcome, o.reason = capacity.FitsNone, ReasonShareLimited
		}
	}
}

// mayChoose reports whether a cluster may be chosen, or could be but for what it answered to other
// attempts, the size of its ledger, what other parts cost, or that it has not been heard of late: a new
// leader has heard none.
func (s *search) mayChoose(i int) bool {
	rejection, rejected := s.request.Rejected[s.id(i)]
	active, fresh := s.activity(s.id(i))
	switch {
	case s.offers[i].packed:
		return true
	case !active, fresh && !rejected && s.offers[i].reason != ReasonOverBudget, rejected && (rejection.Reason == ReasonUnreachable || rejection.Reason == answers.ReasonUnusable):
		return false
	}
	all, activity := s.request.Rejected, s.activity
	s.request.Rejected, s.activity = nil, Activity(nil).of
	reason := s.filter(s.entries[i])
	s.request.Rejected, s.activity = all, activity
	return reason == "" || reason == ReasonOverBudget
}

// hasNodes reports whether a cluster has nodes for some of the pods, however full they are.
func (s *search) hasNodes(i int) bool {
	return s.offers[i].fits > 0 || slices.ContainsFunc(s.request.Want.PodSets, func(set broker.PodSet) bool {
		return slices.ContainsFunc(capacity.ClassesOf(s.entries[i].spec), func(class broker.NodeClass) bool { return capacity.MayRun(&class, &set) })
	})
}

// taken is how many pods of each shape an entry takes within its share.
func (s *search) taken(i int) []int64 {
	pods, left := s.podsOf(i), s.offers[i].pods
	if left == s.offers[i].fits {
		return pods
	}
	pods = slices.Clone(pods)
	for shape := range pods {
		pods[shape] = min(pods[shape], left)
		left -= pods[shape]
	}
	return pods
}

// even takes back what domains have got too much of because it turned out that fewer pods fit in
// another one than there seemed to be room for: pods of several shapes, or a ledger that is full.
func (s *search) even(parts []Part) (kept []Part, changed bool) {
	if s.spread == nil {
		return parts, false
	}
	missing := s.request.Want
	for _, part := range slices.Backward(parts) {
		at, _ := find(s.entries, part.Cluster)
		d, had := s.spread.Of(at), int64(part.Capacity.Pods())
		if excess := min(s.spread.Excess(d), had); excess > 0 {
			less := capacity.First(part.Capacity, int32(had-excess))
			back := capacity.Sub(part.Capacity, less)
			missing = capacity.Add(missing, back)
			s.commit(at, back, -1)
			d.Held, part.Capacity, changed = d.Held-excess, less, true
		}
		if !part.Capacity.Empty() {
			kept = append(kept, part)
		}
	}
	if slices.Reverse(kept); changed {
		s.want(missing)
		s.evaluate()
		s.compare()
	}
	return kept, changed
}

// shares are what each cluster could take of a request with a spread, and all of them together, if
// they held nothing for others; nil for a request without.
func (s Snapshot) shares(request *Request, rejected map[string]capacity.Rejection) (shares []offer, all int64) {
	division := newDivision(request, s.entries)
	if division == nil {
		return nil, 0
	}
	c := newClaimant(request, s.catalog)
	c.spread, c.entries, c.offers, c.request.Rejected = division, s.entries, make([]offer, len(s.entries)), rejected
	c.findDear()
	c.activity = func(cluster string) (active, fresh bool) {
		active, _ = s.activity.of(cluster)
		return active, active
	}
	for i, e := range s.entries {
		if c.filter(e) == "" {
			c.offers[i] = offer{packed: true, fits: int64(c.couldTake(e).Pods())}
		}
	}
	c.share()
	var most []int
	for _, o := range c.offers {
		most = insert(most, int(o.pods), MaxProviders, func(a, b int) int { return b - a })
	}
	for _, pods := range most {
		all += int64(pods)
	}
	return c.offers, min(all, division.Takes())
}
