package moves

import (
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"

	"github.com/spillway-dev/spillway/scheduler-plugin/returnhome"
)

var returnedHome = metrics.NewCounterVec(&metrics.CounterOpts{
	Name: "overflow_returned_home_total",
	Help: "Number of overflowed pods that were to move back, by outcome: returned, overflowed again, not_bound, not_ready, or blocked.",
}, []string{"outcome"})

func init() {
	legacyregistry.MustRegister(returnedHome)
	for _, outcome := range returnhome.Outcomes {
		returnedHome.WithLabelValues(string(outcome))
	}
}
