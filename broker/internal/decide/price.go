package decide

import (
	"fmt"
	"math/big"
	"strings"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
	"github.com/spillway-dev/spillway/broker/internal/pricing"
	"github.com/spillway-dev/spillway/broker/text"
)

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
		return fmt.Sprintf("What %s provides already has no price in %s, so it is not known what is left of the budget: set the exchange rates in the BrokerConfig, or create the Reservation again.", s.request.Unpriced, limit.Currency)
	case !known && currency != "" && s.request.noRate(e.spec.Region, currency):
		return fmt.Sprintf("The price is in %s, and placement.transferPrice in %s.", currency, s.request.Placement.TransferPrice.Currency)
	case !known:
		missing := pricing.Missing(s.cost(e), s.request.Want.Totals)
		return fmt.Sprintf("The cluster advertises no price of %s, and the request has a budget.", strings.Join(missing, ", "))
	}
	exchanged, date, known := pricing.Exchange(price, currency, limit.Currency, s.request.ExchangeRates)
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
	return fmt.Sprintf("The price is %s per hour%s; the budget is %s.", text.Price(exchanged, limit.Currency), at, text.Price(most, limit.Currency))
}
