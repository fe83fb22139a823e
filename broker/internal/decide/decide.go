// Package decide chooses the providers for a request. Split is a pure function of
// the request and of a snapshot of what the clusters advertise and the ledger
// holds: the same input gives the same answer, in whatever order the clusters
// are listed.
//
// A cluster passes a chain of filters (filters.go). Its free capacity is packed,
// first with what holds may still claim there (snapshot.go) and then with the request
// (search.go). The clusters where the pods fit are scored (score.go), by rules (rules.go). Every cluster
// that is not chosen has a reason; the messages with the figures are made for those
// that are asked for (report.go).
package decide

import (
	"maps"
	"math"
	"math/big"
	"slices"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/answers"
	"github.com/spillway-dev/spillway/broker/internal/pricing"
	"github.com/spillway-dev/spillway/broker/text"
)

// Request is the capacity to place, and the limits on its provider.
type Request struct {
	// Requester is the consumer.
	Requester string
	// Want is the capacity that no provider holds yet: pod sets with their
	// remaining counts, or a divisible total.
	Want broker.HeldCapacity
	// Pin is the only provider that may be chosen; any where empty.
	Pin string
	// Placement and Budget limit the providers; nil for no limit.
	Placement *broker.Placement
	Budget    *broker.Budget
	// ExchangeRates are those by which prices in several currencies are compared.
	ExchangeRates []broker.ExchangeRate
	// Committed is what the Reservation already costs per hour, in the budget's
	// currency; nil for nothing.
	Committed *big.Rat
	// Unpriced is a provider of which what it holds has no price in the budget's currency: what is left of
	// the budget is not known. "" for none.
	Unpriced string
	// Weights of the score. The zero value stands for the defaults.
	Weights broker.ScoreWeights
	// Records are how the clusters have kept their promises of late. Only of use with a weight.
	Records map[string]answers.Record
	// Providers are the clusters that provide for the Reservation already.
	Providers []string
	// Held is what each provider holds for the Reservation. Only of use with a spread.
	Held map[string]broker.HeldCapacity
	// Rejected are the providers that must not be chosen now, and why: they refused such
	// a request, or do not answer.
	Rejected map[string]capacity.Rejection
}

// PriceOf is the price of an amount for an hour in a region, in the currency of the budget, and in
// that of the cost without one.
func (r *Request) PriceOf(region string, cost *broker.Cost, amount broker.HeldCapacity) (price *big.Rat, known bool) {
	price, currency, known := r.price(region, cost, amount)
	if !known || r.Budget == nil {
		return price, known
	}
	price, _, known = pricing.Exchange(price, currency, r.Budget.Currency, r.ExchangeRates)
	return price, known
}

// MaxProviders is the maximum number of providers of one Reservation, whose status shows
// what each of them holds.
const MaxProviders = 50

// DefaultWeights of the score, in percent.
var DefaultWeights = broker.ScoreWeights{Resources: 70, Cost: 30}

// Reasons of rejections, besides those of package capacity.
const (
	ReasonRequesterItself = "RequesterItself"
	// ReasonClusterInactive means that the last advertisement is older than staleAfter of the
	// BrokerConfig, ReasonAdvertisementTooOld that it is older than freshFor.
	ReasonClusterInactive     = "ClusterInactive"
	ReasonAdvertisementTooOld = "AdvertisementTooOld"
	ReasonUnreachable         = "Unreachable"
	ReasonPinnedElsewhere     = "PinnedElsewhere"
	ReasonExcluded            = "Excluded"
	ReasonOtherRegion         = "OtherRegion"
	ReasonOtherZone           = "OtherZone"
	// ReasonNoDomain means that the cluster does not state where it is, as a spread needs,
	// ReasonShareLimited that a spread gives its domain no more.
	ReasonNoDomain         = "NoDomain"
	ReasonShareLimited     = "ShareLimited"
	ReasonRefused          = answers.ReasonRefused
	ReasonNotAnswering     = answers.ReasonNotAnswering
	reasonTooManyProviders = "TooManyProviders"
	ReasonPriceUnknown     = "PriceUnknown"
	ReasonOverBudget       = "OverBudget"
	ReasonNotPreferred     = "NotPreferred"
)

// Eligible reports whether a cluster may be chosen for a request if it has the capacity.
func Eligible(request *Request, spec *broker.ClusterAdvertisementSpec, active, fresh bool) bool {
	s := search{request: *request, activity: func(string) (bool, bool) { return active, fresh }}
	s.prepareBudget()
	return s.filter(newEntry(nil, spec, nil)) == ""
}

