package reservation

import (
	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
)

var (
	reservationsTotal = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "broker_reservations_total",
		Help: "Reservations that entered a phase, by phase and requester.",
	}, []string{"phase", "requester"})
	decisionLatency = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name:    "broker_decision_latency_seconds",
		Help:    "Time from gathering what is known to the committed placement.",
		Buckets: prometheus.ExponentialBuckets(0.001, 2, 14),
	})
	reservationDuration = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name:    "broker_reservation_duration_seconds",
		Help:    "Time from a reservation's creation until it could first be used.",
		Buckets: prometheus.ExponentialBuckets(0.01, 2, 16),
	})
	lockConflicts = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "broker_resource_lock_conflicts_total",
		Help: "Writes to the ledger or to a reservation that lost their compare-and-swap.",
	})
	clusterScore = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "broker_cluster_score",
		Help: "A cluster's score when it was last compared, from 0 to 100.",
	}, []string{"cluster"})
)

func init() {
	metrics.Registry.MustRegister(reservationsTotal, decisionLatency, reservationDuration, lockConflicts, clusterScore)
}
