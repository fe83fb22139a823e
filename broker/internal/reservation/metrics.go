package reservation

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

var (
	reservationsTotal = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "broker_reservations_total",
		Help: "Number of Reservations that entered a phase, by phase and requester.",
	}, []string{"phase", "requester"})
	decisionLatency = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name:    "broker_decision_latency_seconds",
		Help:    "Time in seconds from reading the advertisements to the committed placement.",
		Buckets: prometheus.ExponentialBuckets(0.001, 2, 14),
	})
	reservationDuration = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name:    "broker_reservation_duration_seconds",
		Help:    "Time in seconds from the creation of a Reservation to its phase Active.",
		Buckets: prometheus.ExponentialBuckets(0.01, 2, 16),
	})
	clusterScore = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "broker_cluster_score",
		Help: "Score of a cluster in the last placement that compared it, from 0 to 100.",
	}, []string{"cluster"})
)

func init() {
	metrics.Registry.MustRegister(reservationsTotal, decisionLatency, reservationDuration, clusterScore)
}

// observePhase counts a Reservation that entered its phase.
func (r *Reconciler) observePhase(reservation *broker.Reservation) {
	phase := reservation.Status.Phase
	reservationsTotal.WithLabelValues(string(phase), reservation.Spec.RequesterID).Inc()
	if phase == broker.ReservationActive {
		reservationDuration.Observe(r.clock.Since(reservation.CreationTimestamp.Time).Seconds())
	}
}

// forgetSeries deletes the metrics of a cluster without an advertisement. The release of its
// Reservations may still be counted after that, so it is called after each of them, too.
func (r *Reconciler) forgetSeries(cluster string) {
	if r.store.Advertisement(cluster) == nil {
		clusterScore.DeleteLabelValues(cluster)
		reservationsTotal.DeletePartialMatch(prometheus.Labels{"requester": cluster})
	}
}

// observeScores shows the scores of a placement. A cluster may have gone since.
func (r *Reconciler) observeScores(decision *broker.Decision) {
	if decision == nil {
		return
	}
	for _, s := range decision.Scores {
		// The score is always a number as decide formats it.
		score, _ := strconv.ParseFloat(s.Score, 64)
		clusterScore.WithLabelValues(s.Cluster).Set(score)
		r.forgetSeries(s.Cluster)
	}
}
