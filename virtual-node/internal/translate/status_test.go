package translate

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

var (
	early = metav1.NewTime(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC))
	late  = metav1.NewTime(early.Add(time.Minute))
)

func condition(kind corev1.PodConditionType, status corev1.ConditionStatus) corev1.PodCondition {
	return corev1.PodCondition{Type: kind, Status: status, LastTransitionTime: early}
}

// overflowed is a pod bound to the virtual node of paris.
func overflowed(conditions ...corev1.PodCondition) *corev1.Pod {
	return &corev1.Pod{
		Spec: corev1.PodSpec{
			NodeName:       "spillway-paris",
			InitContainers: []corev1.Container{{Name: "prepare"}},
			Containers:     []corev1.Container{{Name: "main"}},
		},
		Status: corev1.PodStatus{
			Phase: corev1.PodPending, QOSClass: corev1.PodQOSBurstable, Reason: "GuestRefused", Message: "full",
			Conditions: append([]corev1.PodCondition{condition(corev1.PodScheduled, corev1.ConditionTrue)}, conditions...),
		},
	}
}

func find(conditions []corev1.PodCondition, kind corev1.PodConditionType) *corev1.PodCondition {
	for i := range conditions {
		if conditions[i].Type == kind {
			return &conditions[i]
		}
	}
	return nil
}

func TestStatusOfRunningGuest(t *testing.T) {
	guest := &corev1.Pod{Status: corev1.PodStatus{
		Phase: corev1.PodRunning, QOSClass: corev1.PodQOSBestEffort, StartTime: &early,
		HostIP: "10.0.0.1", HostIPs: []corev1.HostIP{{IP: "10.0.0.1"}},
		PodIP: "10.1.0.1", PodIPs: []corev1.PodIP{{IP: "10.1.0.1"}},
		NominatedNodeName: "paris-worker",
		Conditions: []corev1.PodCondition{
			condition(corev1.PodReadyToStartContainers, corev1.ConditionTrue), condition(corev1.PodInitialized, corev1.ConditionTrue),
			condition(corev1.PodReady, corev1.ConditionTrue), condition(corev1.ContainersReady, corev1.ConditionTrue),
			{Type: corev1.PodScheduled, Status: corev1.ConditionTrue, LastTransitionTime: late, ObservedGeneration: 7},
			condition("example.com/provider", corev1.ConditionTrue),
		},
		InitContainerStatuses: []corev1.ContainerStatus{{Name: "prepare", State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 0}}}},
		ContainerStatuses:     []corev1.ContainerStatus{{Name: "main", Ready: true, RestartCount: 2}, {Name: "injected"}},
	}}
	guest.Status.Conditions[2].ObservedGeneration = 7
	pod := overflowed(condition("example.com/consumer", corev1.ConditionTrue))
	want := corev1.PodStatus{
		Phase: corev1.PodRunning, QOSClass: corev1.PodQOSBurstable, StartTime: &early,
		PodIP: "10.1.0.1", PodIPs: []corev1.PodIP{{IP: "10.1.0.1"}},
		Conditions: []corev1.PodCondition{
			condition(corev1.PodScheduled, corev1.ConditionTrue), condition("example.com/consumer", corev1.ConditionTrue),
			condition(corev1.PodReadyToStartContainers, corev1.ConditionTrue), condition(corev1.PodInitialized, corev1.ConditionTrue),
			condition(corev1.PodReady, corev1.ConditionTrue), condition(corev1.ContainersReady, corev1.ConditionTrue),
		},
		InitContainerStatuses: []corev1.ContainerStatus{{Name: "prepare", State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 0}}}},
		ContainerStatuses:     []corev1.ContainerStatus{{Name: "main", Ready: true, RestartCount: 2}},
	}
	podBefore, guestBefore := pod.DeepCopy(), guest.DeepCopy()
	if diff := cmp.Diff(want, Status(pod, guest, everywhere...)); diff != "" {
		t.Errorf("status (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(podBefore, pod) + cmp.Diff(guestBefore, guest); diff != "" {
		t.Errorf("an argument was changed:\n%s", diff)
	}
	pod.Status = want
	if diff := cmp.Diff(want, Status(pod, guest, everywhere...)); diff != "" {
		t.Errorf("the second result differs (-want +got):\n%s", diff)
	}
}

