package decide

import (
	"fmt"
	"math"
	"slices"
	"sort"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/answers"
)

// domain is a cluster, zone or region of a request with a spread.
type domain struct {
	name string
	// held are the pods of the Reservation there, before those that it had before the search.
	held, before int64
	// room is how many more pods fit.
	room int64
	// counts is whether it has a cluster that may be chosen, and nodes for such pods: others may
	// have only maxSkew more pods than it, also when it is full.
	counts bool
}

// level is up to how many pods each domain is filled with n more: as evenly as there is room, and to
// no more than most, by what the domain allows of which no more fit.
func level(domains []domain, n, maxSkew int64) (level, most int64) {
	highest := int64(0)
	most = math.MaxInt64
	for _, d := range domains {
		if highest = max(highest, d.held); d.counts {
			most = min(most, d.held+d.room+maxSkew)
		}
	}
	enough := sort.Search(int(highest+n), func(level int) bool {
		var takes int64
		for _, d := range domains {
			takes += min(max(int64(level)-d.held, 0), d.room)
		}
		return takes >= n
	})
	return min(int64(enough), most), most
}

// spreading is how far a search with a spread has come.
type spreading struct {
	broker.Spread
	domains []domain
	// of is the domain of each entry, -1 for none.
	of []int
	// level is up to which the domains are filled now, most up to which they may be.
	level, most int64
}

// domainOf is the domain of a cluster; "" if it states none.
func domainOf(spread *broker.Spread, spec *broker.ClusterAdvertisementSpec) string {
	switch spread.Over {
	case broker.SpreadOverZone:
		return spec.Zone
	case broker.SpreadOverRegion:
		return spec.Region
	default:
		return spec.ClusterID
	}
}

// newSpreading is nil for a request without a spread, and for a divisible total.
func newSpreading(request *Request, entries []*entry) *spreading {
	if request.Placement == nil || request.Placement.Spread == nil || len(request.Want.PodSets) == 0 {
		return nil
	}
	sp := &spreading{Spread: *request.Placement.Spread}
	sp.MaxSkew = max(sp.MaxSkew, 1)
	known := map[string]int{"": -1}
	for _, e := range entries {
		name := domainOf(&sp.Spread, e.spec)
		at, found := known[name]
		if !found {
			at = len(sp.domains)
			known[name], sp.domains = at, append(sp.domains, domain{name: name})
		}
		if sp.of = append(sp.of, at); at >= 0 {
			sp.domains[at].held += int64(request.Held[e.spec.ClusterID])
			sp.domains[at].before = sp.domains[at].held
		}
	}
	return sp
}

// share limits each offer to what its domain is filled with.
func (s *search) share() {
	sp := s.spread
	if sp == nil {
		return
	}
	for at := range sp.domains {
		sp.domains[at].room, sp.domains[at].counts = 0, false
	}
	for i, at := range sp.of {
		if at >= 0 {
			d := &sp.domains[at]
			d.room += s.offers[i].fits
			d.counts = d.counts || s.mayChoose(i) && s.hasNodes(i)
		}
	}
	left := int64(s.request.Want.Pods())
	sp.level, sp.most = level(sp.domains, left, int64(sp.MaxSkew))
	for i := range s.offers {
		o := &s.offers[i]
		if o.fits == 0 {
			continue
		}
		o.pods, o.shareKnown = min(o.fits, max(sp.level-sp.domains[sp.of[i]].held, 0)), false
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
// attempts, or the size of its ledger.
func (s *search) mayChoose(i int) bool {
	rejection, rejected := s.request.Rejected[s.id(i)]
	if s.offers[i].packed || !rejected || rejection.Reason == ReasonUnreachable || rejection.Reason == answers.ReasonUnusable {
		return s.offers[i].packed
	}
	all := s.request.Rejected
	s.request.Rejected = nil
	reason := s.filter(s.entries[i])
	s.request.Rejected = all
	return reason == ""
}

// hasNodes reports whether a cluster has nodes for some of the pods, however full they are.
func (s *search) hasNodes(i int) bool {
	spec := s.entries[i].spec
	allocatable := capacity.Floor(spec.Resources.Allocatable.List())
	return s.offers[i].fits > 0 || slices.ContainsFunc(s.request.Want.PodSets, func(set broker.PodSet) bool {
		return capacity.Ceil(set.Requests.List()).FitsIn(allocatable) > 0 &&
			slices.ContainsFunc(capacity.ClassesOf(spec), func(class broker.NodeClass) bool { return capacity.Matches(&class, set) })
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

// shared explains the share of an entry.
func (s *search) shared(i int) string {
	sp := s.spread
	d := &sp.domains[sp.of[i]]
	message := fmt.Sprintf("placement.spread allows %d of the pods in %s %s, which has %d", sp.level, sp.Over, d.name, d.held)
	for _, least := range sp.domains {
		if most := least.held + least.room; sp.level == sp.most && least.counts && most+int64(sp.MaxSkew) == sp.most {
			return fmt.Sprintf("%s: %s %s has room for %d, and maxSkew is %d.", message, sp.Over, least.name, most, sp.MaxSkew)
		}
	}
	return message + "."
}

// even takes back what domains have got too much of because it turned out that fewer pods fit in
// another one than there seemed to be room for: pods of several shapes, or a ledger that is full.
func (s *search) even(parts []Part) (kept []Part, changed bool) {
	if s.spread == nil {
		return parts, false
	}
	sp, least, missing := s.spread, int64(math.MaxInt64), s.request.Want
	for _, d := range sp.domains {
		if d.counts {
			least = min(least, d.held)
		}
	}
	for _, part := range slices.Backward(parts) {
		at, _ := find(s.entries, part.Cluster)
		d, had := &sp.domains[sp.of[at]], int64(part.Capacity.Pods())
		excess := min(d.held-max(least+int64(sp.MaxSkew), d.before), had)
		if excess > 0 {
			less := capacity.First(part.Capacity, int32(had-excess))
			missing = capacity.Add(missing, capacity.Sub(part.Capacity, less))
			d.held, part.Capacity, changed = d.held-excess, less, true
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
	spread := newSpreading(request, s.entries)
	if spread == nil {
		return nil, 0
	}
	// What it holds itself stays: it is part of what a cluster could take, and not of what is wanted.
	with := *request
	sets := slices.Clone(request.Want.PodSets)
	for _, held := range request.Held {
		for i := range sets {
			sets[i].Count += held
		}
	}
	with.Want = capacity.OfPodSets(sets)
	c := newClaimant(&with, s.catalog)
	c.request.Want = request.Want
	c.spread, c.entries, c.offers, c.activity, c.request.Rejected = spread, s.entries, make([]offer, len(s.entries)), s.activity.of, rejected
	for i, e := range s.entries {
		if c.filter(e) == "" {
			c.offers[i] = offer{packed: true, fits: max(int64(c.couldTake(e).Pods()-request.Held[e.spec.ClusterID]), 0)}
		}
	}
	c.share()
	for _, d := range spread.domains {
		all += min(max(spread.level-d.held, 0), d.room)
	}
	return c.offers, all
}
