package decide

import (
	"maps"
	"math"
	"math/big"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// vector is an amount of capacity in thousandths of a unit. Room is rounded
// down and need is rounded up, so that a rounding never makes place.
type vector map[corev1.ResourceName]int64

func room(q broker.ResourceQuantities) vector { return toVector(q, false) }
func need(q broker.ResourceQuantities) vector { return toVector(q, true) }

func toVector(q broker.ResourceQuantities, up bool) vector {
	v := vector{}
	for name, quantity := range q.List() {
		v[name] = milli(quantity, up)
	}
	return v
}

func milli(q resource.Quantity, up bool) int64 {
	if q.CmpInt64(math.MaxInt64/1000) >= 0 {
		return math.MaxInt64
	}
	m := q.MilliValue() // rounds up
	if !up && resource.NewMilliQuantity(m, q.Format).Cmp(q) > 0 {
		m--
	}
	return max(m, 0)
}

// times is how often v fits into free; math.MaxInt64 if v is nothing.
func (v vector) times(free vector) int64 {
	n := int64(math.MaxInt64)
	for name, amount := range v {
		if amount > 0 {
			n = min(n, free[name]/amount)
		}
	}
	return n
}

// take is v less n times amount, in a new vector. The caller knows that it fits.
func (v vector) take(amount vector, n int64) vector {
	out := maps.Clone(v)
	if n > 0 {
		for name, a := range amount {
			out[name] -= n * a
		}
	}
	return out
}

func (v vector) zero() bool {
	for _, amount := range v {
		if amount != 0 {
			return false
		}
	}
	return true
}

// names of the kinds in v, in order.
func (v vector) names() []corev1.ResourceName { return slices.Sorted(maps.Keys(v)) }

// figures lists v's amounts of the given kinds, zeros too, as "cpu 1200m,
// memory 900Mi".
func (v vector) figures(names []corev1.ResourceName) string {
	words := make([]string, len(names))
	for i, name := range names {
		words[i] = string(name) + " " + figure(name, v[name])
	}
	return strings.Join(words, ", ")
}

func figure(name corev1.ResourceName, milli int64) string {
	format := resource.DecimalSI
	if name == corev1.ResourceMemory || name == corev1.ResourceEphemeralStorage || strings.HasPrefix(string(name), corev1.ResourceHugePagesPrefix) {
		format = resource.BinarySI
	}
	if milli%1000 == 0 {
		return resource.NewQuantity(milli/1000, format).String()
	}
	return resource.NewMilliQuantity(milli, format).String()
}

// exact is a quantity as a number without rounding.
func exact(q resource.Quantity) *big.Rat {
	dec := q.AsDec()
	scale := new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(max(dec.Scale(), -dec.Scale()))), nil)
	if dec.Scale() < 0 {
		return new(big.Rat).SetInt(scale.Mul(scale, dec.UnscaledBig()))
	}
	return new(big.Rat).SetFrac(dec.UnscaledBig(), scale)
}

// unitCost is the price of one unit of a kind, and how much that unit is.
func unitCost(cost *broker.Cost, name corev1.ResourceName) (price string, unit *big.Rat) {
	switch name {
	case corev1.ResourceCPU:
		return cost.CPUCost, big.NewRat(1, 1)
	case corev1.ResourceMemory:
		return cost.MemoryCost, gib
	case broker.ResourceGPU:
		return cost.GPUCost, big.NewRat(1, 1)
	case corev1.ResourceEphemeralStorage:
		return cost.StorageCost, gib
	default:
		return "", gib
	}
}
