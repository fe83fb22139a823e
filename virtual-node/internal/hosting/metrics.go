package hosting

import (
	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
)

var (
	syncErrors = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "virtual_node_sync_errors_total",
		Help: "Looks at a pod that failed and were tried again, by provider.",
	}, []string{"provider"})
	guestsLost = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "virtual_node_guests_lost_total",
		Help: "Guests that vanished at the provider while their pod still ran at home, by provider.",
	}, []string{"provider"})
)

func init() { metrics.Registry.MustRegister(syncErrors, guestsLost) }
