package decide

import (
	"math/big"
	"slices"
	"strconv"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/pricing"
)

// transfer is what a pod pays in a region for its data, which is elsewhere; nil for nothing.
func (r *Request) transfer(region string) *broker.TransferPrice {
	if r.Placement == nil || r.Placement.TransferPrice == nil || slices.Contains(r.Placement.DataRegions, region) {
		return nil
	}
	return r.Placement.TransferPrice
}

// withTransfer words a price in a region.
func (r *Request) withTransfer(region string) string {
	if r.transfer(region) == nil {
		return ""
	}
	return " with the transfer of data"
}

// noRate reports whether a transfer in a region cannot be added to prices in a currency.
func (r *Request) noRate(region, currency string) bool {
	transfer := r.transfer(region)
	if transfer == nil {
		return false
	}
	_, _, known := pricing.Exchange(new(big.Rat), transfer.Currency, currency, r.ExchangeRates)
	return !known
}

// price is Price in a region, with the transfer of the data. It is not known if there is no exchange
// rate between the two.
func (r *Request) price(region string, cost *broker.Cost, amount broker.HeldCapacity) (price *big.Rat, currency string, known bool) {
	price, currency, known = pricing.Of(cost, amount.Totals)
	transfer := r.transfer(region)
	if !known || transfer == nil {
		return price, currency, known
	}
	each, ok := new(big.Rat).SetString(transfer.PricePerHour)
	if !ok {
		return nil, currency, false
	}
	added, _, known := pricing.Exchange(each.Mul(each, new(big.Rat).SetInt64(int64(amount.Pods()))), transfer.Currency, currency, r.ExchangeRates)
	if !known {
		return nil, currency, false
	}
	return price.Add(price, added), currency, true
}

// rated is the price in a cluster of what is wanted, and the rates that it has there, for scores.
func (s *search) rated(i int) (rates *rates, price float64, known bool) {
	rates = s.rates(i)
	price, known = rates.price(&s.units)
	transfer := s.request.transfer(s.entries[i].spec.Region)
	if !known || transfer == nil {
		return rates, price, known
	}
	each, err := strconv.ParseFloat(transfer.PricePerHour, 64)
	exchange, known := pricing.Factor(transfer.Currency, rates.currency, s.request.ExchangeRates)
	return rates, price + each*exchange*float64(s.request.Want.Pods()), known && err == nil
}
