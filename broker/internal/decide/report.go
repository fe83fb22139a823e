package decide

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// What a decision tells of many clusters is bounded: it is part of a status.
const (
	// maxListed is how many clusters a decision lists.
	maxListed = 20
	// maxDetailed is of how many of their scores it says why.
	maxDetailed = 5
	// maxMessage is the size of the message of a rejection, in bytes.
	maxMessage = 512
)

// relevance of the reasons, the most relevant first: how close a cluster came to
// being chosen.
var relevance = func() map[string]int {
	order := map[string]int{}
	for i, reason := range []string{
		ReasonNotPreferred, capacity.ReasonPartialCapacity, ReasonShareLimited,
		ReasonRefused, ReasonNotAnswering, ReasonOverBudget, ReasonPriceUnknown, reasonTooManyProviders,
		capacity.ReasonInsufficientCapacity, capacity.ReasonNoMatchingNodes, capacity.ReasonPodSecurityViolated,
		ReasonUnreachable, ReasonAdvertisementTooOld, ReasonClusterInactive,
		ReasonExcluded, ReasonNoDomain, ReasonOtherZone, ReasonOtherRegion,
		capacity.ReasonConsumerNotAdmitted, capacity.ReasonLendingDisabled, ReasonPinnedElsewhere, ReasonRequesterItself,
	} {
		order[reason] = i + 1
	}
	return order
}()

// reason why an entry was not chosen.
func (s *search) reason(i int) string {
	switch o := &s.offers[i]; {
	case o.outcome == capacity.FitsAll, o.outcome == capacity.FitsPartly && !s.complete && o.pods == s.offers[s.best].pods:
		return ReasonNotPreferred
	default:
		return o.reason
	}
}

// rejection explains why an entry was not chosen.
func (s *search) rejection(i int) broker.ClusterRejection {
	o, e := &s.offers[i], s.entries[i]
	rejection := broker.ClusterRejection{Cluster: s.id(i), Reason: s.reason(i)}
	shortage := func() string {
		if o.pods < o.fits {
			return s.spread.Explain(s.spread.Of(i))
		}
		s.packer.Reset(e.room)
		_, why := s.packer.Pack(s.request.Want, &e.account)
		return why.Message
	}
	switch {
	case !o.packed:
		rejection.Message = s.filtered(e, o.reason)
	case o.outcome == capacity.FitsAll:
		rejection.Message = fmt.Sprintf("The request fits with score %s; %s was chosen with score %s.%s", o.score, s.id(s.best), s.offers[s.best].score, s.preferred(o))
	case rejection.Reason == ReasonNotPreferred:
		rejection.Message = fmt.Sprintf("As many pods fit as in %s, which was chosen with score %s against %s.%s %s", s.id(s.best), s.offers[s.best].score, o.score, s.preferred(o), shortage())
	default:
		rejection.Message = shortage()
	}
	return rejection
}

// preferred says that the best candidate is in an earlier group than another one.
func (s *search) preferred(other *offer) string {
	if best := &s.offers[s.best]; best.group < other.group {
		return fmt.Sprintf(" It is in group %d of placement.preferredProviders.", best.group+1)
	}
	return ""
}

