package reservation

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/decide"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
	"github.com/spillway-dev/spillway/broker/internal/plan"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestProvidersAreBounded: a Reservation has capacity at a bounded number of providers, and what
// is held can be written in the status, however long the selectors are.
func TestProvidersAreBounded(t *testing.T) {
	const clusters, most = decide.MaxProviders + 10, decide.MaxProviders
	affinity := &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{
		{Key: "zone", Operator: corev1.NodeSelectorOpNotIn},
	}}}}
	for i := range 224 {
		values := &affinity.NodeSelectorTerms[0].MatchExpressions[0].Values
		*values = append(*values, fmt.Sprintf("%03d-%s", i, strings.Repeat("z", 59)))
	}
	h := newHub(t)
	id := func(i int) string { return fmt.Sprintf("c-%03d", i) }
	for i := range clusters {
		h.advertise(id(i), "1")
	}
	expectShown := func(name string, wantPods, wantProviders int32) {
		t.Helper()
		r := h.reservations[name]
		encoded, err := json.Marshal(r)
		expect.NoError(t, err)
		if len(encoded) > 1536<<10 {
			t.Errorf("the Reservation has %d bytes, more than etcd takes", len(encoded))
		}
		shown := map[string]int32{}
		for _, a := range r.Status.Allocations {
			shown[a.Cluster] = broker.HeldCapacity{PodSets: a.PodSets}.Pods()
		}
		var pods, providers int32
		for i := range clusters {
			var held int32
			if hold := ledger.Find(&h.store.Advertisement(id(i)).Status, types.UID(name)); hold != nil {
				held, providers = hold.Promised.Pods(), providers+1
			}
			if pods += held; held != shown[id(i)] {
				t.Errorf("%s holds %d pods, the status shows %d", id(i), held, shown[id(i)])
			}
		}
		if pods != wantPods || providers != wantProviders {
			t.Errorf("%d pods of %s are held at %d providers, want %d at %d", pods, name, providers, wantPods, wantProviders)
		}
	}
	h.ask("gang", most+1, "1", func(s *broker.ReservationSpec) { s.MinAvailable = most + 1 })
	expectShown("gang", 0, 0)
	h.ask("wide", clusters, "1", func(s *broker.ReservationSpec) { s.PodSets[0].NodeAffinity = affinity })
	expectShown("wide", most, most)
	h.expectCondition("wide", broker.ConditionQueued, plan.ReasonInsufficientCapacity, "The Reservation has capacity at 50 other providers, the maximum.")

	// They hold back no other, and a provider that has a part may get more.
	h.ask("small", 1, "1")
	expectShown("small", 1, 1)
	h.change(h.reservations["wide"].Status.Allocations[0].Cluster, nodes(1, "5"))
	h.reconcile("wide")
	expectShown("wide", most+4, most)
}
