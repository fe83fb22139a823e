package decide

import (
	"fmt"
	"math/big"
	"slices"
	"strings"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// filters say why a cluster cannot be asked at all, "" if it can. The first
// that objects is the one that is told.
var filters = []func(*Request, *Cluster) (reason, message string){
	notItself,
	lends,
	admitsConsumer,
	isActive,
	isFresh,
	isPinned,
	isPlaced,
	hasNotRefused,
	isAffordable,
}

func filter(ask *Request, cluster *Cluster) (reason, message string) {
	for _, f := range filters {
		if reason, message = f(ask, cluster); reason != "" {
			return reason, message
		}
	}
	return "", ""
}

func notItself(ask *Request, cluster *Cluster) (reason, message string) {
	if cluster.Spec.ClusterID == ask.Requester {
		return ReasonRequesterItself, "It is the requester itself."
	}
	return "", ""
}

func lends(_ *Request, cluster *Cluster) (reason, message string) {
	if !cluster.Spec.Lending.Enabled {
		return ReasonLendingDisabled, "It does not lend (lend.enabled is false there)."
	}
	return "", ""
}

func admitsConsumer(ask *Request, cluster *Cluster) (reason, message string) {
	if consumers := cluster.Spec.Lending.Consumers; len(consumers) > 0 && !slices.Contains(consumers, ask.Requester) {
		return ReasonConsumerNotAdmitted, fmt.Sprintf("It lends to %s only (lend.consumers), not to %s.",
			strings.Join(consumers, ", "), ask.Requester)
	}
	return "", ""
}

func isActive(_ *Request, cluster *Cluster) (reason, message string) {
	if !cluster.Active {
		return ReasonInactive, "It has not advertised for long; its agent may be down or cut off."
	}
	return "", ""
}

func isFresh(_ *Request, cluster *Cluster) (reason, message string) {
	if !cluster.Fresh {
		return ReasonStale, "Its last advertisement is too old to place anything on; it is considered again when it next advertises."
	}
	return "", ""
}

func isPinned(ask *Request, cluster *Cluster) (reason, message string) {
	if ask.Pin != "" && ask.Pin != cluster.Spec.ClusterID {
		return ReasonPinnedElsewhere, fmt.Sprintf("The reservation is pinned to %s (targetClusterID).", ask.Pin)
	}
	return "", ""
}

func isPlaced(ask *Request, cluster *Cluster) (reason, message string) {
	placement := ask.Placement
	if placement == nil {
		return "", ""
	}
	outside := func(allowed []string, where string) bool { return len(allowed) > 0 && !slices.Contains(allowed, where) }
	switch {
	case slices.Contains(placement.ExcludeClusters, cluster.Spec.ClusterID):
		return ReasonExcluded, "The placement excludes it (excludeClusters)."
	case outside(placement.Regions, cluster.Spec.Region):
		return ReasonOtherRegion, fmt.Sprintf("Its region is %q; the placement allows %s.", cluster.Spec.Region, strings.Join(placement.Regions, ", "))
	case outside(placement.Zones, cluster.Spec.Zone):
		return ReasonOtherZone, fmt.Sprintf("Its zone is %q; the placement allows %s.", cluster.Spec.Zone, strings.Join(placement.Zones, ", "))
	}
	return "", ""
}

func hasNotRefused(ask *Request, cluster *Cluster) (reason, message string) {
	for _, refusal := range ask.Refused {
		if refusal.Cluster == cluster.Spec.ClusterID && refusal.Sequence >= cluster.Spec.Sequence {
			return ReasonRefused, fmt.Sprintf("It turned this down (%s); it is asked again after its next advertisement.",
				strings.TrimRight(refusal.Message, ". "))
		}
	}
	return "", ""
}

func isAffordable(ask *Request, cluster *Cluster) (reason, message string) {
	if ask.Budget == nil {
		return "", ""
	}
	limit, ok := new(big.Rat).SetString(ask.Budget.MaxPricePerHour)
	if !ok {
		return ReasonOverBudget, fmt.Sprintf("The budget's maxPricePerHour %q is not a decimal number.", ask.Budget.MaxPricePerHour)
	}
	price, currency, known := Price(cluster.Spec.Cost, ask.Want.Totals)
	switch {
	case !known:
		return ReasonPriceUnknown, "There is a budget, and it gives no price for all that is asked for."
	case currency != ask.Budget.Currency:
		return ReasonPriceUnknown, fmt.Sprintf("The budget is in %s, its price in %s.", ask.Budget.Currency, currency)
	}
	if ask.Committed != nil {
		price = new(big.Rat).Add(price, ask.Committed)
	}
	if price.Cmp(limit) > 0 {
		return ReasonOverBudget, fmt.Sprintf("It would cost %s an hour; the budget is %s.",
			PriceString(price, currency), PriceString(limit, ask.Budget.Currency))
	}
	return "", ""
}

// gib is the unit that memory and storage are priced in, in bytes.
var gib = big.NewRat(1<<30, 1)

// Price of an amount for an hour. Not known if the cost says nothing of a kind
// that the amount has.
func Price(cost *broker.Cost, amount broker.ResourceQuantities) (price *big.Rat, currency string, known bool) {
	if cost == nil {
		return nil, "", false
	}
	price = new(big.Rat)
	for name, quantity := range amount.List() {
		unit, each := unitCost(cost, name)
		rate, ok := new(big.Rat).SetString(unit)
		if !ok {
			return nil, cost.Currency, false
		}
		units := new(big.Rat).Quo(exact(quantity), each)
		price.Add(price, rate.Mul(rate, units))
	}
	return price, cost.Currency, true
}

// PriceString is a price as "0.25 EUR".
func PriceString(price *big.Rat, currency string) string {
	figure := strings.TrimRight(price.FloatString(4), "0")
	if decimals := len(figure) - strings.IndexByte(figure, '.') - 1; decimals < 2 {
		figure += strings.Repeat("0", 2-decimals)
	}
	return figure + " " + currency
}
