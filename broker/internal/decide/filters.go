package decide

import (
	"fmt"
	"math/big"
	"slices"
	"strings"

	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/pricing"
	"github.com/spillway-dev/spillway/broker/internal/spread"
)

// filter returns the reason to reject a cluster for what has nothing to do with its
// free capacity, "" for none. The first one counts.
func (s *search) filter(e *entry) (reason string) {
	request, spec := &s.request, e.spec
	if spec.ClusterID == request.Requester {
		return ReasonRequesterItself
	}
	if reason := capacity.AdmitReason(spec.Lending, request.Requester, request.Want.PodSets); reason != "" {
		return reason
	}
	switch active, fresh := s.activity(spec.ClusterID); {
	case !active:
		return ReasonClusterInactive
	case !fresh:
		return ReasonAdvertisementTooOld
	case request.Pin != "" && request.Pin != spec.ClusterID:
		return ReasonPinnedElsewhere
	case slices.Contains(s.unreachable, spec.ClusterID):
		return ReasonUnreachable
	}
	if placement := request.Placement; placement != nil {
		switch {
		case slices.Contains(placement.ExcludeClusters, spec.ClusterID):
			return ReasonExcluded
		case outside(placement.Regions, spec.Region):
			return ReasonOtherRegion
		case outside(placement.Zones, spec.Zone):
			return ReasonOtherZone
		case placement.Spread != nil && spread.DomainOf(placement.Spread, spec) == "":
			return ReasonNoDomain
		}
	}
	if rejection, rejected := request.Rejected[spec.ClusterID]; rejected {
		return rejection.Reason
	}
	if len(request.Providers) >= MaxProviders && !slices.Contains(request.Providers, spec.ClusterID) {
		return reasonTooManyProviders
	}
	return s.overBudget(e)
}

// outside reports whether a place is none of those that are allowed: all are if there are none.
func outside(allowed []string, where string) bool {
	return len(allowed) > 0 && !slices.Contains(allowed, where)
}

func (s *search) prepareBudget() {
	s.limit = nil
	if s.request.Budget == nil {
		return
	}
	if limit, ok := new(big.Rat).SetString(s.request.Budget.MaxPricePerHour); ok {
		s.limit = limit
		if s.request.Committed != nil {
			limit.Sub(limit, s.request.Committed)
		}
	}
}

// overBudget returns the reason to reject a cluster for its price, "" for none.
func (s *search) overBudget(e *entry) (reason string) {
	if s.request.Budget == nil {
		return ""
	}
	if s.limit == nil {
		return ReasonOverBudget
	}
	if s.request.Unpriced != "" {
		return ReasonPriceUnknown
	}
	price, currency, known := s.request.price(e.spec.Region, s.cost(e), s.request.Want)
	if known {
		price, _, known = pricing.Exchange(price, currency, s.request.Budget.Currency, s.request.ExchangeRates)
	}
	switch {
	case !known:
		return ReasonPriceUnknown
	case price.Cmp(s.limit) > 0:
		return ReasonOverBudget
	}
	return ""
}

// filtered explains the reason of filter.
func (s *search) filtered(e *entry, reason string) (message string) {
	request, spec := &s.request, e.spec
	if rejection, rejected := request.Rejected[spec.ClusterID]; rejected && rejection.Reason == reason {
		return rejection.Message
	}
	switch reason {
	case ReasonRequesterItself:
		return "The cluster is the requester itself."
	case ReasonClusterInactive:
		return "The cluster has stopped advertising. Check that its agent runs and reaches the broker."
	case ReasonAdvertisementTooOld:
		return "The last advertisement is too old for a placement. The cluster is considered again with its next advertisement."
	case ReasonUnreachable:
		return fmt.Sprintf("Cluster %s cannot connect to its API server at %s. Check the network between them, and the provider's value apiServer.endpoint.", request.Requester, spec.EndpointURL)
	case ReasonPinnedElsewhere:
		return fmt.Sprintf("The Reservation is pinned to %s (targetClusterID).", request.Pin)
	case ReasonExcluded:
		return "The placement excludes the cluster (excludeClusters)."
	case ReasonOtherRegion:
		return fmt.Sprintf("The region is %q; the placement allows %s.", spec.Region, strings.Join(request.Placement.Regions, ", "))
	case ReasonOtherZone:
		return fmt.Sprintf("The zone is %q; the placement allows %s.", spec.Zone, strings.Join(request.Placement.Zones, ", "))
	case ReasonNoDomain:
		return fmt.Sprintf("The cluster states no %s, over which placement.spread divides the pods.", request.Placement.Spread.Over)
	case reasonTooManyProviders:
		return fmt.Sprintf("The Reservation has capacity at %d other providers, the maximum. Request the rest in another Reservation.", MaxProviders)
	case ReasonPriceUnknown, ReasonOverBudget:
		return s.priced(e)
	}
	if admitted := capacity.Admit(spec.Lending, request.Requester, request.Want.PodSets); admitted != nil {
		return admitted.Message
	}
	return ""
}