func TestStatusFollowsGuest(t *testing.T) {
	terminated := func(code int32) []corev1.ContainerStatus {
		return []corev1.ContainerStatus{{Name: "main", State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: code}}}}
	}
	for name, c := range map[string]struct {
		reason        string
		guest         corev1.PodStatus
		phase         corev1.PodPhase
		statusReason  string
		statusMessage string
		code          int32
	}{
		"created": {
			reason: "a guest without status is Pending, and the earlier reason and message are cleared",
			guest:  corev1.PodStatus{}, phase: corev1.PodPending,
		},
		"succeeded": {
			reason: "a Job reads the phase and the exit code",
			guest:  corev1.PodStatus{Phase: corev1.PodSucceeded, ContainerStatuses: terminated(0)}, phase: corev1.PodSucceeded,
		},
		"failed": {
			reason: "a Job's failure policy reads the exit code",
			guest:  corev1.PodStatus{Phase: corev1.PodFailed, ContainerStatuses: terminated(42)}, phase: corev1.PodFailed, code: 42,
		},
		"evicted": {
			reason: "reason and message are copied",
			guest:  corev1.PodStatus{Phase: corev1.PodFailed, Reason: "Evicted", Message: "low on memory"}, phase: corev1.PodFailed, statusReason: "Evicted", statusMessage: "low on memory",
		},
		"unschedulable": {
			reason: "the message says what the guest waits for",
			guest: corev1.PodStatus{Phase: corev1.PodPending, Conditions: []corev1.PodCondition{
				{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, Message: "0/1 nodes are available"}}},
			phase: corev1.PodPending, statusMessage: "waiting for a node in paris: 0/1 nodes are available",
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := Status(overflowed(), &corev1.Pod{Status: c.guest})
			if got.Phase != c.phase || got.Reason != c.statusReason || got.Message != c.statusMessage {
				t.Errorf("%s: got %s, %q, %q", c.reason, got.Phase, got.Reason, got.Message)
			}
			if s := find(got.Conditions, corev1.PodScheduled); s == nil || s.Status != corev1.ConditionTrue {
				t.Errorf("the bound pod must stay scheduled; got %v", s)
			}
			if got.StartTime != nil {
				t.Errorf("the guest has not started; got start time %v", got.StartTime)
			}
			if len(c.guest.ContainerStatuses) > 0 && (len(got.ContainerStatuses) != 1 || got.ContainerStatuses[0].State.Terminated.ExitCode != c.code) {
				t.Errorf("%s: got %v", c.reason, got.ContainerStatuses)
			}
		})
	}
}

func TestMirroredConditionsAreRemoved(t *testing.T) {
	pod := overflowed(condition(corev1.PodReady, corev1.ConditionTrue), condition(corev1.DisruptionTarget, corev1.ConditionTrue))
	got := Status(pod, &corev1.Pod{})
	if c := find(got.Conditions, corev1.PodReady); c != nil {
		t.Errorf("the guest has no condition Ready, the pod has %v", c)
	}
	if find(got.Conditions, corev1.DisruptionTarget) == nil {
		t.Error("the DisruptionTarget condition of the consumer was removed")
	}
}

func TestReadinessGatesAreEvaluatedInTheConsumer(t *testing.T) {
	const gate = "example.com/in-load-balancer"
	ready := &corev1.Pod{Status: corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{condition(corev1.PodReady, corev1.ConditionTrue)}}}
	with := func(conditions ...corev1.PodCondition) *corev1.Pod {
		pod := overflowed(conditions...)
		pod.Spec.ReadinessGates = []corev1.PodReadinessGate{{ConditionType: gate}}
		return pod
	}
	guest, _, _ := Pod(with(), "guests", Options{})
	if len(guest.Spec.ReadinessGates) > 0 {
		t.Errorf("no controller at the provider sets the condition; the guest has %v", guest.Spec.ReadinessGates)
	}
	passed := condition(gate, corev1.ConditionTrue)
	passed.LastTransitionTime = late
	for name, c := range map[string]struct {
		pod  *corev1.Pod
		want corev1.ConditionStatus
		at   metav1.Time
	}{
		"never set": {with(), corev1.ConditionFalse, early},
		"false":     {with(condition(gate, corev1.ConditionFalse)), corev1.ConditionFalse, early},
		"true":      {with(passed), corev1.ConditionTrue, late},
	} {
		t.Run(name, func(t *testing.T) {
			got := find(Status(c.pod, ready).Conditions, corev1.PodReady)
			if got == nil || got.Status != c.want || !got.LastTransitionTime.Equal(&c.at) {
				t.Fatalf("want Ready %s at %s, got %v", c.want, c.at, got)
			}
			if c.want == corev1.ConditionFalse && !strings.Contains(got.Message, gate) {
				t.Errorf("the message %q does not name the gate", got.Message)
			}
		})
	}
}

// everywhere are networks that have every address.
var everywhere = []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}

