package placeholder

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// State is for how many pods of a hold the scheduler has found a place.
type State struct {
	// Missing are the pod sets (or the parts of a total, those of one size as a set) without a
	// place: only Count and Requests of what is missing differ from the hold's.
	Missing []Missing
	// Pods is the number of placeholders.
	Pods int32
}

// Missing is a shape of which not all pods have a place.
type Missing struct {
	// Set is the shape; its Count is the number without a place, of Wanted.
	Set    broker.PodSet
	Wanted int32
	// Messages are what the scheduler says, and Tried the number of pods that it has
	// tried to place.
	Messages []string
	Tried    int32
}

// add counts the placeholders of a shape.
func (s *State) add(of shape, pods []*corev1.Pod) {
	s.Pods += of.set.Count
	m := Missing{Set: of.set, Wanted: of.set.Count}
	for _, pod := range pods {
		if pod.Spec.NodeName != "" {
			m.Set.Count--
		} else if message := unschedulable(pod); message != "" {
			m.Tried++
			if !slices.Contains(m.Messages, message) {
				m.Messages = append(m.Messages, message)
			}
		}
	}
	if m.Set.Count > 0 {
		slices.Sort(m.Messages)
		s.Missing = append(s.Missing, m)
	}
}

// Refuse counts a placeholder that the API server did not admit as tried.
func (s State) Refuse(pod *corev1.Pod, message string) {
	for i := range s.Missing {
		if m := &s.Missing[i]; keyOf(m.Set) == pod.Labels[broker.LabelShape] {
			m.Tried++
			if !slices.Contains(m.Messages, message) {
				m.Messages = append(m.Messages, message)
			}
		}
	}
}

// Verdict is what a State proves.
type Verdict int

// Proven: each placeholder has a place. Refused: not all have one, and the scheduler will
// not find it in time. Waiting: the scheduler may still find one.
const (
	Waiting Verdict = iota
	Proven
	Refused
)

// Deadlines of a proof. The scheduler tries again when a pod has gone, so its first
// answer counts only after Settle; after Timeout the places that are missing count as
// refused.
type Deadlines struct{ Settle, Timeout time.Duration }

// Wait is how a hold waits for the scheduler.
type Wait struct {
	since time.Time
	// fewest is the smallest number of places that were missing since as many as wanted are
	// wanted; -1 if it has not begun.
	fewest, wanted int32
}

// NewWait returns a Wait that has not begun.
func NewWait() Wait { return Wait{fewest: -1} }

// Observe returns how long the hold has waited without progress. There is progress while fewer
// places are missing than ever before; and one that is not in turn, because earlier ones
// wait, has not waited yet unless the scheduler has tried all its pods. The wait ends if no
// place is missing, and begins again if more are wanted.
func (w *Wait) Observe(s State, inTurn bool, now time.Time) time.Duration {
	missing := s.missing()
	if missing == 0 {
		*w = NewWait()
		return 0
	}
	if w.fewest < 0 || missing < w.fewest || s.Pods > w.wanted {
		w.fewest, w.since = missing, now
	}
	w.wanted = s.Pods
	if !inTurn && !s.tried() {
		w.since = now
	}
	return now.Sub(w.since)
}

func (s State) missing() (n int32) {
	for _, m := range s.Missing {
		n += m.Set.Count
	}
	return n
}

// Judge returns the verdict after the scheduler has made no progress for a time.
func (s State) Judge(elapsed time.Duration, d Deadlines) Verdict {
	switch {
	case len(s.Missing) == 0:
		return Proven
	case elapsed >= d.Timeout:
		return Refused
	case elapsed >= d.Settle && s.tried():
		return Refused
	}
	return Waiting
}

// tried reports whether the scheduler has tried all pods without a place.
func (s State) tried() bool {
	return !slices.ContainsFunc(s.Missing, func(m Missing) bool { return m.Tried < m.Set.Count })
}

// String says which shapes have found how many places, and why no more.
func (s State) String() string {
	if len(s.Missing) == 0 {
		return fmt.Sprintf("The scheduler has found a place for all of %d placeholders.", s.Pods)
	}
	var sentences []string
	for _, m := range s.Missing {
		why := "the scheduler has not answered for the others; check that it runs"
		if len(m.Messages) > 0 {
			// One of them suffices to act on; they differ in the numbers of nodes only.
			why = strings.TrimSuffix(m.Messages[0], ".")
		}
		sentences = append(sentences, fmt.Sprintf("The scheduler found a place for %d of %d pods of %s: %s.", m.Wanted-m.Set.Count, m.Wanted, m.Set.Requests, why))
	}
	return strings.Join(sentences, " ")
}

// Without returns what remains of a held capacity without the places that are missing.
func (s State) Without(held broker.HeldCapacity) broker.HeldCapacity {
	out := *held.DeepCopy()
	left := out.Totals.List()
	for _, m := range s.Missing {
		capacity.Subtract(left, broker.Times(m.Set.Requests.List(), m.Set.Count))
		lost := m.Set.Count
		for i := range out.PodSets {
			if set := &out.PodSets[i]; lost > 0 && keyOf(*set) == keyOf(m.Set) {
				n := min(set.Count, lost)
				set.Count -= n
				lost -= n
			}
		}
	}
	out.Totals = broker.FromList(left)
	return out
}
