package capacity

import (
	"cmp"
	"slices"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// remedies have the reasons of rejections, those that came closest first, and what to do about them.
var remedies = []struct {
	fix     string
	reasons []string
}{
	{"Wait for room where the message says, or add nodes there. Or raise maxSkew of placement.spread, or exclude the clusters there (placement.excludeClusters).", []string{"ShareLimited"}},
	{"Wait: the capacity is requested again when it appears. Or request less, or add nodes to a provider.", []string{ReasonPartialCapacity, ReasonInsufficientCapacity}},
	{"Wait: the broker asks the providers again. Or correct what they say.", []string{"Refused", "NotAnswering", "Unusable"}},
	{"Raise the budget of the OverflowPolicy, or wait for a lower price.", []string{"OverBudget"}},
	{"Let the provider advertise a price for all that is requested (value cost of its agent), and the BrokerConfig have exchange rates between its currency and the budget's.", []string{"PriceUnknown"}},
	{"Request capacity for fewer pods, or larger providers.", []string{"TooManyProviders"}},
	{"Select nodes by labels that nodes there have, and tolerate their taints, or select none.", []string{ReasonNoMatchingNodes}},
	{"Let the pod comply with the Pod Security Standard restricted, with an image that does not run as root; or ask a provider's administrator for guests.podSecurity=baseline.", []string{ReasonPodSecurityViolated}},
	{"Let this cluster reach the provider's API server: see Network in charts/README.md.", []string{"Unreachable"}},
	{"Check the agent of that cluster, and that it reaches the broker.", []string{"AdvertisementTooOld", "ClusterInactive"}},
	{"Let the placement of the OverflowPolicy allow that cluster.", []string{"Excluded", "OtherZone", "OtherRegion"}},
	{"Let that cluster's agent state its zone and region (values zone and region), or change placement.spread to divide the pods over clusters.", []string{"NoDomain"}},
	{"Correct or remove targetClusterID.", []string{"PinnedElsewhere"}},
	{"Ask its administrator to lend to this cluster (lend.enabled, lend.consumers).", []string{ReasonConsumerNotAdmitted, ReasonLendingDisabled}},
}

// Fix is what to do about a rejection for a reason; "" if there is nothing.
func Fix(reason string) string {
	if i := rank(reason); i < len(remedies) {
		return remedies[i].fix
	}
	return ""
}

// Closest is the rejection of the cluster that came closest to being chosen; nil if there is none.
func Closest(rejections []broker.ClusterRejection) *broker.ClusterRejection {
	if len(rejections) == 0 {
		return nil
	}
	closest := slices.MinFunc(rejections, func(a, b broker.ClusterRejection) int { return cmp.Compare(rank(a.Reason), rank(b.Reason)) })
	return &closest
}

func rank(reason string) int {
	for i, r := range remedies {
		if slices.Contains(r.reasons, reason) {
			return i
		}
	}
	return len(remedies)
}
