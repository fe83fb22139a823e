package decide

import (
	"math"
	"math/big"
	"math/bits"
	"strings"

	corev1 "k8s.io/api/core/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Most prices are decimals of a few digits, and most amounts are round: their products
// are compared as whole numbers. What does not fit in them is computed by Price.

// priced are the resources that have a price, in the order of rates and units.
var priced = [...]corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, broker.ResourceGPU, corev1.ResourceEphemeralStorage}

// rateDecimals of a rate that is a whole number, and rateUnit is 10 to their power.
const (
	rateDecimals = 9
	rateUnit     = 1_000_000_000
)

// rates are the prices of a cost in billionths.
type rates struct {
	each [len(priced)]int64
	// known is whether there is a price, whole whether it is in each.
	known, whole [len(priced)]bool
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
		text, _ := unitCost(cost, name)
		if r.each[i], r.whole[i] = wholeRate(text); r.whole[i] {
			r.known[i] = true
		} else {
			_, r.known[i] = new(big.Rat).SetString(text)
		}
	}
	return r
}

func wholeRate(text string) (rate int64, ok bool) {
	integer, fraction, _ := strings.Cut(text, ".")
	if integer == "" || len(integer) > 9 || len(fraction) > rateDecimals {
		return 0, false
	}
	for _, digit := range integer + fraction + strings.Repeat("0", rateDecimals-len(fraction)) {
		if digit < '0' || digit > '9' {
			return 0, false
		}
		rate = 10*rate + int64(digit-'0')
	}
	return rate, true
}

// units is an amount to find the price of, in the units of the rates.
type units struct {
	// each resource's amount, in fractions of denominator.
	each        [len(priced)]int64
	denominator int64
	// unknown is whether it has a resource that has no price anywhere.
	unknown bool
	// whole is whether each has the amount.
	whole bool
}

func unitsOf(amount broker.ResourceQuantities) (u units) {
	var each [len(priced)]*big.Rat
	denominator := big.NewInt(1)
	list := amount.List()
	for i, name := range priced {
		quantity, ok := list[name]
		if !ok {
			continue
		}
		delete(list, name)
		_, unit := unitCost(&broker.Cost{}, name)
		each[i] = new(big.Rat).Quo(exact(quantity), unit)
		// The least common multiple.
		d := each[i].Denom()
		common := new(big.Int).GCD(nil, nil, denominator, d)
		denominator.Mul(denominator, new(big.Int).Quo(d, common))
	}
	u.unknown, u.whole = len(list) > 0, denominator.IsInt64()
	for i := range each {
		if each[i] == nil {
			continue
		}
		n := new(big.Int).Quo(denominator, each[i].Denom())
		n.Mul(n, each[i].Num())
		u.whole = u.whole && n.IsInt64() && n.Sign() >= 0
		if u.whole {
			u.each[i] = n.Int64()
		}
	}
	if u.whole {
		u.denominator = denominator.Int64()
	}
	return u
}

// price of an amount in billionths of its denominator. It is not known if the rates do
// not cover a resource that the amount has. It is not ok if it is no whole number.
func (r *rates) price(u *units) (price int64, known, ok bool) {
	switch {
	case u.unknown, !r.stated:
		return 0, false, true
	case !u.whole:
		return 0, false, false
	}
	for i, n := range u.each {
		if n == 0 {
			continue
		}
		if !r.known[i] {
			return 0, false, true
		}
		high, low := bits.Mul64(uint64(r.each[i]), uint64(n))
		if !r.whole[i] || high > 0 || low > math.MaxInt64-uint64(price) {
			return 0, false, false
		}
		price += int64(low)
	}
	return price, true, true
}

// atMost is the highest price by u that is not above a limit.
func (u *units) atMost(limit *big.Rat) int64 {
	scaled := new(big.Rat).Mul(limit, new(big.Rat).SetInt(new(big.Int).Mul(big.NewInt(rateUnit), big.NewInt(u.denominator))))
	// Rounded down, also below zero.
	most := new(big.Int).Div(scaled.Num(), scaled.Denom())
	switch {
	case most.IsInt64():
		return most.Int64()
	case most.Sign() > 0:
		return math.MaxInt64
	default:
		return math.MinInt64
	}
}
