package ledger

import (
	"cmp"
	"math/big"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// prices are those of a Cost, by resource, and its amount.
var prices = [...]struct {
	name corev1.ResourceName
	of   func(*broker.Cost) *string
	in   func(*broker.ResourceQuantities) *resource.Quantity
}{
	{corev1.ResourceCPU, func(c *broker.Cost) *string { return &c.CPUCost }, func(q *broker.ResourceQuantities) *resource.Quantity { return q.CPU }},
	{corev1.ResourceMemory, func(c *broker.Cost) *string { return &c.MemoryCost }, func(q *broker.ResourceQuantities) *resource.Quantity { return q.Memory }},
	{broker.ResourceGPU, func(c *broker.Cost) *string { return &c.GPUCost }, func(q *broker.ResourceQuantities) *resource.Quantity { return q.GPU }},
	{corev1.ResourceEphemeralStorage, func(c *broker.Cost) *string { return &c.StorageCost }, func(q *broker.ResourceQuantities) *resource.Quantity { return q.Storage }},
}

// CostOf returns the prices of a capacity at a cluster; nil if they are unknown. The provider
// chooses the nodes, so each resource has the highest price of the nodes where the pods may
// run: a budget holds wherever they do. Of several pod sets it is the mean.
func CostOf(spec *broker.ClusterAdvertisementSpec, amount broker.HeldCapacity) *broker.Cost {
	switch {
	case !capacity.PricedByClass(spec):
		return spec.Cost
	case len(amount.PodSets) == 0:
		return highest(spec, &broker.PodSet{}, &amount.Totals)
	}
	var cost *broker.Cost
	var before broker.HeldCapacity
	for i := range amount.PodSets {
		set := &amount.PodSets[i]
		of := highest(spec, set, &set.Requests)
		if len(amount.PodSets) == 1 {
			return of
		}
		part := capacity.OfPodSets(amount.PodSets[i : i+1])
		cost = lock(cost, before, of, part)
		before = capacity.Add(before, part)
	}
	return cost
}

// highest returns the highest price of each requested resource on the nodes that can run pods of a
// set. It is on the path of each decision: only nodes that raise a price are compared with the pods.
func highest(spec *broker.ClusterAdvertisementSpec, set *broker.PodSet, requested *broker.ResourceQuantities) *broker.Cost {
	var cost broker.Cost
	var known, raises [len(prices)]bool
	some := false
	for i := range spec.NodeClasses {
		class := &spec.NodeClasses[i]
		of := cmp.Or(class.Cost, spec.Cost)
		matters := !some || of == nil || of.Currency != cost.Currency
		for k, price := range prices {
			raises[k] = isSome(price.in(requested)) && of != nil && (!known[k] || dearer(*price.of(of), *price.of(&cost)))
			matters = matters || raises[k]
		}
		switch {
		case !matters, !capacity.MayRun(class, set):
			continue
		case of == nil, some && of.Currency != cost.Currency:
			return nil
		}
		some, cost.Currency = true, of.Currency
		for k, price := range prices {
			// What these nodes do not have cannot be used there.
			if raises[k] && (class.LargestNode == nil || isSome(price.in(class.LargestNode))) {
				*price.of(&cost), known[k] = *price.of(of), true
			}
		}
	}
	if !some {
		return spec.Cost
	}
	return &cost
}

func isSome(amount *resource.Quantity) bool { return amount != nil && !amount.IsZero() }

// dearer reports whether a price is higher than another one, by their digits. One that is unknown
// is higher than all.
func dearer(is, than string) bool {
	whole, part, _ := strings.Cut(strings.TrimLeft(is, "0"), ".")
	wholeThan, partThan, _ := strings.Cut(strings.TrimLeft(than, "0"), ".")
	return than != "" && (is == "" || cmp.Or(cmp.Compare(len(whole), len(wholeThan)), cmp.Compare(whole, wholeThan),
		cmp.Compare(strings.TrimRight(part, "0"), strings.TrimRight(partThan, "0"))) > 0)
}

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
	mean := &broker.Cost{Currency: locked.Currency}
	for _, price := range prices {
		*price.of(mean) = meanPrice(*price.of(locked), before[price.name], *price.of(present), more[price.name])
	}
	return mean
}

// meanPrice is the mean of two prices by amount, rounded up to nine decimals.
func meanPrice(was string, before resource.Quantity, is string, more resource.Quantity) string {
	a, b := Exact(before), Exact(more)
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

// Exact is a quantity as a number without rounding.
func Exact(q resource.Quantity) *big.Rat {
	dec := q.AsDec()
	scale := new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(max(dec.Scale(), -dec.Scale()))), nil)
	if dec.Scale() < 0 {
		return new(big.Rat).SetInt(scale.Mul(scale, dec.UnscaledBig()))
	}
	return new(big.Rat).SetFrac(dec.UnscaledBig(), scale)
}
