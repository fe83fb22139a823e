package scenarios_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestOnlyScheduler replaces rome's kube-scheduler by Spillway's scheduler, with
// scheduler.mode=only: it schedules every pod, those of opted-in namespaces overflow, and a
// pod that tolerates every taint without being a DaemonSet's does not get room that is
// reserved for others on a virtual node. That kubelet stops kube-scheduler is shown on the lab.
func TestOnlyScheduler(t *testing.T) {
	s := begin(t, nodes{
		"rome":  {group("rome", 1, "cpu", "100m", "memory", "1Gi")},
		"paris": {group("paris", 1, "cpu", "2", "memory", "4Gi")},
	})
	ns := s.replaceKubeScheduler("only")
	s.namespaceIn(s.rome, "ordinary", nil)
	start := func(name, cpu string, change func(*corev1.PodSpec)) *corev1.Pod {
		t.Helper()
		pod := s.createIn("ordinary", name, cpu, change)
		if pod.Spec.SchedulerName != corev1.DefaultSchedulerName {
			t.Errorf("pod %s names scheduler %s", name, pod.Spec.SchedulerName)
		}
		return pod
	}
	start("plain", "90m", nil)
	if home, _ := s.allReady("ordinary", "plain", 1); len(home) != 1 || home[0].Spec.NodeName != "rome-1" {
		t.Fatalf("the pod of a namespace that is not opted in does not run at home: %v", describe(home))
	}

	// The virtual node has room beside the guests.
	total := broker.FromList(expect.Resources("cpu", "200m", "memory", "32Mi"))
	expect.NoError(t, s.rome.Create(t.Context(), &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "spare"}, Spec: broker.ReservationSpec{
		TargetClusterID: "paris", RequestedResources: &total, PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "none"}},
	}}))
	expect.NoError(t, s.rome.Create(t.Context(), deploymentOf(ns, "web", 2, "300m", nil)))
	_, away := s.allReady(ns, "web", 2)
	if len(away) != 2 {
		t.Fatalf("%d of 2 pods overflowed", len(away))
	}
	for _, p := range away {
		if p.Spec.SchedulerName != corev1.DefaultSchedulerName {
			t.Errorf("pod %s names scheduler %s", p.Name, p.Spec.SchedulerName)
		}
	}
	s.eventually("the virtual node has room that is reserved for other pods", func() error {
		node := &corev1.Node{}
		err := s.rome.Get(t.Context(), client.ObjectKey{Name: broker.VirtualNodeName("paris")}, node)
		if err == nil && node.Status.Allocatable.Cpu().Cmp(resource.MustParse("800m")) < 0 {
			err = fmt.Errorf("allocatable %v", node.Status.Allocatable)
		}
		return err
	})

	// It fits no node at home, and prefers the one with the most room.
	greedy := start("tolerates-everything", "50m", func(spec *corev1.PodSpec) {
		spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
	})
	s.eventually("the pod that tolerates every taint is unschedulable", func() error {
		if err := s.rome.Get(t.Context(), client.ObjectKeyFromObject(greedy), greedy); err != nil {
			return err
		}
		if !slices.ContainsFunc(greedy.Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && c.Reason == corev1.PodReasonUnschedulable &&
				strings.Contains(c.Message, "no reservation for this pod (provider paris), whose namespace has not opted in")
		}) {
			return fmt.Errorf("bound to %q: %v", greedy.Spec.NodeName, greedy.Status.Conditions)
		}
		return nil
	})
	if on := greedy.Spec.NodeName; on != "" {
		t.Errorf("the pod that tolerates every taint is bound to %s", on)
	}
	var reservations broker.ReservationList
	if err := s.rome.List(t.Context(), &reservations, client.InNamespace("ordinary")); err != nil || len(reservations.Items) > 0 {
		t.Errorf("%d Reservations were made for pods that did not opt in (%v)", len(reservations.Items), err)
	}
	_, still := s.allReady(ns, "web", 2)
	if !slices.Equal(uids(still), uids(away)) {
		t.Errorf("the guests have changed: %v, they were %v", describe(still), describe(away))
	}
}

// replaceKubeScheduler lets Spillway's scheduler take the place of kube-scheduler in rome until
// the test ends, in the order that charts/README.md gives, and returns an opted-in namespace.
func (s *playgroundTest) replaceKubeScheduler(namespace string) string {
	s.t.Helper()
	s.upgrade("rome", nil, "scheduler.mode=only")
	s.optedIn(namespace)
	s.p.Process("rome", "kube-scheduler").Stop(10 * time.Second)
	// As documented, it runs again before the mode changes back.
	s.t.Cleanup(func() { expect.NoError(s.t, s.p.StartScheduler(context.Background(), "rome")) })
	return namespace
}
