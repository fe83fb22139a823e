package pods

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	testclock "k8s.io/utils/clock/testing"
)

// TestSettles: that a guest is pending is reported after a moment, everything else at once.
func TestSettles(t *testing.T) {
	clock := testclock.NewFakeClock(time.Unix(1000, 0))
	h := &Handler{Options: Options{Clock: clock}, states: map[types.UID]*podState{}}
	web, other := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{UID: "web"}}, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{UID: "other"}}
	for _, tc := range []struct {
		name  string
		pod   *corev1.Pod
		phase corev1.PodPhase
		after time.Duration
		want  time.Duration
	}{
		{"a guest that is pending", web, corev1.PodPending, 0, pendingDelay},
		{"its next status", web, corev1.PodPending, 400 * time.Millisecond, pendingDelay - 400*time.Millisecond},
		{"another guest", other, corev1.PodPending, 0, pendingDelay},
		{"one that runs", web, corev1.PodRunning, 0, 0},
		{"one that is pending for longer", web, corev1.PodPending, time.Second, 0},
		{"its next status, why it does not start", web, corev1.PodPending, time.Millisecond, 0},
		{"one that ended before it ran", other, corev1.PodFailed, 0, 0},
	} {
		clock.Step(tc.after)
		if got := h.settles(tc.pod, corev1.PodStatus{Phase: tc.phase}); got != tc.want {
			t.Errorf("%s is reported after %s, want %s", tc.name, got, tc.want)
		}
	}
}