// report explains the choice for the most relevant clusters. Those that have taken
// parts are not rejected if the choice is complete. It has no scores.
func (s *search) report(parts []Part) (decision broker.Decision) {
	took := map[string]bool{}
	for _, part := range parts {
		took[part.Cluster] = s.complete
	}
	var listed []int
	ranks, counts := make([]int, len(s.entries)), map[string]int32{}
	for i := range s.entries {
		if i == s.best || len(took) > 0 && took[s.id(i)] {
			continue
		}
		reason := s.reason(i)
		counts[reason]++
		ranks[i] = cmp.Or(relevance[reason], relevance[ReasonRefused])
		// A pinned cluster that does not lend to the consumer leaves the list as it is.
		if s.id(i) == s.request.Pin && !closed(reason) {
			ranks[i] = 0
		}
		listed = insert(listed, i, maxListed, func(a, b int) int {
			return cmp.Or(cmp.Compare(ranks[a], ranks[b]), s.prefer(a, b))
		})
	}
	slices.Sort(listed)
	for _, i := range listed {
		rejection := s.rejection(i)
		counts[rejection.Reason]--
		rejection.Message = truncate(rejection.Message)
		decision.Rejections = append(decision.Rejections, rejection)
	}
	for _, reason := range slices.Sorted(maps.Keys(counts)) {
		if count := counts[reason]; count > 0 {
			decision.RejectionCounts = append(decision.RejectionCounts, broker.RejectionCount{Reason: reason, Count: count})
		}
	}
	return decision
}

// ForConsumer is a decision as the consumer may see it: it names only the clusters that lend
// to the consumer. Those that do not are counted together, whether they lend to others or
// not; the consumer itself is left out. The result may share its content with the decision, or be it.
func ForConsumer(decision *broker.Decision) *broker.Decision {
	if decision == nil {
		return nil
	}
	seen := broker.Decision{Scores: decision.Scores}
	var unnamed int32
	named := func(reason string, count int32) bool {
		if closed(reason) {
			unnamed += count
			return false
		}
		return reason != ReasonRequesterItself
	}
	for _, rejection := range decision.Rejections {
		if named(rejection.Reason, 1) {
			seen.Rejections = append(seen.Rejections, rejection)
		}
	}
	for _, count := range decision.RejectionCounts {
		if named(count.Reason, count.Count) {
			seen.RejectionCounts = append(seen.RejectionCounts, count)
		}
	}
	if len(seen.Rejections) == len(decision.Rejections) && len(seen.RejectionCounts) == len(decision.RejectionCounts) {
		return decision
	}
	if unnamed > 0 {
		seen.RejectionCounts = append(seen.RejectionCounts, broker.RejectionCount{Reason: capacity.ReasonConsumerNotAdmitted, Count: unnamed})
		slices.SortFunc(seen.RejectionCounts, func(a, b broker.RejectionCount) int { return cmp.Compare(a.Reason, b.Reason) })
	}
	return &seen
}

// closed reports whether a cluster that is rejected for that reason does not lend to the
// consumer.
func closed(reason string) bool {
	return reason == capacity.ReasonLendingDisabled || reason == capacity.ReasonConsumerNotAdmitted
}

// addScores adds the scores of the best candidates. The first score of a cluster
// stays.
func (s *search) addScores(scores []broker.ClusterScore) []broker.ClusterScore {
	missing := maxListed - len(scores)
	if missing == 0 {
		return scores
	}
	var best []int
	for _, i := range s.candidates {
		if !slices.ContainsFunc(scores, func(have broker.ClusterScore) bool { return have.Cluster == s.id(i) }) {
			best = insert(best, i, missing, s.prefer)
		}
	}
	for _, i := range best {
		score := broker.ClusterScore{Cluster: s.id(i), Score: s.offers[i].score.String()}
		if len(scores) < maxDetailed {
			score.Detail = s.detail(i)
		}
		scores = append(scores, score)
	}
	return scores
}

// insert inserts an entry into a list of at most limit entries in order.
func insert(list []int, entry, limit int, order func(a, b int) int) []int {
	if len(list) == limit {
		if order(list[limit-1], entry) <= 0 {
			return list
		}
		list = list[:limit-1]
	}
	at, _ := slices.BinarySearchFunc(list, entry, order)
	return slices.Insert(list, at, entry)
}

// truncate shortens a message for a status.
func truncate(message string) string {
	if len(message) <= maxMessage {
		return message
	}
	const ellipsis = "…"
	return strings.ToValidUTF8(message[:maxMessage-len(ellipsis)], "") + ellipsis
}
