package decide

import (
	"cmp"
	"slices"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// compare scores the candidates and finds the best.
func (s *search) compare() {
	s.best, s.complete = -1, false
	s.share()
	s.candidates = s.candidates[:0]
	for i := range s.offers {
		switch outcome := s.offers[i].outcome; {
		case outcome < capacity.FitsPartly, outcome == capacity.FitsPartly && s.complete:
		case outcome == capacity.FitsAll && !s.complete:
			s.complete = true
			s.candidates = append(s.candidates[:0], i)
		default:
			s.candidates = append(s.candidates, i)
		}
	}
	s.score()
	s.rank()
	for _, i := range s.candidates {
		if s.best < 0 || s.prefer(i, s.best) < 0 {
			s.best = i
		}
	}
}

// prefer orders candidates, the better one first.
func (s *search) prefer(a, b int) int {
	x, y := &s.offers[a], &s.offers[b]
	return cmp.Or(cmp.Compare(y.pods, x.pods), cmp.Compare(x.group, y.group), cmp.Compare(y.score, x.score), cmp.Compare(a, b))
}

// groups are those of the request, the most preferred first.
func (s *search) groups() []broker.ProviderGroup {
	if s.request.Placement == nil {
		return nil
	}
	return s.request.Placement.PreferredProviders
}

// rank finds the group of each candidate.
func (s *search) rank() {
	groups := s.groups()
	for _, i := range s.candidates {
		spec := s.entries[i].spec
		at := slices.IndexFunc(groups, func(g broker.ProviderGroup) bool {
			return !outside(g.Clusters, spec.ClusterID) && !outside(g.Regions, spec.Region) && !outside(g.Zones, spec.Zone)
		})
		if at < 0 {
			at = len(groups)
		}
		s.offers[i].group = at
	}
}

// weights of the rules.
func (s *search) weights() broker.ScoreWeights {
	if s.request.Weights == (broker.ScoreWeights{}) {
		return DefaultWeights
	}
	return s.request.Weights
}

// score rates the candidates against each other by each rule that counts.
func (s *search) score() {
	weights := s.weights()
	if s.ratings == nil {
		s.ratings = make([][]float64, len(rules))
	}
	for _, i := range s.candidates {
		s.offers[i].points = 0
	}
	for r, rule := range rules {
		s.ratings[r] = s.ratings[r][:0]
		weight := float64(rule.weight(&weights))
		if weight == 0 {
			continue
		}
		s.ratings[r] = rule.rate(s, s.ratings[r])
		for at, i := range s.candidates {
			s.offers[i].points += weight * s.ratings[r][at]
		}
	}
	for _, i := range s.candidates {
		s.offers[i].score = capacity.NewScore(s.offers[i].points)
	}
}
