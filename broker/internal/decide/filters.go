package decide

import (
	"fmt"
	"math/big"
	"slices"
	"strings"

	"github.com/spillway-dev/spillway/broker/capacity"
)

// filters reject a cluster for what has nothing to do with its free capacity.
// The first rejection counts.
var filters = []func(*Request, *cluster) *capacity.Rejection{
	notRequester,
	admitsConsumer,
	isActive,
	isFresh,
	isPinned,
	matchesPlacement,
	isNotRejected,
	isWithinBudget,
}

func filter(request *Request, cluster *cluster) *capacity.Rejection {
	for _, f := range filters {
		if rejection := f(request, cluster); rejection != nil {
			return rejection
		}
	}
	return nil
}

func reject(reason, format string, args ...any) *capacity.Rejection {
	return &capacity.Rejection{Reason: reason, Message: fmt.Sprintf(format, args...)}
}

func notRequester(request *Request, cluster *cluster) *capacity.Rejection {
	if cluster.Spec.ClusterID == request.Requester {
		return reject(ReasonRequesterItself, "The cluster is the requester itself.")
	}
	return nil
}

func admitsConsumer(request *Request, cluster *cluster) *capacity.Rejection {
	return capacity.Admit(cluster.Spec.Lending, request.Requester)
}

func isActive(_ *Request, cluster *cluster) *capacity.Rejection {
	if !cluster.Active {
		return reject(ReasonClusterInactive, "The cluster has stopped advertising. Check that its agent runs and reaches the broker.")
	}
	return nil
}

func isFresh(_ *Request, cluster *cluster) *capacity.Rejection {
	if !cluster.Fresh {
		return reject(ReasonAdvertisementStale, "The last advertisement is too old for a placement. The cluster is considered again with its next advertisement.")
	}
	return nil
}

func isPinned(request *Request, cluster *cluster) *capacity.Rejection {
	if request.Pin != "" && request.Pin != cluster.Spec.ClusterID {
		return reject(ReasonPinnedElsewhere, "The Reservation is pinned to %s (targetClusterID).", request.Pin)
	}
	return nil
}

func matchesPlacement(request *Request, cluster *cluster) *capacity.Rejection {
	placement := request.Placement
	if placement == nil {
		return nil
	}
	outside := func(allowed []string, where string) bool { return len(allowed) > 0 && !slices.Contains(allowed, where) }
	switch {
	case slices.Contains(placement.ExcludeClusters, cluster.Spec.ClusterID):
		return reject(ReasonExcluded, "The placement excludes the cluster (excludeClusters).")
	case outside(placement.Regions, cluster.Spec.Region):
		return reject(ReasonOtherRegion, "The region is %q; the placement allows %s.", cluster.Spec.Region, strings.Join(placement.Regions, ", "))
	case outside(placement.Zones, cluster.Spec.Zone):
		return reject(ReasonOtherZone, "The zone is %q; the placement allows %s.", cluster.Spec.Zone, strings.Join(placement.Zones, ", "))
	}
	return nil
}

func isNotRejected(request *Request, cluster *cluster) *capacity.Rejection {
	if rejection, rejected := request.Rejected[cluster.Spec.ClusterID]; rejected {
		return &rejection
	}
	return nil
}

func isWithinBudget(request *Request, cluster *cluster) *capacity.Rejection {
	if request.Budget == nil {
		return nil
	}
	limit, ok := new(big.Rat).SetString(request.Budget.MaxPricePerHour)
	if !ok {
		return reject(ReasonOverBudget, "The budget's maxPricePerHour %q is not a decimal number.", request.Budget.MaxPricePerHour)
	}
	price, currency, known := Price(cluster.Spec.Cost, request.Want.Totals)
	switch {
	case !known:
		return reject(ReasonPriceUnknown, "The cluster advertises no price for some of the requested resources, and the request has a budget.")
	case currency != request.Budget.Currency:
		return reject(ReasonPriceUnknown, "The price is in %s, the budget in %s.", currency, request.Budget.Currency)
	}
	if request.Committed != nil {
		price = new(big.Rat).Add(price, request.Committed)
	}
	if price.Cmp(limit) > 0 {
		return reject(ReasonOverBudget, "The price is %s per hour; the budget is %s.",
			PriceString(price, currency), PriceString(limit, request.Budget.Currency))
	}
	return nil
}
