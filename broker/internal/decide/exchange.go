package decide

import (
	"math/big"
	"slices"
	"strconv"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// rateOf is the exchange rate of a currency; nil if there is none.
func rateOf(rates []broker.ExchangeRate, currency string) *broker.ExchangeRate {
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
	was, is := rateOf(rates, from), rateOf(rates, to)
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

// factor is what turns figures of one currency into those of another, for scores.
func factor(from, to string, rates []broker.ExchangeRate) (f float64, known bool) {
	if from == to {
		return 1, true
	}
	was, is := rateOf(rates, from), rateOf(rates, to)
	if was == nil || is == nil {
		return 0, false
	}
	worth, err := strconv.ParseFloat(was.Rate, 64)
	unit, err2 := strconv.ParseFloat(is.Rate, 64)
	return worth / unit, err == nil && err2 == nil && unit > 0
}
