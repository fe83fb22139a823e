package scenarios_test

import (
	"errors"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestNoCapacityAnywhere creates a pod that no cluster has capacity for: its events give the
// reason of each provider, and it overflows when capacity appears.
func TestNoCapacityAnywhere(t *testing.T) {
	s := begin(t, nodes{
		"rome": full,
		// What single nodes have left is not for consumers to know; what a cluster lends is.
		"paris":  {group("paris-a", 1, "cpu", "430m", "memory", "1Gi"), group("paris-b", 1, "cpu", "520m", "memory", "1Gi")},
		"berlin": {group("berlin", 1, "cpu", "1", "memory", "1Gi")},
	})
	ns := s.optedIn("large")
	empty := s.fill("berlin", "berlin-1", "630m")
	pod := s.createIn(ns, "large", "700m", nil)
	s.eventually("the pod's events name both providers with their reasons", func() error {
		messages := s.events(pod)
		for _, words := range []string{"paris: 0 of 1 pods", "Insufficient cpu on one node: requested 700m", "berlin: 0 of 1 pods", "requested 700m, available 370m"} {
			if !strings.Contains(messages, words) {
				return errors.New(messages)
			}
		}
		return nil
	})
	if messages := s.events(pod); strings.Contains(messages, "520m") {
		t.Errorf("the pod's events say what a node of paris has left: %s", messages)
	}
	expect.NoError(t, s.rome.Get(t.Context(), client.ObjectKeyFromObject(pod), pod))
	if pod.Status.Phase != corev1.PodPending {
		t.Errorf("the pod is %s", pod.Status.Phase)
	}
	empty()
	if _, away := s.allReady(ns, "large", 1); len(away) != 1 || away[0].Spec.NodeName != broker.VirtualNodeName("berlin") {
		t.Errorf("the pod does not run in berlin: %v", describe(away))
	}
}
