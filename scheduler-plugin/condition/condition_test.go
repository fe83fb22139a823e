package condition

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// TestMeaning: figures do not count, names do.
func TestMeaning(t *testing.T) {
	of := func(message string) string {
		return meaning(&corev1.PodCondition{Status: corev1.ConditionFalse, Reason: "OverflowQueued", Message: message})
	}
	const message = "paris-1: Insufficient cpu: requested 300m, available 2.5. Its Reservation web-5f0c was number 12 in the queue at 17:04 UTC (3 pods)."
	if other := "paris-1: Insufficient cpu: requested 1, available 90m. Its Reservation web-5f0c was number 3 in the queue at 09:10 UTC (1 pods)."; of(message) != of(other) {
		t.Errorf("%q and %q differ", of(message), of(other))
	}
	for _, other := range []string{strings.ReplaceAll(message, "paris-1", "paris-2"), strings.ReplaceAll(message, "cpu", "memory"), strings.ReplaceAll(message, "5f0c", "5f0d")} {
		if of(message) == of(other) {
			t.Errorf("%q and %q do not differ", message, other)
		}
	}
}
