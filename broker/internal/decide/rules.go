package decide

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/pricing"
	"github.com/spillway-dev/spillway/broker/text"
)

// rule is a part of the score. To add one, add it to rules, and its weight to ScoreWeights.
type rule interface {
	// name is that of its weight.
	name() string
	weight(weights *broker.ScoreWeights) int32
	// rate appends the ratings of all candidates, in their order, from 0 to 1 for the best.
	rate(s *search, ratings []float64) []float64
	// reason explains the rating of a candidate, with figures.
	reason(s *search, i int) string
}

var rules = []rule{resourcesRule{}, costRule{}, reliabilityRule{}, latencyRule{}}

// unknown is the rating where nothing is known.
const unknown = 0.5

// halfLatency is the latency in ms that is rated one half.
const halfLatency = 50

// resourcesRule prefers clusters that have more left after the placement.
type resourcesRule struct{}

func (resourcesRule) name() string                        { return "resources" }
func (resourcesRule) weight(w *broker.ScoreWeights) int32 { return w.Resources }

func (resourcesRule) rate(s *search, ratings []float64) []float64 {
	for _, i := range s.candidates {
		o, e := &s.offers[i], s.entries[i]
		if !o.shareKnown {
			o.share, o.shareKnown = s.demand.Share(o.outcome, s.taken(i), e.room, e.available, e.allocatable), true
		}
		ratings = append(ratings, o.share)
	}
	return ratings
}

func (resourcesRule) reason(s *search, i int) string {
	return fmt.Sprintf("%.0f %% stay available", 100*s.offers[i].share)
}

// costRule prefers those that are cheaper for all that is requested. A price in a currency without a
// rate is not known; if no currency has one and there are several, all are equal.
type costRule struct{}

func (costRule) name() string                        { return "cost" }
func (costRule) weight(w *broker.ScoreWeights) int32 { return w.Cost }

func (costRule) rate(s *search, ratings []float64) []float64 {
	base := s.currency()
	rated, comparable := pricing.RateOf(s.request.ExchangeRates, base) != nil, true
	for _, i := range s.candidates {
		rates, price, known := s.rated(i)
		if !known {
			ratings = append(ratings, -1)
			continue
		}
		exchange, known := pricing.Factor(rates.currency, base, s.request.ExchangeRates)
		if comparable = comparable && (known || rated); !known {
			price, exchange = -1, 1
		}
		ratings = append(ratings, price*exchange)
	}
	if !comparable {
		for at := range ratings {
			ratings[at] = unknown
		}
		return ratings
	}
	return fromLowest(ratings)
}

// currency is the one in which prices are compared: one that has a rate, if there is any.
func (s *search) currency() (currency string) {
	for _, i := range s.candidates {
		rates, _, known := s.rated(i)
		if !known {
			continue
		}
		if len(s.request.ExchangeRates) == 0 || pricing.RateOf(s.request.ExchangeRates, rates.currency) != nil {
			return rates.currency
		}
		currency = cmp.Or(currency, rates.currency)
	}
	return currency
}

func (costRule) reason(s *search, i int) string {
	e := s.entries[i]
	price, currency, known := s.request.price(e.spec.Region, s.cost(e), s.request.Want)
	if !known {
		return "price unknown"
	}
	reason := text.Price(price, currency) + " per hour" + s.request.withTransfer(e.spec.Region)
	if rate := pricing.RateOf(s.request.ExchangeRates, currency); rate != nil {
		reason += fmt.Sprintf(", at the rate of %s", rate.Date)
	}
	return reason
}

// reliabilityRule prefers those that have delivered of late what they were asked for.
type reliabilityRule struct{}

func (reliabilityRule) name() string                        { return "reliability" }
func (reliabilityRule) weight(w *broker.ScoreWeights) int32 { return w.Reliability }

func (reliabilityRule) rate(s *search, ratings []float64) []float64 {
	for _, i := range s.candidates {
		ratings = append(ratings, s.request.Records[s.id(i)].Reliability())
	}
	return ratings
}

func (reliabilityRule) reason(s *search, i int) string {
	record, asked := s.request.Records[s.id(i)]
	if !asked {
		return "not asked of late"
	}
	return fmt.Sprintf("%.0f %% delivered of late", 100*record.Share())
}

// latencyRule prefers those that are closer to the consumer, which measures it. A difference of some ms
// is worth little, however far the others are.
type latencyRule struct{}

func (latencyRule) name() string                        { return "latency" }
func (latencyRule) weight(w *broker.ScoreWeights) int32 { return w.Latency }

func (latencyRule) rate(s *search, ratings []float64) []float64 {
	for _, i := range s.candidates {
		rating := unknown
		if ms := s.latencyTo(i); ms >= 0 {
			rating = 1 / (1 + float64(ms)/halfLatency)
		}
		ratings = append(ratings, rating)
	}
	return ratings
}

func (latencyRule) reason(s *search, i int) string {
	if ms := s.latencyTo(i); ms >= 0 {
		return fmt.Sprintf("%d ms", ms)
	}
	return "not measured"
}

// latencyTo is what the requester has measured to a cluster, in ms; -1 for nothing.
func (s *search) latencyTo(i int) int32 {
	at := slices.IndexFunc(s.latencies, func(l broker.ProviderLatency) bool { return l.Cluster == s.id(i) })
	if at < 0 {
		return -1
	}
	return s.latencies[at].Milliseconds
}

// fromLowest turns figures into ratings, in place: 1 for the lowest and 0 for the highest. Negative
// ones are not known.
func fromLowest(figures []float64) []float64 {
	lowest, highest := math.Inf(1), 0.0
	for _, figure := range figures {
		if figure >= 0 {
			lowest, highest = min(lowest, figure), max(highest, figure)
		}
	}
	for at, figure := range figures {
		switch {
		case figure < 0:
			figures[at] = unknown
		case highest-lowest <= highest*maxPriceError:
			figures[at] = 1
		default:
			figures[at] = (highest - figure) / (highest - lowest)
		}
	}
	return figures
}

// detail explains the place of a candidate: its group, and what each rule that counts gives it.
func (s *search) detail(i int) string {
	at, found := slices.BinarySearch(s.candidates, i)
	if !found {
		return ""
	}
	weights := s.weights()
	var parts []string
	if group := s.offers[i].group; group < len(s.groups()) {
		parts = append(parts, fmt.Sprintf("group %d of preferredProviders", group+1))
	}
	if s.spread != nil {
		parts = append(parts, s.spread.Limit(s.spread.Of(i)))
	}
	for r, rule := range rules {
		if weight := rule.weight(&weights); weight > 0 {
			points := capacity.NewScore(float64(weight) * s.ratings[r][at])
			parts = append(parts, fmt.Sprintf("%s %s of %d (%s)", rule.name(), points, weight, rule.reason(s, i)))
		}
	}
	return strings.Join(parts, ", ")
}
