package decide

import (
	"cmp"
	"math"

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
	weights := s.weights()
	s.rateCheapness()
	for at, i := range s.candidates {
		o, e := &s.offers[i], s.entries[i]
		if !o.shareKnown {
			o.share, o.shareKnown = s.demand.Share(o.outcome, s.podsOf(i), e.room, e.available, e.allocatable), true
		}
		o.score = capacity.NewScore(float64(weights.Resources)*o.share + float64(weights.Cost)*s.cheapness[at])
	}
}

// weights of the request, or the defaults.
func (s *search) weights() broker.ScoreWeights {
	if s.request.Weights == (broker.ScoreWeights{}) {
		return DefaultWeights
	}
	return s.request.Weights
}

// rateCheapness rates the candidates from 1 for the cheapest to 0 for the dearest, by
// the price of all that is requested. It is one half where the price is unknown, and
// everywhere if the prices are in several currencies.
func (s *search) rateCheapness() {
	s.cheapness, s.prices = s.cheapness[:0], s.prices[:0]
	lowest, highest := math.Inf(1), 0.0
	currency, comparable := "", true
	for _, i := range s.candidates {
		rates := &s.entries[i].rates
		price, known := rates.price(&s.units)
		if s.cheapness = append(s.cheapness, 0.5); !known {
			s.prices = append(s.prices, -1)
			continue
		}
		s.prices = append(s.prices, price)
		comparable = comparable && (currency == "" || currency == rates.currency)
		currency, lowest, highest = rates.currency, min(lowest, price), max(highest, price)
	}
	for at, price := range s.prices {
		switch {
		case !comparable || price < 0:
		case highest-lowest <= highest*maxPriceError:
			s.cheapness[at] = 1
		default:
			s.cheapness[at] = (highest - price) / (highest - lowest)
		}
	}
}
