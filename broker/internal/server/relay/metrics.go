package relay

import (
	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
)

var (
	messageCount = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "broker_relay_messages",
		Help: "Number of relayed messages in the mailboxes.",
	})
	messageBytes = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "broker_relay_bytes",
		Help: "Size of the relayed messages in the mailboxes in bytes.",
	})
	expired = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "broker_relay_expired_total",
		Help: "Number of relayed messages that expired before the receiver took them.",
	})
	refused = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "broker_relay_refused_total",
		Help: "Number of relayed messages that were refused because a mailbox was full.",
	})
)

func init() { metrics.Registry.MustRegister(messageCount, messageBytes, expired, refused) }
