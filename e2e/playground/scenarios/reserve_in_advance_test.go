package scenarios_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// advanceScenario is the state that the steps of TestReserveInAdvance share.
type advanceScenario struct {
	*playgroundTest
	ns             string
	local, fromHub *broker.Reservation
	onLocal, onHub *corev1.Pod
}

// TestReserveInAdvance reserves capacity in rome and, for rome, in the hub. Ordinary pods use
// both without any further Reservation; one expires, the other is deleted while it is used,
// and nothing is left.
func TestReserveInAdvance(t *testing.T) {
	s := &advanceScenario{playgroundTest: begin(t, nodes{
		"rome":   full,
		"paris":  {group("paris", 1, "cpu", "2", "memory", "4Gi")},
		"berlin": {group("berlin", 1, "cpu", "2", "memory", "4Gi")},
	})}
	s.ns = s.optedIn("advance")
	before := s.census()
	s.becomeActive()
	s.podsUseThem()
	s.remove(s.onLocal)
	s.deletedInUse()
	s.wait("the Reservation of rome has expired", s.rome, s.local, func() bool { return s.local.Status.Phase == broker.ReservationReleased })
	expect.NoError(t, s.rome.Delete(t.Context(), s.local))
	s.eventually("no virtual node is left", func() error {
		return s.gone(s.rome, &corev1.Node{}, "", broker.VirtualNodeName("paris"))
	})
	s.eventually("the census equals the first", func() error { return s.differs(before, func(string) bool { return false }) })
}

// wait waits until a Reservation of a cluster is as wanted.
func (s *advanceScenario) wait(what string, c client.Client, reservation *broker.Reservation, check func() bool) {
	s.t.Helper()
	s.eventually(what, func() error {
		if err := c.Get(s.t.Context(), client.ObjectKeyFromObject(reservation), reservation); err != nil || check() {
			return err
		}
		return fmt.Errorf("%s %q %+v %+v", reservation.Status.Phase, reservation.Status.Summary, reservation.Status.Used, reservation.Status.Conditions)
	})
}

func (s *advanceScenario) becomeActive() {
	s.t.Helper()
	ctx := s.t.Context()
	total := broker.FromList(expect.Resources("cpu", "350m", "memory", "64Mi"))
	s.local = &broker.Reservation{
		ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: "warm"},
		Spec:       broker.ReservationSpec{RequestedResources: &total, Duration: &metav1.Duration{Duration: time.Minute}},
	}
	s.fromHub = &broker.Reservation{
		ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: "for-rome"},
		Spec:       broker.ReservationSpec{RequesterID: "rome", TargetClusterID: "paris", Namespaces: []string{s.ns}, RequestedResources: total.DeepCopy()},
	}
	expect.NoError(s.t, errors.Join(s.rome.Create(ctx, s.local), s.hub.Create(ctx, s.fromHub)))
	s.t.Cleanup(func() { _ = s.hub.Delete(context.Background(), s.fromHub) }) // gone unless a step failed
	s.wait("the Reservation of rome is Active", s.rome, s.local, func() bool {
		return s.local.Status.Phase == broker.ReservationActive && meta.IsStatusConditionTrue(s.local.Status.Conditions, broker.ConditionReady) &&
			meta.IsStatusConditionTrue(s.local.Status.Conditions, broker.ConditionVirtualNodeReady)
	})
	s.wait("the Reservation of the hub is Active", s.hub, s.fromHub, func() bool {
		return s.fromHub.Status.Phase == broker.ReservationActive && meta.IsStatusConditionTrue(s.fromHub.Status.Conditions, broker.ConditionReady) &&
			s.fromHub.Status.TargetClusterEndpoint != ""
	})
	if got := s.fromHub.Status.Allocations[0].Cluster; got != "paris" {
		s.t.Errorf("the one of the hub is in %s, pinned to paris", got)
	}
}

