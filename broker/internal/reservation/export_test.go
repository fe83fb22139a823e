package reservation

import (
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/spillway-dev/spillway/e2e/expect"
)

// Knows reports whether the broker knows this version of a Reservation. The API server may
// show a write before its answer has come back to the broker.
func (r *Reconciler) Knows(name, version string) bool {
	known := r.store.Reservation(name)
	return known != nil && known.ResourceVersion == version
}

// Kept is the share of its promises that a provider has kept of late.
func (r *Reconciler) Kept(cluster string) float64 {
	return r.answers.Records(r.clock.Now())[cluster].Share()
}

// Series returns the names of the metrics with a label of that value.
func Series(t testing.TB, value string) (names []string) {
	t.Helper()
	families, err := metrics.Registry.Gather()
	expect.NoError(t, err)
	for _, family := range families {
		for _, metric := range family.GetMetric() {
			for _, label := range metric.GetLabel() {
				if label.GetValue() == value {
					names = append(names, family.GetName())
				}
			}
		}
	}
	return names
}
