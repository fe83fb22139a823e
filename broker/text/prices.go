package text

import (
	"maps"
	"math/big"
	"slices"
	"strings"
)

// Price is a price as "0.25 EUR".
func Price(figure *big.Rat, currency string) string {
	decimal := strings.TrimRight(figure.FloatString(4), "0")
	if decimals := len(decimal) - strings.IndexByte(decimal, '.') - 1; decimals < 2 {
		decimal += strings.Repeat("0", 2-decimals)
	}
	return decimal + " " + currency
}

// Prices are sums of prices by currency. The zero value has none.
type Prices struct {
	Sums map[string]*big.Rat
	// Unknown is whether some of what is summed up has no price.
	Unknown bool
}

// Add adds a price; nil if it is not known.
func (p *Prices) Add(figure *big.Rat, currency string) {
	if figure == nil {
		p.Unknown = true
		return
	}
	if p.Sums == nil {
		p.Sums = map[string]*big.Rat{}
	}
	if p.Sums[currency] == nil {
		p.Sums[currency] = new(big.Rat)
	}
	p.Sums[currency].Add(p.Sums[currency], figure)
}

// AddText adds a price such as "0.25 EUR". What is none is not known.
func (p *Prices) AddText(price string) {
	decimal, currency, _ := strings.Cut(price, " ")
	figure, _ := new(big.Rat).SetString(decimal) // nil for none
	p.Add(figure, currency)
}

// Per is such as "0.25 EUR/h + unknown", with the unit "/h"; empty if no price is known.
func (p *Prices) Per(unit string) string {
	var parts []string
	for _, currency := range slices.Sorted(maps.Keys(p.Sums)) {
		parts = append(parts, Price(p.Sums[currency], currency)+unit)
	}
	if p.Unknown && len(parts) > 0 {
		parts = append(parts, "unknown")
	}
	return strings.Join(parts, " + ")
}
