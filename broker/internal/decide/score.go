package decide

import (
	"cmp"
	"math/big"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// compare scores the candidates and finds the best.
func (s *search) compare() {
	s.best, s.complete = -1, false
	s.candidates = s.candidates[:0]
	for i := range s.offers {
		switch outcome := s.offers[i].outcome; {
		case outcome < capacity.FitsPartly, outcome == capacity.FitsPartly && s.complete:
		case outcome == capacity.FitsAll && !s.complete:
			s.complete = true
			s.candidates = append(s.candidates[:0], i)
		default:
			s.candidates = append(s.candidates, i)
		}
	}
	s.score()
	for _, i := range s.candidates {
		if s.best < 0 || s.prefer(i, s.best) < 0 {
			s.best = i
		}
	}
}

// prefer orders candidates, the better one first.
func (s *search) prefer(a, b int) int {
	return cmp.Or(cmp.Compare(s.offers[b].pods, s.offers[a].pods), cmp.Compare(s.offers[b].score, s.offers[a].score), cmp.Compare(a, b))
}

// score rates the candidates against each other: by what is left of the requested
// resources after the placement, and by price.
func (s *search) score() {
	weights := s.request.Weights
	if weights == (broker.ScoreWeights{}) {
		weights = DefaultWeights
	}
	s.rateCheapness()
	for at, i := range s.candidates {
		o, e := &s.offers[i], s.entries[i]
		if !o.shareKnown {
			o.share, o.shareKnown = s.demand.Share(o.outcome, s.podsOf(i), e.room, e.available, e.allocatable), true
		}
		o.score = capacity.NewScore(float64(weights.Resources)*o.share + float64(weights.Cost)*s.cheapness[at])
	}
}

// rateCheapness rates the candidates from 1 for the cheapest to 0 for the dearest, by
// the price of all that is requested. It is one half where the price is unknown, and
// everywhere if the prices are in several currencies.
func (s *search) rateCheapness() {
	s.cheapness, s.prices = s.cheapness[:0], s.prices[:0]
	var lowest, highest int64
	var currency string
	some, comparable := false, true
	for _, i := range s.candidates {
		rates := &s.entries[i].rates
		price, known, ok := rates.price(&s.units)
		if !ok {
			s.rateExactly()
			return
		}
		s.cheapness = append(s.cheapness, 0.5)
		if !known {
			s.prices = append(s.prices, -1)
			continue
		}
		s.prices = append(s.prices, price)
		comparable = comparable && (currency == "" || currency == rates.currency)
		currency = rates.currency
		if !some || price < lowest {
			lowest = price
		}
		if !some || price > highest {
			highest = price
		}
		some = true
	}
	// Up to this number, the quotient of two whole numbers is rounded only once.
	if highest-lowest >= 1<<53 {
		s.rateExactly()
		return
	}
	for at, price := range s.prices {
		switch {
		case !comparable || price < 0:
		case lowest == highest:
			s.cheapness[at] = 1
		default:
			s.cheapness[at] = float64(highest-price) / float64(highest-lowest)
		}
	}
}

// rateExactly is rateCheapness for all numbers.
func (s *search) rateExactly() {
	s.cheapness = s.cheapness[:0]
	prices := make([]*big.Rat, len(s.candidates))
	var lowest, highest *big.Rat
	var currency string
	comparable := true
	for at, i := range s.candidates {
		s.cheapness = append(s.cheapness, 0.5)
		price, in, known := Price(s.entries[i].spec.Cost, s.request.Want.Totals)
		if !known {
			continue
		}
		comparable = comparable && (currency == "" || currency == in)
		currency, prices[at] = in, price
		if lowest == nil || price.Cmp(lowest) < 0 {
			lowest = price
		}
		if highest == nil || price.Cmp(highest) > 0 {
			highest = price
		}
	}
	for at, price := range prices {
		switch {
		case !comparable || price == nil:
		case lowest.Cmp(highest) == 0:
			s.cheapness[at] = 1
		default:
			part := new(big.Rat).Sub(highest, price)
			s.cheapness[at], _ = part.Quo(part, new(big.Rat).Sub(highest, lowest)).Float64()
		}
	}
}
