package scenarios_test

import (
	"context"
	"fmt"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestGang creates a gang of which only a part fits: nothing of it is bound or held, while
// another pod overflows beside it. Once all of it fits, all of it runs, and nothing is left
// of it in the end.
func TestGang(t *testing.T) {
	const pods = 4
	s := begin(t, nodes{
		"rome":   full,
		"paris":  {group("paris", 2, "cpu", "490m", "memory", "1Gi")}, // three pods each
		"berlin": {group("berlin", 1, "cpu", "10m", "memory", "1Gi")},
	})
	ns := s.optedIn("gang")
	s.installPodGroups()
	empty := s.fill("paris", "paris-2", "480m")
	create := func(o client.Object) { t.Helper(); expect.NoError(t, s.rome.Create(t.Context(), o)) }
	create(&unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "scheduling.x-k8s.io/v1alpha1", "kind": "PodGroup",
		"metadata": map[string]any{"namespace": ns, "name": "ring"},
		"spec":     map[string]any{"minMember": int64(pods)},
	}})
	members := deploymentOf(ns, "ring", pods, "150m", nil)
	members.Spec.Template.Labels["scheduling.x-k8s.io/pod-group"] = "ring"
	create(members)
	s.eventually("the capacity of the gang is requested as a whole, and is not there", func() error {
		var list broker.ReservationList
		if err := s.rome.List(t.Context(), &list, client.InNamespace(ns)); err != nil || len(list.Items) != 1 {
			return fmt.Errorf("%d Reservations (%v)", len(list.Items), err)
		}
		if r := list.Items[0]; r.Spec.MinAvailable != pods || r.Status.Phase != broker.ReservationPending || len(r.Status.Allocations) > 0 {
			return fmt.Errorf("%s: minAvailable %v, %s, allocations %v", r.Name, r.Spec.MinAvailable, r.Status.Phase, r.Status.Allocations)
		}
		return nil
	})
	// A request for less passes it: the gang would fit nowhere.
	create(deploymentOf(ns, "alone", 1, "150m", nil))
	if _, away := s.allReady(ns, "alone", 1); len(away) != 1 {
		t.Fatal("the pod beside the gang has not overflowed")
	}
	waiting, err := s.podsOf(ns, "ring")
	if err != nil || len(waiting) != pods {
		t.Fatalf("the gang has %d pods (%v)", len(waiting), err)
	}
	for _, pod := range waiting {
		if pod.Spec.NodeName != "" {
			t.Errorf("pod %s is bound to %s without the others", pod.Name, pod.Spec.NodeName)
		}
	}

	empty()
	if _, away := s.allReady(ns, "ring", pods); len(away) != pods {
		t.Errorf("%d of %d pods of the gang have overflowed", len(away), pods)
	}
	expect.NoError(t, s.rome.Delete(t.Context(), members, client.PropagationPolicy(metav1.DeletePropagationForeground)))
	s.eventually("the Reservation of the other pod is the only one", func() error { return s.reservations(ns, 1) })
}

// installPodGroups installs the CRD of the coscheduling plugins in rome, without their
// controller, until the test ends.
func (s *playgroundTest) installPodGroups() {
	s.t.Helper()
	crd := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
		"metadata": map[string]any{"name": "podgroups.scheduling.x-k8s.io", "annotations": map[string]any{
			"api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/scheduler-plugins/pull/50"}},
		"spec": map[string]any{
			"group": "scheduling.x-k8s.io", "scope": "Namespaced",
			"names": map[string]any{"kind": "PodGroup", "listKind": "PodGroupList", "plural": "podgroups", "singular": "podgroup"},
			"versions": []any{map[string]any{"name": "v1alpha1", "served": true, "storage": true, "schema": map[string]any{
				"openAPIV3Schema": map[string]any{"type": "object", "x-kubernetes-preserve-unknown-fields": true},
			}}},
		},
	}}
	expect.NoError(s.t, s.rome.Create(s.t.Context(), crd))
	s.t.Cleanup(func() { expect.NoError(s.t, s.rome.Delete(context.Background(), crd)) })
	s.eventually("rome serves PodGroups", func() error {
		_, err := s.p.Cluster("rome").Set.Discovery().ServerResourcesForGroupVersion("scheduling.x-k8s.io/v1alpha1")
		return err
	})
}
