package text_test

import (
	"math/big"
	"testing"

	"github.com/spillway-dev/spillway/broker/text"
)

func TestPrices(t *testing.T) {
	for name, tc := range map[string]struct {
		prices   []string
		unit     string
		want     string
		unpriced bool
	}{
		"none":            {},
		"one":             {prices: []string{"0.25 EUR"}, want: "0.25 EUR"},
		"a sum":           {prices: []string{"0.1 EUR", "0.0625 EUR"}, want: "0.1625 EUR"},
		"two currencies":  {prices: []string{"2 USD", "1 EUR"}, unit: "/h", want: "1.00 EUR/h + 2.00 USD/h"},
		"a part is known": {prices: []string{"", "0.25 EUR"}, unit: "/h", want: "0.25 EUR/h + unknown", unpriced: true},
		"nothing known":   {prices: []string{"", "dear"}, unpriced: true},
	} {
		t.Run(name, func(t *testing.T) {
			var prices text.Prices
			for _, price := range tc.prices {
				prices.AddText(price)
			}
			if got := prices.Per(tc.unit); got != tc.want || prices.Unknown != tc.unpriced {
				t.Errorf("got %q, unknown %t, want %q", got, prices.Unknown, tc.want)
			}
		})
	}
	if got := text.Price(big.NewRat(1, 3), "EUR"); got != "0.3333 EUR" {
		t.Errorf("a third is %s", got)
	}
}
