// Package decide chooses the provider for a request. Choose is a pure function of
// the request and of a snapshot of what the clusters advertise and the ledger
// holds: the same input gives the same answer, in whatever order the clusters
// are listed.
//
// A cluster passes a chain of filters (filters.go). Its free capacity is packed,
// first with what holds may still claim there and then with the request (fit.go).
// The clusters where the pods fit are scored (score.go). Every cluster that is not
// chosen gets a reason, and a message with the figures.
package decide

import (
	"cmp"
	"math/big"
	"slices"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/answers"
)

// Request is the capacity to place, and the limits on its provider.
type Request struct {
	// Requester is the consumer.
	Requester string
	// Want is the capacity that no provider holds yet: pod sets with their
	// remaining counts, or a divisible total.
	Want broker.HeldCapacity
	// Pin is the only provider that may be chosen; any where empty.
	Pin string
	// Placement and Budget limit the providers; nil for no limit.
	Placement *broker.Placement
	Budget    *broker.Budget
	// Committed is what the Reservation already costs per hour, in the budget's
	// currency; nil for nothing.
	Committed *big.Rat
	// Weights of the score. The zero value stands for the defaults.
	Weights broker.ScoreWeights
	// Rejected are the providers that must not be chosen now, and why: they refused such
	// a request, or do not answer.
	Rejected map[string]capacity.Rejection
}

// DefaultWeights of the score, in percent.
var DefaultWeights = broker.ScoreWeights{Resources: 70, Cost: 30}

// Cluster is what is known of one cluster.
type Cluster struct {
	Spec  broker.ClusterAdvertisementSpec
	Holds []broker.Hold
	// Active is whether it advertises; Fresh whether its last advertisement is
	// recent enough for a new placement.
	Active, Fresh bool
}

// Snapshot is what is known of all clusters.
type Snapshot struct {
	Clusters []Cluster
}

// Decision is the outcome of a request.
type Decision struct {
	// Cluster that was chosen; "" if not even one pod fits anywhere.
	Cluster string
	// Placement is what fits there; Complete whether that is all of the request.
	Placement broker.HeldCapacity
	Complete  bool
	// Scores of the clusters that were compared, best first.
	Scores []broker.ClusterScore
	// Rejections of all clusters but the chosen one, by cluster ID.
	Rejections []broker.ClusterRejection
}

// Reasons of rejections, besides those of package capacity.
const (
	ReasonRequesterItself    = "RequesterItself"
	ReasonClusterInactive    = "ClusterInactive"
	ReasonAdvertisementStale = "AdvertisementStale"
	ReasonPinnedElsewhere    = "PinnedElsewhere"
	ReasonExcluded           = "Excluded"
	ReasonOtherRegion        = "OtherRegion"
	ReasonOtherZone          = "OtherZone"
	ReasonRefused            = answers.ReasonRefused
	ReasonNotAnswering       = answers.ReasonNotAnswering
	ReasonPriceUnknown       = "PriceUnknown"
	ReasonOverBudget         = "OverBudget"
	ReasonNotPreferred       = "NotPreferred"
)

// Eligible reports whether a cluster may be chosen for a request if it has the capacity.
func Eligible(request *Request, cluster *Cluster) bool { return filter(request, cluster) == nil }

// Choose picks the cluster with the best score among those where all of the
// request fits, or, if there is none, the one where most pods fit. Ties go to the
// better score, then to the first by cluster ID. An empty request chooses none.
func Choose(request Request, snapshot Snapshot) Decision {
	if request.Want.Empty() {
		return Decision{}
	}
	clusters := slices.SortedFunc(slices.Values(snapshot.Clusters), func(a, b Cluster) int { return cmp.Compare(a.Spec.ClusterID, b.Spec.ClusterID) })
	var decision Decision
	var offers []*offer
	for i := range clusters {
		cluster := &clusters[i]
		if rejection := filter(&request, cluster); rejection != nil {
			decision.reject(cluster, rejection)
		} else if offer := fit(&request, cluster); offer.placed.Empty() {
			decision.reject(cluster, offer.rejection)
		} else {
			offers = append(offers, offer)
		}
	}

	candidates := slices.DeleteFunc(slices.Clone(offers), func(o *offer) bool { return !o.complete() })
	if len(candidates) == 0 {
		candidates = offers
	}
	score(&request, candidates)
	slices.SortStableFunc(candidates, func(a, b *offer) int {
		return cmp.Or(
			cmp.Compare(b.placed.Pods(), a.placed.Pods()),
			cmp.Compare(b.score, a.score),
			cmp.Compare(a.cluster.Spec.ClusterID, b.cluster.Spec.ClusterID),
		)
	})
	if len(candidates) > 0 {
		best := candidates[0]
		decision.Cluster, decision.Placement, decision.Complete = best.cluster.Spec.ClusterID, best.placed, best.complete()
		for _, o := range candidates {
			decision.Scores = append(decision.Scores, broker.ClusterScore{Cluster: o.cluster.Spec.ClusterID, Score: o.score.String()})
		}
		for _, o := range offers {
			if o != best {
				decision.reject(o.cluster, compare(o, best))
			}
		}
	}
	slices.SortFunc(decision.Rejections, func(a, b broker.ClusterRejection) int { return cmp.Compare(a.Cluster, b.Cluster) })
	return decision
}

func (d *Decision) reject(cluster *Cluster, r *capacity.Rejection) {
	d.Rejections = append(d.Rejections, broker.ClusterRejection{Cluster: cluster.Spec.ClusterID, Reason: r.Reason, Message: r.Message})
}

// compare explains why best was chosen and not o.
func compare(o, best *offer) *capacity.Rejection {
	switch chosen := best.cluster.Spec.ClusterID; {
	case o.complete():
		return reject(ReasonNotPreferred, "The request fits with score %s; %s was chosen with score %s.", o.score, chosen, best.score)
	case o.placed.Pods() == best.placed.Pods() && !best.complete():
		return reject(ReasonNotPreferred, "As many pods fit as in %s, which was chosen with score %s against %s. %s", chosen, best.score, o.score, o.rejection.Message)
	}
	return o.rejection
}
