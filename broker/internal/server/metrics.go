package server

import (
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

var (
	callsTotal = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "broker_calls_total",
		Help: "Number of REST calls that ended, by route and code: OK, or the code of the refusal.",
	}, []string{"route", "code"})
	streamEvents = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "broker_stream_events_total",
		Help: "Number of events that were sent to watch streams, by type.",
	}, []string{"type"})
	advertisements = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "broker_advertisements_total",
		Help: "Number of advertisements and beats that were received.",
	})
	clusterCertificateExpiry = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "broker_cluster_certificate_expiry_timestamp_seconds",
		Help: "Expiration time of a cluster's newest client certificate as a Unix time.",
	}, []string{"cluster"})
	reservations = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "broker_reservations",
		Help: "Number of Reservations, by phase.",
	}, []string{"phase"})
	queueLength = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "broker_queue_length",
		Help: "Number of Reservations that wait for capacity.",
	})
	leaseRenewals = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "broker_lease_renewals_total",
		Help: "Number of renewals of leases that were received from consumers.",
	})
)

func init() {
	metrics.Registry.MustRegister(callsTotal, streamEvents, advertisements, reservations, queueLength, leaseRenewals, clusterCertificateExpiry)
	// So that they are there before the first call and event.
	callsTotal.WithLabelValues("GET "+protocol.PathReadyz, codeOK)
	streamEvents.WithLabelValues(string(protocol.EventRelist))
}

// countReservation updates the gauges of Reservations with a change, 1 or -1.
func countReservation(reservation *broker.Reservation, change float64) {
	if reservation == nil {
		return
	}
	status := reservation.EffectiveStatus()
	phase := status.Phase
	if phase == "" {
		phase = broker.ReservationPending
	}
	reservations.WithLabelValues(string(phase)).Add(change)
	if meta.IsStatusConditionTrue(status.Conditions, broker.ConditionQueued) {
		queueLength.Add(change)
	}
}
