package pods

import (
	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
)

var (
	syncErrors = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "virtual_node_sync_errors_total",
		Help: "Failed reconciliations of pods with their guests, by provider. Each is retried.",
	}, []string{"provider"})
	guestsLost = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "virtual_node_guests_lost_total",
		Help: "Guests that disappeared at the provider while their pod was running, by provider.",
	}, []string{"provider"})
)

func init() { metrics.Registry.MustRegister(syncErrors, guestsLost) }