// A provider that reports addresses of the consumer, or of others, would have the Services of the
// consumer send traffic there. Only those in the networks of the provider's pods count.
func TestAddressesOfOthers(t *testing.T) {
	networks := []netip.Prefix{netip.MustParsePrefix("10.2.0.0/16"), netip.MustParsePrefix("fd00:1::/64")}
	for name, c := range map[string]struct {
		reported, want []string
		unconnected    bool
	}{
		"another pod":                       {reported: []string{"10.1.2.3"}},
		"a node":                            {reported: []string{"192.0.2.1"}},
		"an IPv6 address of others":         {reported: []string{"fd00::1"}},
		"the provider's":                    {reported: []string{"10.2.2.3", "fd00:1::1"}, want: []string{"10.2.2.3", "fd00:1::1"}},
		"the consumer's and the provider's": {reported: []string{"10.1.2.3", "10.2.2.2", "fd00::1", "fd00:1::1"}, want: []string{"10.2.2.2", "fd00:1::1"}},
		"no network is connected":           {reported: []string{"10.2.2.3"}, unconnected: true},
	} {
		t.Run(name, func(t *testing.T) {
			networks := networks
			var guest corev1.Pod
			for _, ip := range c.reported {
				guest.Status.PodIPs = append(guest.Status.PodIPs, corev1.PodIP{IP: ip})
				guest.Status.HostIPs = append(guest.Status.HostIPs, corev1.HostIP{IP: ip}) // never taken over
			}
			guest.Status.PodIP, guest.Status.HostIP = c.reported[0], c.reported[0]
			if c.unconnected {
				networks = nil
			}
			status := Status(shopPod(), &guest, networks...)
			var pods []string
			for _, p := range status.PodIPs {
				pods = append(pods, p.IP)
			}
			if !slices.Equal(pods, c.want) || len(status.HostIPs) > 0 {
				t.Errorf("pod IPs %v, want %v; host IPs %v", pods, c.want, status.HostIPs)
			}
			if first := append(c.want, "")[0]; status.PodIP != first || status.HostIP != "" {
				t.Errorf("pod IP %q, want %q; host IP %q", status.PodIP, first, status.HostIP)
			}
		})
	}
}

// What means another host on each node is no address of a guest, whatever networks count.
func TestAddressesPerHost(t *testing.T) {
	for _, ip := range []string{"168.63.129.16", "100.100.100.200", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254", "64:ff9b::10.1.2.3", "64:ff9b:1::a01:203", "127.0.0.1", "169.254.169.254"} {
		if status := Status(shopPod(), &corev1.Pod{Status: corev1.PodStatus{PodIP: ip}}, everywhere...); status.PodIP != "" {
			t.Errorf("the pod has address %s", status.PodIP)
		}
	}
}

// What a hostile provider reports is bounded, and cannot lead traffic astray.
func TestHostileStatus(t *testing.T) {
	long := strings.Repeat("x", 1<<20)
	guest := &corev1.Pod{Status: corev1.PodStatus{
		Phase: corev1.PodRunning, Message: long, PodIP: "127.0.0.1",
		PodIPs: []corev1.PodIP{{IP: "127.0.0.1"}, {IP: "169.254.169.254"}, {IP: "0.0.0.0"}, {IP: "nonsense"}, {IP: "224.0.0.1"}, {IP: "fe80::1%eth0"}, {IP: "::ffff:10.0.0.1"}, {IP: "10.1.2.3"}, {IP: "10.1.2.4"}, {IP: "fd00::1"}},
		HostIP: "::1",
	}}
	for range 1000 {
		guest.Status.Conditions = append(guest.Status.Conditions, corev1.PodCondition{Type: corev1.PodReady, Status: corev1.ConditionTrue, Message: long})
		guest.Status.ContainerStatuses = append(guest.Status.ContainerStatuses, corev1.ContainerStatus{Name: "main", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Message: long}}})
	}
	status := Status(shopPod(), guest, everywhere...)
	if diff := cmp.Diff([]corev1.PodIP{{IP: "10.1.2.3"}, {IP: "fd00::1"}}, status.PodIPs); diff != "" || status.PodIP != "10.1.2.3" {
		t.Errorf("pod IP %q, pod IPs (-want +got):\n%s", status.PodIP, diff)
	}
	if status.HostIP != "" || len(status.HostIPs) > 0 {
		t.Errorf("host IPs %q, %v", status.HostIP, status.HostIPs)
	}
	if len(status.Conditions) != 1 || len(status.ContainerStatuses) != 1 {
		t.Fatalf("%d conditions and %d container statuses, want 1 of each", len(status.Conditions), len(status.ContainerStatuses))
	}
	for what, text := range map[string]string{"message": status.Message, "condition": status.Conditions[0].Message, "container": status.ContainerStatuses[0].State.Waiting.Message} {
		if len(text) != 4096 {
			t.Errorf("the %s has %d characters, want 4096", what, len(text))
		}
	}
}

// TestMustLeave: the mark of a guest that must leave is that of the pod, and goes with it.
func TestMustLeave(t *testing.T) {
	guest := &corev1.Pod{Status: corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{condition(broker.PodMustLeave, corev1.ConditionTrue)}}}
	pod := overflowed()
	pod.Status = Status(pod, guest)
	if c := find(pod.Status.Conditions, broker.PodMustLeave); c == nil || c.Status != corev1.ConditionTrue {
		t.Errorf("the pod is not marked: %+v", pod.Status.Conditions)
	}
	guest.Status.Conditions = nil
	if pod.Status = Status(pod, guest); find(pod.Status.Conditions, broker.PodMustLeave) != nil {
		t.Errorf("the pod is still marked: %+v", pod.Status.Conditions)
	}
}
