// Package pricing says what an amount costs, exactly, and exchanges currencies. It is pure.
package pricing

import (
	"math/big"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
)

// Of is the price of an amount for an hour. It is not known if the cost does not cover a
// resource that the amount has.
func Of(cost *broker.Cost, amount broker.ResourceQuantities) (price *big.Rat, currency string, known bool) {
	if cost == nil {
		return nil, "", false
	}
	price = new(big.Rat)
	for name, quantity := range amount.List() {
		if quantity.IsZero() {
			continue
		}
		each, unit := UnitCost(cost, name)
		rate, ok := new(big.Rat).SetString(each)
		if !ok {
			return nil, cost.Currency, false
		}
		units := new(big.Rat).Quo(ledger.Exact(quantity), new(big.Rat).SetInt64(unit))
		price.Add(price, rate.Mul(rate, units))
	}
	return price, cost.Currency, true
}

// Missing names what an amount has and a cost does not cover, sorted.
func Missing(cost *broker.Cost, amount broker.ResourceQuantities) (names []string) {
	for name, quantity := range amount.List() {
		if _, _, known := Of(cost, broker.FromList(corev1.ResourceList{name: quantity})); !known && !quantity.IsZero() {
			names = append(names, string(name))
		}
	}
	slices.Sort(names)
	return names
}

// UnitCost is the price of one unit of a resource, and how much that unit is: one, or one
// GiB of memory and storage.
func UnitCost(cost *broker.Cost, name corev1.ResourceName) (price string, unit int64) {
	const gib = 1 << 30
	switch name {
	case corev1.ResourceCPU:
		return cost.CPUCost, 1
	case corev1.ResourceMemory:
		return cost.MemoryCost, gib
	case broker.ResourceGPU:
		return cost.GPUCost, 1
	case corev1.ResourceEphemeralStorage:
		return cost.StorageCost, gib
	default:
		return "", 1
	}
}

// RateOf is the exchange rate of a currency; nil if there is none.
func RateOf(rates []broker.ExchangeRate, currency string) *broker.ExchangeRate {
	at := slices.IndexFunc(rates, func(r broker.ExchangeRate) bool { return r.Currency == currency })
	if at < 0 {
		return nil
	}
	return &rates[at]
}

// Exchange is a price in another currency, and the date of the older of the two rates, "" if it is
// the same currency. It is not known if a rate is missing.
func Exchange(price *big.Rat, from, to string, rates []broker.ExchangeRate) (exchanged *big.Rat, date string, known bool) {
	if from == to {
		return price, "", true
	}
	was, is := RateOf(rates, from), RateOf(rates, to)
	if was == nil || is == nil {
		return nil, "", false
	}
	worth, ok := new(big.Rat).SetString(was.Rate)
	unit, ok2 := new(big.Rat).SetString(is.Rate)
	if !ok || !ok2 || unit.Sign() <= 0 {
		return nil, "", false
	}
	worth.Mul(worth, price)
	return worth.Quo(worth, unit), min(was.Date, is.Date), true
}

// Factor is what turns figures of one currency into those of another, for scores.
func Factor(from, to string, rates []broker.ExchangeRate) (f float64, known bool) {
	if from == to {
		return 1, true
	}
	was, is := RateOf(rates, from), RateOf(rates, to)
	if was == nil || is == nil {
		return 0, false
	}
	worth, err := strconv.ParseFloat(was.Rate, 64)
	unit, err2 := strconv.ParseFloat(is.Rate, 64)
	return worth / unit, err == nil && err2 == nil && unit > 0
}
