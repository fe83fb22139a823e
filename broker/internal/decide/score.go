package decide

import (
	"math/big"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// score rates the offers against each other: by what is left of the requested
// resources after the placement, and by price.
func score(request *Request, offers []*offer) {
	weights := request.Weights
	if weights == (broker.ScoreWeights{}) {
		weights = DefaultWeights
	}
	cheapness := cheapness(request, offers)
	for i, o := range offers {
		placed := capacity.Ceil(o.placed.Totals.List())
		share := capacity.AvailableShare(placed.Kinds(), o.account.Available.Minus(placed, 1), o.account.Allocatable)
		o.score = capacity.NewScore(float64(weights.Resources)*share + float64(weights.Cost)*cheapness[i])
	}
}

// cheapness is 1 for the cheapest offer and 0 for the dearest, by the price of
// all that is requested. It is one half where the price is unknown, and everywhere
// if the prices are in several currencies.
func cheapness(request *Request, offers []*offer) []float64 {
	out := make([]float64, len(offers))
	prices := make([]*big.Rat, len(offers))
	var lowest, highest *big.Rat
	var currency string
	comparable := true
	for i, o := range offers {
		out[i] = 0.5
		price, in, known := Price(o.cluster.Spec.Cost, request.Want.Totals)
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
