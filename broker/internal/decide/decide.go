// Package decide chooses the provider for an ask. Choose is a pure function of
// the ask and of a snapshot of what the clusters advertise and the ledger
// holds: the same input gives the same answer, in whatever order the clusters
// come.
//
// A cluster passes a chain of filters (filters.go), then its free places are
// packed, shape by shape, first with what outstanding holds may still claim
// there and then with the ask (room.go); those that take the pods are scored
// (score.go). Every cluster that is not chosen gets a reason with the figures
// that led to it.
package decide

import (
	"cmp"
	"fmt"
	"math/big"
	"slices"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Request is what is looked for.
type Request struct {
	// Requester is the consumer.
	Requester string
	// Want is what is still missing: pod sets with their remaining counts, or a
	// divisible total.
	Want broker.HeldCapacity
	// Pin is the only provider to take, if not empty.
	Pin string
	// Placement and Budget limit the providers; nil for no limit.
	Placement *broker.Placement
	Budget    *broker.Budget
	// Committed is what the reservation costs an hour already, in the budget's
	// currency; nil for nothing.
	Committed *big.Rat
	// Weights of the score. The zero value stands for the defaults.
	Weights broker.ScoreWeights
	// Refused are the providers that turned the reservation down.
	Refused []broker.Refusal
}

// DefaultWeights of the score, in percent.
var DefaultWeights = broker.ScoreWeights{Resources: 70, Cost: 30}

// Cluster is what is known of one cluster.
type Cluster struct {
	Spec  broker.ClusterAdvertisementSpec
	Holds []broker.Hold
	// Active is whether it has advertised lately; Fresh whether lately enough
	// for a new placement.
	Active, Fresh bool
}

// Snapshot is what is known of all of them.
type Snapshot struct {
	Clusters []Cluster
}

// Decision is the answer.
type Decision struct {
	// Cluster that was chosen, "" if none takes even one pod.
	Cluster string
	// Placement is what it takes; Complete whether that is all of the ask.
	Placement broker.HeldCapacity
	Complete  bool
	// Scores of the clusters that were compared, best first.
	Scores []broker.ClusterScore
	// Rejections of all clusters but the chosen one, by cluster ID.
	Rejections []broker.ClusterRejection
}

// Reasons of rejections.
const (
	ReasonRequesterItself     = "RequesterItself"
	ReasonLendingDisabled     = "LendingDisabled"
	ReasonConsumerNotAdmitted = "ConsumerNotAdmitted"
	ReasonInactive            = "Inactive"
	ReasonStale               = "Stale"
	ReasonPinnedElsewhere     = "PinnedElsewhere"
	ReasonExcluded            = "Excluded"
	ReasonOtherRegion         = "OtherRegion"
	ReasonOtherZone           = "OtherZone"
	ReasonRefused             = "Refused"
	ReasonPriceUnknown        = "PriceUnknown"
	ReasonOverBudget          = "OverBudget"
	ReasonNoMatchingNodes     = "NoMatchingNodes"
	ReasonNoRoom              = "NoRoom"
	ReasonNotEnoughRoom       = "NotEnoughRoom"
	ReasonNotPreferred        = "NotPreferred"
)

// Choose picks the cluster that takes everything with the best score, or, if
// none takes everything, the one that takes most pods. Ties go to the better
// score, then to the first by cluster ID.
func Choose(ask Request, snapshot Snapshot) Decision {
	clusters := slices.Clone(snapshot.Clusters)
	slices.SortFunc(clusters, func(a, b Cluster) int { return cmp.Compare(a.Spec.ClusterID, b.Spec.ClusterID) })

	var decision Decision
	reject := func(cluster *Cluster, reason, message string) {
		decision.Rejections = append(decision.Rejections, broker.ClusterRejection{
			Cluster: cluster.Spec.ClusterID, Reason: reason, Message: message,
		})
	}
	var offers []*offer
	for i := range clusters {
		cluster := &clusters[i]
		if reason, message := filter(&ask, cluster); reason != "" {
			reject(cluster, reason, message)
			continue
		}
		offer := fit(&ask, cluster)
		if offer.placed.Empty() {
			reject(cluster, offer.reason, offer.message)
			continue
		}
		offers = append(offers, offer)
	}

	candidates := slices.DeleteFunc(slices.Clone(offers), func(o *offer) bool { return !o.complete })
	if len(candidates) == 0 {
		candidates = offers
	}
	score(&ask, candidates)
	slices.SortStableFunc(candidates, func(a, b *offer) int {
		return cmp.Or(
			cmp.Compare(b.placed.Pods(), a.placed.Pods()),
			cmp.Compare(b.score, a.score),
			cmp.Compare(a.cluster.Spec.ClusterID, b.cluster.Spec.ClusterID),
		)
	})
	if len(candidates) > 0 {
		best := candidates[0]
		decision.Cluster, decision.Placement, decision.Complete = best.cluster.Spec.ClusterID, best.placed, best.complete
		for _, o := range candidates {
			decision.Scores = append(decision.Scores, broker.ClusterScore{Cluster: o.cluster.Spec.ClusterID, Score: hundredths(o.score)})
		}
		for _, o := range offers {
			switch {
			case o == best:
			case o.complete:
				reject(o.cluster, ReasonNotPreferred, fmt.Sprintf("It takes all of it, with score %s; %s has %s.",
					hundredths(o.score), decision.Cluster, hundredths(best.score)))
			case o.placed.Pods() == best.placed.Pods() && !best.complete:
				reject(o.cluster, ReasonNotPreferred, fmt.Sprintf("It takes as many pods as %s, with score %s against %s; %s",
					decision.Cluster, hundredths(o.score), hundredths(best.score), o.message))
			default:
				reject(o.cluster, ReasonNotEnoughRoom, o.message)
			}
		}
	}
	slices.SortFunc(decision.Rejections, func(a, b broker.ClusterRejection) int { return cmp.Compare(a.Cluster, b.Cluster) })
	return decision
}
