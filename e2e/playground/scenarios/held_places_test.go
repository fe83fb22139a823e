package scenarios_test

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestHeldPlacesAreKept has pods of paris want the places that paris has promised to pods of
// rome, 20 a second: none gets one.
func TestHeldPlacesAreKept(t *testing.T) {
	const pods = 5
	s := begin(t, nodes{
		"rome":   full,
		"paris":  {group("paris", 1, "cpu", "1050m", "memory", "4Gi")},
		"berlin": {group("berlin", 1, "cpu", "10m", "memory", "4Gi")},
	})
	ns := s.optedIn("held")
	s.namespaceIn(s.paris, "local", nil)
	expect.NoError(t, s.rome.Create(t.Context(), deploymentOf(ns, "held", pods, "200m", nil)))
	s.eventually("the scheduler of paris has placed the placeholders, or guests have taken their places", func() error {
		var list corev1.PodList
		if err := s.paris.List(t.Context(), &list); err != nil {
			return err
		}
		bound := 0
		for _, p := range list.Items {
			if (p.Namespace == "spillway-holds" || p.Labels[broker.LabelHold] != "") && p.Spec.NodeName != "" && p.DeletionTimestamp == nil {
				bound++
			}
		}
		if bound != pods {
			return fmt.Errorf("%d of %d are bound", bound, pods)
		}
		return nil
	})
	stop := s.compete(s.paris, []string{"200m", "100m"}, nil)
	_, away := s.allReady(ns, "held", pods)
	if wanted := stop(); len(away) != pods || wanted == 0 {
		t.Errorf("%d of %d pods run away from home, beside %d competitors: %v", len(away), pods, wanted, describe(away))
	}
}
