package decide

import (
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/pricing"
)

// Money is exact: a budget, and what a status says (Price). The order of clusters is not: it
// is a score, and prices that differ by less than maxPriceError are equal.

// maxPriceError is the part of a price by which rounding may change it.
const maxPriceError = 1e-9

// priced are the resources that have a price, in the order of rates and units.
var priced = [...]corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, broker.ResourceGPU, corev1.ResourceEphemeralStorage}

// rates are the prices of a cost.
type rates struct {
	each  [len(priced)]float64
	known [len(priced)]bool
	// stated is whether there is a cost.
	stated   bool
	currency string
}

func ratesOf(cost *broker.Cost) (r rates) {
	if cost == nil {
		return r
	}
	r.stated, r.currency = true, cost.Currency
	for i, name := range priced {
		text, _ := pricing.UnitCost(cost, name)
		rate, err := strconv.ParseFloat(text, 64)
		r.each[i], r.known[i] = rate, err == nil
	}
	return r
}

// units is an amount to find the price of, in the units of the rates.
type units struct {
	each [len(priced)]float64
	// unknown is whether it has a resource that has no price anywhere.
	unknown bool
}

func unitsOf(amount broker.ResourceQuantities) (u units) {
	for name, quantity := range amount.List() {
		at := slices.Index(priced[:], name)
		switch _, unit := pricing.UnitCost(&broker.Cost{}, name); {
		case quantity.IsZero():
		case at < 0:
			u.unknown = true
		default:
			u.each[at] = quantity.AsApproximateFloat64() / float64(unit)
		}
	}
	return u
}

// price of an amount. It is not known if the rates do not cover a resource that the amount
// has.
func (r *rates) price(u *units) (price float64, known bool) {
	if u.unknown || !r.stated {
		return 0, false
	}
	for i, n := range u.each {
		if n > 0 && !r.known[i] {
			return 0, false
		}
		price += r.each[i] * n
	}
	return price, true
}
