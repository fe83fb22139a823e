package reservation

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// readvertise stores another advertisement of a cluster, and reconciles what it concerns.
func (h *hub) readvertise(cluster string, f func(*broker.ClusterAdvertisementSpec)) {
	h.Helper()
	before := h.store.Advertisement(cluster)
	after := before.DeepCopy()
	f(&after.Spec)
	after.Generation++
	h.put(after)
	h.receive(cluster, h.clock.Now())
	h.reconcileAll(h.advertisementChanged(before, after))
}

func (h *hub) reconcileAll(names []string) {
	h.Helper()
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		h.reconcile(name)
	}
}

// A cluster whose advertisements change back and forth, as often as it may advertise, causes
// about as many writes as it may make itself.
func TestWritesForFlippingAdvertisementsAreBounded(t *testing.T) {
	// Two calls a second: what is written at once, and then for half a minute.
	const held, first, calls = 60, 30, 60
	name := func(i int) string { return fmt.Sprint("r-", i) }
	hold := func(h *hub) {
		for i := range held {
			h.ask(name(i), 1, "1")
			h.answer("paris", name(i), true)
			h.advertise("paris", "")
		}
	}
	for what, tc := range map[string]struct {
		setUp func(h *hub)
		// by changes its advertisement at each call.
		by   string
		flip func(spec *broker.ClusterAdvertisementSpec, call int)
		// concerned is the number of Reservations that a call concerns at most.
		concerned int
	}{
		"a consumer reports a provider as unreachable": {hold, "rome", func(spec *broker.ClusterAdvertisementSpec, call int) {
			spec.Unreachable = [][]string{{"paris"}, nil}[call%2]
		}, held},
		"a consumer reports one provider after the other": {hold, "rome", func(spec *broker.ClusterAdvertisementSpec, call int) {
			spec.Unreachable = [][]string{{"paris"}, {"berlin"}, {"madrid"}}[call%3]
		}, held},
		"a provider has another endpoint, node labels and pod security": {func(h *hub) {
			hold(h)
			h.change("paris", func(ad *broker.ClusterAdvertisement) {
				ad.Spec.NodeClasses[0].FreeShapes[0].Free = broker.ResourceQuantities{}
			})
			for i := range held {
				h.reservations[name(i)].Spec.TargetClusterID = "paris"
				h.grow(name(i), 1)
				h.advertise("paris", "")
			}
		}, "paris", func(spec *broker.ClusterAdvertisementSpec, call int) {
			spec.EndpointURL = fmt.Sprint("https://paris:", call)
			spec.NodeClasses[0].Labels = map[string]string{"zone": fmt.Sprint(call)}
			spec.Lending.PodSecurity = []string{broker.PodSecurityRestricted, broker.PodSecurityBaseline}[call%2]
		}, 0},
		"a provider is too small for what was made by hand": {func(h *hub) {
			for i := range held {
				h.ask(name(i), 1, "100", func(s *broker.ReservationSpec) { s.TargetClusterID = "tiny" })
				h.rememberImpossible(name(i), true)
			}
		}, "tiny", func(spec *broker.ClusterAdvertisementSpec, call int) {
			spec.Resources.Allocatable = cpus([]string{"1000", "1"}[call%2])
		}, maxRetried},
	} {
		t.Run(what, func(t *testing.T) {
			h := newHub(t)
			for id, cpu := range map[string]string{"rome": "0", "paris": "1000", "tiny": "1"} {
				h.advertise(id, cpu)
			}
			tc.setUp(h)
			h.advertise("berlin", "1000")
			h.advertise("madrid", "1000")
			h.hear(time.Minute)
			before := 0
			for call := range first + calls {
				if call == first {
					before = h.writes
				}
				h.clusters.Follow(tc.by)
				h.reconcileAll(h.clusters.Reports.Take())
				h.readvertise(tc.by, func(spec *broker.ClusterAdvertisementSpec) { tc.flip(spec, call) })
				h.clock.Step(500 * time.Millisecond)
			}
			writes := h.writes - before
			// Each Reservation that is concerned is placed again, and released where it was.
			if most := 3 * (20*calls/2 + tc.concerned); tc.concerned > 0 && writes > most || tc.concerned == 0 && writes > calls {
				t.Errorf("%d writes in half a minute", writes)
			}
			// What it reported last counts in the end.
			h.hear(time.Minute)
			h.clusters.Follow(tc.by)
			counts, said := h.clusters.Reports.Unreachable(tc.by), h.store.Advertisement(tc.by).Spec.Unreachable
			if !slices.Equal(slices.Sorted(maps.Keys(counts)), said) {
				t.Errorf("%v counts instead of %v", counts, said)
			}
			t.Logf("%d writes at once, and %d for half a minute", before, writes)
		})
	}
}
