package decide

import (
	"fmt"
	"math/big"

	corev1 "k8s.io/api/core/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
	"github.com/spillway-dev/spillway/broker/text"
)

// Price of an amount for an hour. It is not known if the cost does not cover a
// resource that the amount has.
func Price(cost *broker.Cost, amount broker.ResourceQuantities) (price *big.Rat, currency string, known bool) {
	if cost == nil {
		return nil, "", false
	}
	price = new(big.Rat)
	for name, quantity := range amount.List() {
		if quantity.IsZero() {
			continue
		}
		each, unit := unitCost(cost, name)
		rate, ok := new(big.Rat).SetString(each)
		if !ok {
			return nil, cost.Currency, false
		}
		units := new(big.Rat).Quo(ledger.Exact(quantity), new(big.Rat).SetInt64(unit))
		price.Add(price, rate.Mul(rate, units))
	}
	return price, cost.Currency, true
}

// PriceString is a price as "0.25 EUR".
func PriceString(price *big.Rat, currency string) string {
	return text.Price(price, currency)
}

// unitCost is the price of one unit of a resource, and how much that unit is: one, or one
// GiB of memory and storage.
func unitCost(cost *broker.Cost, name corev1.ResourceName) (price string, unit int64) {
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

// cost is what a cluster charges for what is requested.
func (s *search) cost(e *entry) *broker.Cost {
	if !e.pricedByClass {
		return e.spec.Cost
	}
	return ledger.CostOf(e.spec, s.request.Want)
}

// rates are those of the cost.
func (s *search) rates(i int) *rates {
	e := s.entries[i]
	if !e.pricedByClass {
		return &e.rates
	}
	rates := ratesOf(s.cost(e))
	return &rates
}

// priced explains why the price of a cluster does not fit the request's budget.
func (s *search) priced(e *entry) (message string) {
	limit := s.request.Budget
	price, currency, known := s.request.price(e.spec.Region, s.cost(e), s.request.Want)
	switch {
	case s.limit == nil:
		return fmt.Sprintf("The budget's maxPricePerHour %q is not a decimal number.", limit.MaxPricePerHour)
	case s.request.Unpriced != "":
		return fmt.Sprintf("What %s provides already has no price in %s, so it is not known what is left of the budget: set the exchange rates in the BrokerConfig.", s.request.Unpriced, limit.Currency)
	case !known && currency != "" && s.request.noRate(e.spec.Region, currency):
		return fmt.Sprintf("The price is in %s, and placement.transferPrice in %s.", currency, s.request.Placement.TransferPrice.Currency)
	case !known:
		return "The cluster advertises no price for some of the requested resources, and the request has a budget."
	}
	exchanged, date, known := Exchange(price, currency, limit.Currency, s.request.ExchangeRates)
	if !known {
		return fmt.Sprintf("The price is in %s, the budget in %s.", currency, limit.Currency)
	}
	most := s.limit
	if s.request.Committed != nil {
		exchanged, most = new(big.Rat).Add(exchanged, s.request.Committed), new(big.Rat).Add(most, s.request.Committed)
	}
	at := s.request.withTransfer(e.spec.Region)
	if date != "" {
		at += fmt.Sprintf(" at the rates of %s", date)
	}
	return fmt.Sprintf("The price is %s per hour%s; the budget is %s.", PriceString(exchanged, limit.Currency), at, PriceString(most, limit.Currency))
}
