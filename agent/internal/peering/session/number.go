package session

import (
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// maxNumber bounds session numbers, so that a peer cannot make Next overflow.
const maxNumber = 1 << 60

// FirstNumber is the number of a session that begins now. Numbers grow with this
// cluster's clock; after the clock was set back, the provider replies with its
// current number and Next continues from there.
func FirstNumber(now time.Time) int64 { return now.UnixMilli() }

// Next is the number that follows this cluster's and the provider's.
func Next(number, providers int64) int64 { return max(number, providers) + 1 }

// Number reads a session number from an annotation, 0 if there is none.
func Number(object metav1.Object, annotation string) int64 {
	number, err := strconv.ParseInt(object.GetAnnotations()[annotation], 10, 64)
	if err != nil {
		return 0
	}
	return number
}

// FormatNumber is the annotation value that Number reads.
func FormatNumber(number int64) string { return strconv.FormatInt(number, 10) }
