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

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// TestSettles: that a guest is pending is reported after a moment, later if it waits for its
// place, and then at intervals; what a user has to know is reported at once.
func TestSettles(t *testing.T) {
	clock := testclock.NewFakeClock(time.Unix(1000, 0))
	h := &Handler{Options: Options{Clock: clock}, states: map[types.UID]*podState{}}
	web, other := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{UID: "web"}}, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{UID: "other"}}
	phase := func(phase corev1.PodPhase) corev1.PodStatus { return corev1.PodStatus{Phase: phase} }
	waits := func(reason string) corev1.PodStatus {
		return corev1.PodStatus{Phase: corev1.PodPending, ContainerStatuses: []corev1.ContainerStatus{
			{State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason}}}}}
	}
	waiting := &corev1.Pod{Spec: corev1.PodSpec{SchedulingGates: []corev1.PodSchedulingGate{{Name: broker.GateHandOver}}}}
	mustLeave := waiting.DeepCopy()
	mustLeave.Status.Conditions = []corev1.PodCondition{{Type: broker.PodMustLeave, Status: corev1.ConditionTrue}}
	gated, refused := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{UID: "gated"}}, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{UID: "refused"}}
	for _, tc := range []struct {
		name   string
		pod    *corev1.Pod
		guest  *corev1.Pod // nil: one without a gate
		status corev1.PodStatus
		after  time.Duration
		want   time.Duration
	}{
		{"a guest that is pending", web, nil, phase(corev1.PodPending), 0, pendingDelay},
		{"its next status", web, nil, phase(corev1.PodPending), 400 * time.Millisecond, pendingDelay - 400*time.Millisecond},
		{"another guest", other, nil, phase(corev1.PodPending), 0, pendingDelay},
		{"one whose containers are created", other, nil, waits("ContainerCreating"), 0, pendingDelay},
		{"one whose image is not found", other, nil, waits("ErrImagePull"), 0, 0},
		{"one that runs", web, nil, phase(corev1.PodRunning), 0, 0},
		{"one that is pending for longer", web, nil, phase(corev1.PodPending), pendingDelay, 0},
		{"its next status, why it does not start", web, nil, phase(corev1.PodPending), time.Second, pendingDelay - time.Second},
		{"what it is after that", web, nil, phase(corev1.PodPending), pendingDelay, 0},
		{"one that ended before it ran", other, nil, phase(corev1.PodFailed), 0, 0},
		{"one that waits for its place", gated, waiting, phase(corev1.PodPending), 0, gatedDelay},
		{"later", gated, waiting, phase(corev1.PodPending), 2 * pendingDelay, gatedDelay - 2*pendingDelay},
		{"it has its place", gated, nil, phase(corev1.PodPending), 0, pendingDelay},
		{"and does not start", gated, nil, phase(corev1.PodPending), pendingDelay, 0},
		{"another that waits for its place", refused, waiting, phase(corev1.PodPending), 0, gatedDelay},
		{"it still waits", refused, waiting, phase(corev1.PodPending), gatedDelay, 0},
		{"and is not wanted", refused, mustLeave, phase(corev1.PodPending), time.Second, pendingDelay},
		{"any longer", refused, mustLeave, phase(corev1.PodPending), pendingDelay, 0},
	} {
		clock.Step(tc.after)
		guest := tc.guest
		if guest == nil {
			guest = &corev1.Pod{}
		}
		got := h.settles(tc.pod, guest, tc.status)
		if got != tc.want {
			t.Errorf("%s is reported after %s, want %s", tc.name, got, tc.want)
		}
		if got == 0 {
			h.setWritten(tc.pod, nil)
		}
	}
}

// TestPace: a provider that reports another status each moment makes this cluster write few.
func TestPace(t *testing.T) {
	clock := testclock.NewFakeClock(time.Unix(1000, 0))
	h := &Handler{Options: Options{Clock: clock}, states: map[types.UID]*podState{}}
	writes := 0
	for range 1000 {
		if h.pace("web") == 0 {
			writes++
		}
		clock.Step(10 * time.Millisecond)
	}
	if want := writeBurst + int(10*time.Second/writeInterval); writes < writeBurst || writes > want {
		t.Errorf("%d of 1000 statuses were written in 10 s, want %d to %d", writes, writeBurst, want)
	}
	if wait := h.pace("other"); wait != 0 {
		t.Errorf("another pod waits for %s", wait)
	}
	// What was not written is, after the time that is returned.
	for wait := h.pace("web"); wait > 0; wait = h.pace("web") {
		if wait > writeInterval {
			t.Fatalf("the next write waits for %s", wait)
		}
		clock.Step(wait)
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