// Explain reports why each cluster is not chosen, by cluster ID.
func Explain(request Request, snapshot Snapshot) (rejections []broker.ClusterRejection) {
	for _, offer := range Compare(request, snapshot) {
		if offer.Reason != "" {
			rejections = append(rejections, offer.ClusterRejection)
		}
	}
	return rejections
}

// Offer is how one cluster compares with the others for all of a request.
type Offer struct {
	// ClusterRejection has no reason for the cluster that is chosen first.
	broker.ClusterRejection `json:",inline"`
	// Score, and what each rule gives of it; both are empty unless the cluster was compared with the
	// chosen one.
	Score  string `json:"score,omitempty"`
	Detail string `json:"detail,omitempty"`
	// PricePerHour is that of the whole request; empty if it is not known.
	PricePerHour string `json:"pricePerHour,omitempty"`
}

// Compare reports how the clusters compare, by cluster ID.
func Compare(request Request, snapshot Snapshot) []Offer {
	if request.Want.Empty() {
		return nil
	}
	s := newSearch(request, snapshot)
	defer s.free()
	s.evaluate()
	s.compare()
	offers := make([]Offer, len(s.entries))
	for i := range s.entries {
		if offers[i].Cluster = s.id(i); i != s.best {
			offers[i].ClusterRejection = s.rejection(i)
		}
		if price, currency, known := request.price(s.entries[i].spec.Region, s.cost(s.entries[i]), request.Want); known {
			offers[i].PricePerHour = text.Price(price, currency)
		}
	}
	for _, i := range s.candidates {
		offers[i].Score, offers[i].Detail = s.offers[i].score.String(), s.detail(i)
	}
	return offers
}

// Part is what one cluster takes of a request.
type Part struct {
	Cluster  string
	Capacity broker.HeldCapacity
}

// Place adds a part to a cluster's holds, and returns the holds after that, or why the
// part cannot be added: then the cluster is not chosen. It must not change the holds that
// it is given, which do not include what is kept free for others.
type Place func(spec *broker.ClusterAdvertisementSpec, holds []broker.Hold, amount broker.HeldCapacity) (after []broker.Hold, refused *capacity.Rejection)

// Split chooses clusters, one after the other, until all of the request is placed or
// no cluster takes any more. A cluster that takes a part is not rejected if all of
// the request is placed. Only the first choice packs the request in every cluster.
// Each choice is the cluster with the best score among those where all of what is left
// fits, or, if there is none, the one where most pods fit. Ties go to the better score,
// then to the first by cluster ID.
func Split(request Request, snapshot Snapshot, place Place) (parts []Part, missing broker.HeldCapacity, decision broker.Decision) {
	if request.Want.Empty() {
		return nil, request.Want, decision
	}
	committed := new(big.Rat)
	if request.Committed != nil {
		committed.Set(request.Committed)
	}
	request.Committed = committed
	request.Rejected = maps.Clone(request.Rejected)
	s := newSearch(request, snapshot)
	defer s.free()
	s.evaluate()
	var scores []broker.ClusterScore
	// What is taken back may fit where it was too dear for more. Each time, fewer pods are missing.
	for before, changed := int32(math.MaxInt32), true; changed && s.request.Want.Pods() < before; {
		before = s.request.Want.Pods()
		parts, scores = s.choose(parts, scores, &decision, place)
		if parts, changed = s.even(parts); changed {
			decision = s.report(nil)
		}
	}
	decision.Scores = scores
	return parts, s.request.Want, decision
}

// choose adds parts to those that have been chosen, and reports the last choice.
func (s *search) choose(parts []Part, scores []broker.ClusterScore, decision *broker.Decision, place Place) ([]Part, []broker.ClusterScore) {
	// Once more than there are clusters, to explain what is missing when each has its part.
	for most := len(parts) + len(s.entries); len(parts) <= most; {
		s.compare()
		scores = s.addScores(scores)
		if s.best < 0 || s.complete || len(parts) == most {
			// The last choice, unless it is refused: it is explained as it was made.
			*decision = s.report(parts)
		}
		if s.best < 0 {
			break
		}
		chosen, amount := s.entries[s.best], s.placement()
		after, refused := place(chosen.spec, chosen.holds, amount)
		if refused != nil {
			s.reject(*refused)
			continue
		}
		parts = append(parts, Part{chosen.spec.ClusterID, amount})
		if !slices.Contains(s.request.Providers, chosen.spec.ClusterID) {
			s.request.Providers = append(slices.Clip(s.request.Providers), chosen.spec.ClusterID)
		}
		s.commit(s.best, amount, 1)
		if s.take(after, amount); s.request.Want.Empty() {
			break
		}
	}
	return parts, scores
}
