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
	"maps"
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

// Decision is the outcome of a request.
type Decision struct {
	// Cluster that was chosen; "" if not even one pod fits anywhere.
	Cluster string
	// Placement is what fits there; Complete whether that is all of the request.
	Placement broker.HeldCapacity
	Complete  bool
	// Decision explains the choice.
	broker.Decision
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
func Eligible(request *Request, spec *broker.ClusterAdvertisementSpec, active, fresh bool) bool {
	return filter(request, &cluster{Spec: spec, Active: active, Fresh: fresh}) == nil
}

// Choose picks the cluster with the best score among those where all of the
// request fits, or, if there is none, the one where most pods fit. Ties go to the
// better score, then to the first by cluster ID. An empty request chooses none.
func Choose(request Request, snapshot Snapshot) Decision {
	answer := choose(request, snapshot)
	return Decision{Cluster: answer.cluster, Placement: answer.placement, Complete: answer.complete, Decision: answer.report(nil)}
}

// Explain reports why each cluster is not chosen, by cluster ID.
func Explain(request Request, snapshot Snapshot) []broker.ClusterRejection {
	return choose(request, snapshot).rejections
}

// Part is what one cluster takes of a request.
type Part struct {
	Cluster  string
	Capacity broker.HeldCapacity
}

// Place adds a part to a cluster's holds. It returns the holds after that, or false
// if the part cannot be added: then the request is not split any further.
type Place func(spec *broker.ClusterAdvertisementSpec, holds []broker.Hold, amount broker.HeldCapacity) (after []broker.Hold, ok bool)

// Split chooses clusters, one after the other, until all of the request is placed or
// no cluster takes any more. A cluster that takes a part is not rejected if all of
// the request is placed.
func Split(request Request, snapshot Snapshot, place Place) (parts []Part, missing broker.HeldCapacity, decision broker.Decision) {
	committed := new(big.Rat)
	if request.Committed != nil {
		committed.Set(request.Committed)
	}
	request.Committed = committed
	for range snapshot.entries {
		answer := choose(request, snapshot)
		scores := decision.Scores
		decision = answer.report(parts)
		decision.Scores = mergeScores(scores, decision.Scores)
		spec, holds := snapshot.Cluster(answer.cluster)
		if spec == nil {
			break
		}
		after, ok := place(spec, holds, answer.placement)
		if !ok {
			break
		}
		snapshot = snapshot.With(spec, after)
		if price, _, known := Price(spec.Cost, answer.placement.Totals); known {
			committed.Add(committed, price)
		}
		parts = append(parts, Part{answer.cluster, answer.placement})
		if request.Want = capacity.Sub(request.Want, answer.placement); request.Want.Empty() {
			break
		}
	}
	return parts, request.Want, decision
}

// mergeScores adds the scores of a later choice. The first score of a cluster stays.
func mergeScores(scores, later []broker.ClusterScore) []broker.ClusterScore {
	for _, s := range later {
		if len(scores) < maxListed && !slices.ContainsFunc(scores, func(have broker.ClusterScore) bool { return have.Cluster == s.Cluster }) {
			scores = append(scores, s)
		}
	}
	return scores
}

// maxListed is how many clusters a decision lists.
const maxListed = 20

// answer is a choice with all that explains it.
type answer struct {
	cluster    string
	placement  broker.HeldCapacity
	complete   bool
	scores     []broker.ClusterScore
	rejections []broker.ClusterRejection
}

// report explains an answer for the most relevant clusters. If it is complete, the
// clusters that took other parts are not rejected.
func (a *answer) report(parts []Part) broker.Decision {
	decision := broker.Decision{Scores: a.scores[:min(len(a.scores), maxListed)]}
	counts := map[string]int32{}
	for _, r := range a.rejections {
		switch {
		case a.complete && slices.ContainsFunc(parts, func(p Part) bool { return p.Cluster == r.Cluster }):
		case len(decision.Rejections) < maxListed:
			decision.Rejections = append(decision.Rejections, r)
		default:
			counts[r.Reason]++
		}
	}
	for _, reason := range slices.Sorted(maps.Keys(counts)) {
		decision.RejectionCounts = append(decision.RejectionCounts, broker.RejectionCount{Reason: reason, Count: counts[reason]})
	}
	return decision
}

func choose(request Request, snapshot Snapshot) (decision answer) {
	if request.Want.Empty() {
		return decision
	}
	var offers []*offer
	for _, entry := range snapshot.entries {
		cluster := &cluster{Spec: entry.spec, Holds: entry.holds}
		cluster.Active, cluster.Fresh = snapshot.activity(entry.spec.ClusterID)
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
		decision.cluster, decision.placement, decision.complete = best.cluster.Spec.ClusterID, best.placed, best.complete()
		for _, o := range candidates {
			decision.scores = append(decision.scores, broker.ClusterScore{Cluster: o.cluster.Spec.ClusterID, Score: o.score.String()})
		}
		for _, o := range offers {
			if o != best {
				decision.reject(o.cluster, compare(o, best))
			}
		}
	}
	slices.SortFunc(decision.rejections, func(a, b broker.ClusterRejection) int { return cmp.Compare(a.Cluster, b.Cluster) })
	return decision
}

func (d *answer) reject(cluster *cluster, r *capacity.Rejection) {
	d.rejections = append(d.rejections, broker.ClusterRejection{Cluster: cluster.Spec.ClusterID, Reason: r.Reason, Message: r.Message})
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
