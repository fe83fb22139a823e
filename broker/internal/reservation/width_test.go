package reservation

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// What is held can be written in the status, at however many providers it could be placed
// and however long the selectors are.
func TestStatusHasRoomForAllThatIsHeld(t *testing.T) {
	const clusters = 250
	affinity := &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{
		{Key: "zone", Operator: corev1.NodeSelectorOpNotIn},
	}}}}
	for i := range 112 {
		values := &affinity.NodeSelectorTerms[0].MatchExpressions[0].Values
		*values = append(*values, fmt.Sprintf("%03d-%s", i, strings.Repeat("z", 59)))
	}
	h := newHub(t)
	id := func(i int) string { return fmt.Sprintf("c-%03d", i) }
	for i := range clusters {
		h.advertise(id(i), "1")
	}
	expectShown := func(name string) (pods, providers int32) {
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
		for i := range clusters {
			var held int32
			if hold := ledger.Find(&h.store.advertisement(id(i)).Status, types.UID(name)); hold != nil {
				held, providers = hold.Promised.Pods(), providers+1
			}
			if pods += held; held != shown[id(i)] {
				t.Errorf("%s holds %d pods, the status shows %d", id(i), held, shown[id(i)])
			}
		}
		return pods, providers
	}
	long := func(s *broker.ReservationSpec) { s.PodSets[0].NodeAffinity = affinity }

	h.ask("wide", clusters, "1", long)
	pods, providers := expectShown("wide")
	if pods < clusters/4 || pods >= clusters {
		t.Errorf("%d pods are held, want a part of %d", pods, clusters)
	}
	h.expectCondition("wide", broker.ConditionQueued, reasonTooManyProviders, fmt.Sprintf("%d pods are waiting. The status has room for %d providers.", clusters-pods, providers))

	// It holds back no other, and a provider that has a part may get more.
	h.ask("small", 1, "1")
	if got, _ := expectShown("small"); got != 1 {
		t.Errorf("%d pods of the small Reservation are held, want 1", got)
	}
	h.change(h.reservations["wide"].Status.Allocations[0].Cluster, nodes(1, "11"))
	h.reconcile("wide")
	if more, same := expectShown("wide"); more != pods+10 || same != providers {
		t.Errorf("%d pods at %d providers are held, want %d at %d", more, same, pods+10, providers)
	}

	// Nor when nothing is free at all.
	h.ask("rest", int32(clusters)-providers-1, "1")
	h.reconcile("wide")
	h.expectCondition("wide", broker.ConditionQueued, reasonTooManyProviders, fmt.Sprintf("%d pods are waiting. The status has room for %d providers.", clusters-pods-10, providers))
	h.change(h.reservations["rest"].Status.Allocations[0].Cluster, nodes(1, "1500m"))
	h.ask("half", 1, "500m")
	if got, _ := expectShown("half"); got != 1 {
		t.Errorf("%d pods of the half Reservation are held, want 1", got)
	}

	// Pods of which a provider's part is short wait for capacity, not for room in the status.
	h = newHub(t)
	for i := range clusters {
		h.advertise(id(i), "1")
	}
	h.ask("mixed", providers, "1", long, func(s *broker.ReservationSpec) {
		s.PodSets = append(s.PodSets, broker.PodSet{Name: "large", Count: 1, Requests: cpus("4")})
	})
	if pods, _ := expectShown("mixed"); pods != providers {
		t.Errorf("%d pods are held, want %d", pods, providers)
	}
	h.expectCondition("mixed", broker.ConditionQueued, reasonInsufficientCapacity, "")

	// The pods of an ordinary Reservation may be at as many providers.
	h = newHub(t)
	for i := range clusters {
		h.advertise(id(i), "1")
	}
	h.ask("ordinary", clusters, "1")
	if pods, _ := expectShown("ordinary"); pods != clusters {
		t.Errorf("%d pods are held, want %d", pods, clusters)
	}
}
