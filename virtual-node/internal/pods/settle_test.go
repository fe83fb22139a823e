package pods

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	testclock "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"
)

// TestSettles: that a guest is pending is reported after a moment, and then at intervals;
// what a user has to know is reported at once.
func TestSettles(t *testing.T) {
	clock := testclock.NewFakeClock(time.Unix(1000, 0))
	h := &Handler{Options: Options{Clock: clock}, states: map[types.UID]*podState{}}
	web, other := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{UID: "web"}}, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{UID: "other"}}
	phase := func(phase corev1.PodPhase) corev1.PodStatus { return corev1.PodStatus{Phase: phase} }
	waits := func(reason string) corev1.PodStatus {
		return corev1.PodStatus{Phase: corev1.PodPending, ContainerStatuses: []corev1.ContainerStatus{
			{State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason}}}}}
	}
	for _, tc := range []struct {
		name   string
		pod    *corev1.Pod
		status corev1.PodStatus
		after  time.Duration
		want   time.Duration
	}{
		{"a guest that is pending", web, phase(corev1.PodPending), 0, pendingDelay},
		{"its next status", web, phase(corev1.PodPending), 400 * time.Millisecond, pendingDelay - 400*time.Millisecond},
		{"another guest", other, phase(corev1.PodPending), 0, pendingDelay},
		{"one whose containers are created", other, waits("ContainerCreating"), 0, pendingDelay},
		{"one whose image is not found", other, waits("ErrImagePull"), 0, 0},
		{"one that runs", web, phase(corev1.PodRunning), 0, 0},
		{"one that is pending for longer", web, phase(corev1.PodPending), pendingDelay, 0},
		{"its next status, why it does not start", web, phase(corev1.PodPending), time.Second, pendingDelay - time.Second},
		{"what it is after that", web, phase(corev1.PodPending), pendingDelay, 0},
		{"one that ended before it ran", other, phase(corev1.PodFailed), 0, 0},
	} {
		clock.Step(tc.after)
		got := h.settles(tc.pod, tc.status)
		if got != tc.want {
			t.Errorf("%s is reported after %s, want %s", tc.name, got, tc.want)
		}
		if got == 0 {
			h.setWritten(tc.pod, nil)
		}
	}
}

// TestReportDifferences: one Event for all pods of a controller and message, and what is
// remembered of controllers is bounded.
func TestReportDifferences(t *testing.T) {
	recorder := events.NewFakeRecorder(10 * maxDifferences)
	h := &Handler{Options: Options{Recorder: recorder}, states: map[types.UID]*podState{}, differences: map[difference]bool{}}
	created := 0
	pod := func(owner types.UID) *corev1.Pod {
		created++
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("pod-", created), UID: types.UID(fmt.Sprint("uid-", created))}}
		if owner != "" {
			p.OwnerReferences = []metav1.OwnerReference{{Kind: "ReplicaSet", UID: owner, Controller: ptr.To(true)}}
		}
		return p
	}
	bare := pod("")
	for _, tc := range []struct {
		name    string
		pod     *corev1.Pod
		message string
		events  int
	}{
		{"the first pod of a controller", pod("web"), "runs without its volume", 1},
		{"the next one", pod("web"), "runs without its volume", 0},
		{"one that differs in something else", pod("web"), "runs without its port", 1},
		{"one of another controller", pod("db"), "runs without its volume", 1},
		{"the first again", pod("web"), "runs without its volume", 0},
		{"a pod without a controller", bare, "runs without its volume", 1},
		{"the same pod", bare, "runs without its volume", 0},
		{"another one", pod(""), "runs without its volume", 1},
	} {
		h.reportDifferences(tc.pod, tc.message)
		if got := len(recorder.Events); got != tc.events {
			t.Errorf("%s: %d Events, want %d", tc.name, got, tc.events)
		}
		for len(recorder.Events) > 0 {
			<-recorder.Events
		}
	}
	for i := range 3 * maxDifferences {
		h.reportDifferences(pod(types.UID(fmt.Sprint("owner-", i))), "runs without its volume")
	}
	if n := len(h.differences); n > maxDifferences {
		t.Errorf("%d messages are remembered", n)
	}
	if got := len(recorder.Events); got != 3*maxDifferences {
		t.Errorf("%d Events for %d controllers", got, 3*maxDifferences)
	}
}