// run creates an ordinary pod and waits until it is Ready.
func (s *advanceScenario) run(name string) *corev1.Pod {
	s.t.Helper()
	pod := s.createIn(s.ns, name, "300m", func(spec *corev1.PodSpec) {
		spec.Containers[0].Resources.Requests[corev1.ResourceMemory] = expect.Resources("memory", "32Mi")["memory"]
	})
	_, away := s.allReady(s.ns, name, 1)
	if len(away) != 1 || away[0].UID != pod.UID {
		s.t.Fatalf("pod %s does not run on a virtual node", name)
	}
	return &away[0]
}

func (s *advanceScenario) podsUseThem() {
	s.t.Helper()
	// A Reservation of the pod's own namespace comes before one of the hub.
	s.onLocal, s.onHub = s.run("on-local"), s.run("on-hub")
	if got, want := s.onLocal.Spec.NodeName, broker.VirtualNodeName(s.local.Status.Allocations[0].Cluster); got != want {
		s.t.Errorf("the first pod is on %s, want %s", got, want)
	}
	if got, want := s.onLocal.Labels[broker.LabelHold], s.local.Status.ID; got != want {
		s.t.Errorf("the first pod is charged to %q, want %q", got, want)
	}
	if s.onHub.Spec.NodeName != broker.VirtualNodeName("paris") || s.onHub.Labels[broker.LabelHold] != s.fromHub.Name {
		s.t.Errorf("the second pod is on %s, charged to %q", s.onHub.Spec.NodeName, s.onHub.Labels[broker.LabelHold])
	}
	var here, there broker.ReservationList
	expect.NoError(s.t, errors.Join(s.rome.List(s.t.Context(), &here), s.hub.List(s.t.Context(), &there)))
	if len(here.Items) != 1 || len(there.Items) != 2 {
		s.t.Errorf("%d Reservations in rome and %d in the hub, want 1 and 2", len(here.Items), len(there.Items))
	}
	s.wait("rome says what is used", s.rome, s.local, func() bool {
		return s.local.Status.Used != nil && slices.Equal(s.local.Status.Used.Pods, []string{s.ns + "/on-local"})
	})
	s.wait("the hub says what is used", s.hub, s.fromHub, func() bool { return s.fromHub.Status.Used != nil && s.fromHub.Status.Used.Count == 1 })
	if line, err := s.line("rome", "reservations", s.ns, s.local.Name); err != nil || !strings.Contains(line, "1 pod, cpu 300m of 350m, memory 32Mi of 64Mi") {
		s.t.Errorf("kubectl get reservations: %q (%v)", line, err)
	}
}

func (s *advanceScenario) remove(pod *corev1.Pod) {
	s.t.Helper()
	expect.NoError(s.t, s.rome.Delete(s.t.Context(), pod))
	s.eventually("pod "+pod.Name+" is gone", func() error { return s.gone(s.rome, pod.DeepCopy(), pod.Namespace, pod.Name) })
}

// deletedInUse deletes the Reservation of the hub: its pod runs on, and gives the capacity back
// at its end.
func (s *advanceScenario) deletedInUse() {
	s.t.Helper()
	expect.NoError(s.t, s.hub.Delete(s.t.Context(), s.fromHub))
	s.wait("the hub counts the pod that remains", s.hub, s.fromHub, func() bool {
		c := meta.FindStatusCondition(s.fromHub.Status.Conditions, broker.ConditionProviderReleased)
		return c != nil && c.Status == metav1.ConditionFalse && strings.Contains(c.Message, "still run there: 1")
	})
	if err := s.rome.Get(s.t.Context(), client.ObjectKeyFromObject(s.onHub), s.onHub); err != nil || !has(*s.onHub, corev1.PodReady) {
		s.t.Errorf("the pod that uses it does not run on: %v %v", s.onHub.Status.Conditions, err)
	}
	s.remove(s.onHub)
	s.eventually("the Reservation of the hub is gone", func() error { return s.gone(s.hub, s.fromHub.DeepCopy(), s.fromHub.Namespace, s.fromHub.Name) })
}
