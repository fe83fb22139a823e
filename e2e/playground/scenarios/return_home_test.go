package scenarios_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestPodsReturnHome makes room in rome while a Deployment has overflowed: its pods move back,
// and what they used elsewhere is given back.
func TestPodsReturnHome(t *testing.T) {
	const pods = 2
	s := begin(t, nodes{
		"rome":   {group("rome", 1, "cpu", "400m", "memory", "1Gi")},
		"paris":  {group("paris", 1, "cpu", "1", "memory", "1Gi")},
		"berlin": {group("berlin", 1, "cpu", "10m", "memory", "1Gi")},
	})
	ns := s.optedIn("returning")
	policy := &broker.OverflowPolicy{ObjectMeta: metav1.ObjectMeta{Name: "returning"}, Spec: broker.OverflowPolicySpec{
		NamespaceSelector: metav1.LabelSelector{MatchLabels: map[string]string{corev1.LabelMetadataName: ns}},
		ReturnHome:        &broker.ReturnHome{After: &metav1.Duration{Duration: 5 * time.Second}, MinimumStay: &metav1.Duration{Duration: 5 * time.Second}},
	}}
	expect.NoError(t, s.rome.Create(t.Context(), policy))
	t.Cleanup(func() { expect.NoError(t, s.rome.Delete(context.Background(), policy)) })
	empty := s.fill("rome", "rome-1", "399m")
	expect.NoError(t, s.rome.Create(t.Context(), deploymentOf(ns, "returning", pods, "150m", nil)))
	_, away := s.allReady(ns, "returning", pods)
	if len(away) != pods {
		t.Fatalf("%d of %d pods overflowed", len(away), pods)
	}

	empty()
	s.eventually("all pods are back", func() error {
		now, err := s.podsOf(ns, "returning")
		if err != nil {
			return err
		}
		home := 0
		for _, pod := range now {
			if has(pod, corev1.PodReady) && !overflowed(pod) {
				home++
			}
		}
		if home != pods || len(now) != pods {
			return describe(now)
		}
		return nil
	})
	for i := range away {
		if said := s.events(&away[i]); !strings.Contains(said, "ReturningHome") {
			t.Errorf("pod %s has no event about its return:\n%s", away[i].Name, said)
		}
	}
	s.eventually("the Reservation is given back", func() error { return s.reservations(ns, 0) })
}

// reservations returns an error unless a namespace of rome has count Reservations.
func (s *playgroundTest) reservations(ns string, count int) error {
	var list broker.ReservationList
	if err := s.rome.List(s.t.Context(), &list, client.InNamespace(ns)); err != nil || len(list.Items) == count {
		return err
	}
	return fmt.Errorf("%d Reservations", len(list.Items))
}
