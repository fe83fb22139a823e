package capacity

import (
	"strconv"

	corev1 "k8s.io/api/core/v1"
)

// Score rates a cluster from 0 to 100, in hundredths.
type Score int64

// NewScore rounds points from 0 to 100. Scores are rounded before they are
// compared: what reads as equal is equal.
func NewScore(points float64) Score { return Score(points*100 + 0.5) }

// String prints the score with two decimals.
func (s Score) String() string { return strconv.FormatFloat(float64(s)/100, 'f', 2, 64) }

// AvailableShare is the mean, over the given kinds, of available as a part of
// allocatable: from 0 to 1. A kind without allocatable counts as 0, and no kind
// at all as 1.
func AvailableShare(kinds []corev1.ResourceName, available, allocatable Vector) float64 {
	if len(kinds) == 0 {
		return 1
	}
	var sum float64
	for _, name := range kinds {
		if allocatable[name] > 0 {
			sum += float64(available[name]) / float64(allocatable[name])
		}
	}
	return sum / float64(len(kinds))
}
