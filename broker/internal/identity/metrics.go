package identity

import (
	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
)

var (
	certificateExpiry = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "broker_certificate_expiry_timestamp_seconds",
		Help: "Expiration time of the broker's own certificates as a Unix time: ca, and serving, which is renewed in time.",
	}, []string{"certificate"})
	certificatesIssued = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "broker_certificates_issued_total",
		Help: "Number of client certificates that were issued.",
	})
)

func init() { metrics.Registry.MustRegister(certificateExpiry, certificatesIssued) }
