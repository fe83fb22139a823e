package ledger

import (
	"math/big"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// lock returns what a hold costs after it has grown: its former prices for what it had,
// the provider's present ones for the growth, as their mean per resource. A price that
// is unknown for one part is unknown for the hold.
func lock(locked *broker.Cost, held broker.HeldCapacity, present *broker.Cost, growth broker.HeldCapacity) *broker.Cost {
	switch {
	case present == nil:
		return nil
	case held.Empty():
		return present.DeepCopy()
	case locked == nil || locked.Currency != present.Currency:
		return nil
	case *locked == *present:
		return locked.DeepCopy()
	}
	before, more := held.Totals.List(), growth.Totals.List()
	mean := func(name corev1.ResourceName, was, is string) string {
		return meanPrice(was, before[name], is, more[name])
	}
	return &broker.Cost{
		Currency:    locked.Currency,
		CPUCost:     mean(corev1.ResourceCPU, locked.CPUCost, present.CPUCost),
		MemoryCost:  mean(corev1.ResourceMemory, locked.MemoryCost, present.MemoryCost),
		GPUCost:     mean(broker.ResourceGPU, locked.GPUCost, present.GPUCost),
		StorageCost: mean(corev1.ResourceEphemeralStorage, locked.StorageCost, present.StorageCost),
	}
}

// meanPrice is the mean of two prices by amount, rounded up to nine decimals.
func meanPrice(was string, before resource.Quantity, is string, more resource.Quantity) string {
	a, b := exact(before), exact(more)
	sum := new(big.Rat).Add(a, b)
	switch {
	case was == is || b.Sign() == 0:
		return was
	case a.Sign() == 0:
		return is
	}
	first, ok := new(big.Rat).SetString(was)
	second, ok2 := new(big.Rat).SetString(is)
	if !ok || !ok2 {
		return ""
	}
	total := new(big.Rat).Add(first.Mul(first, a), second.Mul(second, b))
	mean := total.Quo(total, sum)
	scaled := new(big.Rat).Mul(mean, big.NewRat(1_000_000_000, 1))
	up, rest := new(big.Int).QuoRem(scaled.Num(), scaled.Denom(), new(big.Int))
	if rest.Sign() > 0 {
		up.Add(up, big.NewInt(1))
	}
	figure := new(big.Rat).SetFrac(up, big.NewInt(1_000_000_000)).FloatString(9)
	return strings.TrimSuffix(strings.TrimRight(figure, "0"), ".")
}

// exact is a quantity as a number without rounding.
func exact(q resource.Quantity) *big.Rat {
	value, _ := new(big.Rat).SetString(q.AsDec().String())
	return value
}
