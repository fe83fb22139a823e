package decide

import (
	"math/big"
	"strconv"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// score rates the offers against each other, in hundredths from 0 to 10000.
// They are rounded before they are compared: what reads as equal is equal.
func score(ask *Request, offers []*offer) {
	weights := ask.Weights
	if weights == (broker.ScoreWeights{}) {
		weights = DefaultWeights
	}
	cheapness := cheapness(ask, offers)
	for i, o := range offers {
		points := float64(weights.Resources)*spare(o) + float64(weights.Cost)*cheapness[i]
		o.score = int64(points*100 + 0.5)
	}
}

// spare is how much of what was asked for is left after the placement: the mean
// over the kinds of what is available then, as a part of the allocatable.
func spare(o *offer) float64 {
	wanted := need(o.placed.Totals)
	allocatable := room(o.cluster.Spec.Resources.Allocatable)
	var sum float64
	var kinds int
	for _, name := range wanted.names() {
		kinds++
		if allocatable[name] > 0 {
			sum += float64(max(0, o.available[name]-wanted[name])) / float64(allocatable[name])
		}
	}
	if kinds == 0 {
		return 1
	}
	return sum / float64(kinds)
}

// cheapness is 1 for the cheapest offer and 0 for the dearest, by the price of
// the whole ask. It is one half where the price is unknown, and everywhere if
// prices come in several currencies.
func cheapness(ask *Request, offers []*offer) []float64 {
	out := make([]float64, len(offers))
	prices := make([]*big.Rat, len(offers))
	var lowest, highest *big.Rat
	var currency string
	comparable := true
	for i, o := range offers {
		out[i] = 0.5
		price, in, known := Price(o.cluster.Spec.Cost, ask.Want.Totals)
		if !known {
			continue
		}
		comparable = comparable && (currency == "" || currency == in)
		currency, prices[i] = in, price
		if lowest == nil || price.Cmp(lowest) < 0 {
			lowest = price
		}
		if highest == nil || price.Cmp(highest) > 0 {
			highest = price
		}
	}
	if !comparable {
		return out
	}
	for i, price := range prices {
		switch {
		case price == nil:
		case lowest.Cmp(highest) == 0:
			out[i] = 1
		default:
			part := new(big.Rat).Sub(highest, price)
			out[i], _ = part.Quo(part, new(big.Rat).Sub(highest, lowest)).Float64()
		}
	}
	return out
}

// hundredths prints a score with two decimals.
func hundredths(score int64) string {
	return strconv.FormatFloat(float64(score)/100, 'f', 2, 64)
}
