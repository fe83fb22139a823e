package history

import (
	"maps"
	"math/big"
	"strings"
	"time"

	"gopkg.in/inf.v0"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/pricing"
)

// Amount is capacity over time, by resource: thousandths of a unit times milliseconds. Sums are
// exact. It is never changed once it is made.
type Amount map[corev1.ResourceName]*big.Int

// hour is one unit for an hour in an Amount, gib that of a GiB.
var (
	hour = big.NewInt(capacity.Unit * time.Hour.Milliseconds())
	gib  = new(big.Int).Lsh(hour, 30)
)

// over is a capacity for as long as that.
func over(v capacity.Vector, d time.Duration) Amount {
	a := Amount{}
	for name, amount := range v {
		if amount > 0 {
			a[name] = new(big.Int).Mul(big.NewInt(amount), big.NewInt(d.Milliseconds()))
		}
	}
	return a
}

// Plus is the sum of two amounts.
func (a Amount) Plus(b Amount) Amount {
	sum := maps.Clone(a)
	if sum == nil {
		sum = Amount{}
	}
	for name, amount := range b {
		if sum[name] != nil {
			amount = new(big.Int).Add(sum[name], amount)
		}
		sum[name] = amount
	}
	return sum
}

// Hours are the capacity-hours of a resource: core-hours, GiB-hours of memory and storage, and
// hours of one unit of all else.
func (a Amount) Hours(name corev1.ResourceName) *big.Rat {
	amount, unit := a[name], hour
	if amount == nil {
		return new(big.Rat)
	}
	if inGiB(name) {
		unit = gib
	}
	return new(big.Rat).SetFrac(amount, unit)
}

// inGiB reports whether an amount of a resource is bytes, which people read in GiB.
func inGiB(name corev1.ResourceName) bool {
	return name == corev1.ResourceMemory || name == corev1.ResourceEphemeralStorage || strings.HasPrefix(string(name), corev1.ResourceHugePagesPrefix)
}

// AllHours are the capacity-hours of all resources, as decimal numbers.
func (a Amount) AllHours() map[string]string {
	hours := map[string]string{}
	for name := range a {
		hours[string(name)] = Decimal(a.Hours(name))
	}
	return hours
}

// Price is what an amount costs at the prices of an hour. It is not known if they do not cover
// one of its resources.
func (a Amount) Price(prices *broker.Cost) (price *big.Rat, known bool) {
	list := corev1.ResourceList{}
	for name, amount := range a {
		// In units times seconds, which is a finite decimal number.
		list[name] = *resource.NewDecimalQuantity(*inf.NewDecBig(new(big.Int).Set(amount), 6), resource.DecimalSI)
	}
	price, _, known = pricing.Of(prices, broker.FromList(list))
	if !known {
		return nil, false
	}
	return price.Quo(price, big.NewRat(3600, 1)), true
}

// decimals are those of hours and costs that are shown.
const decimals = 6

// Decimal is a number rounded to 6 decimals, without zeros at its end.
func Decimal(n *big.Rat) string {
	if n == nil {
		return "0"
	}
	return strings.TrimSuffix(strings.TrimRight(n.FloatString(decimals), "0"), ".")
}
