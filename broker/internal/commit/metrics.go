package commit

import (
	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
)

var (
	// LockConflicts count those of Reservations, too.
	LockConflicts = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "broker_resource_lock_conflicts_total",
		Help: "Number of writes to the ledger or to a Reservation that failed because of a concurrent write.",
	})
	commitBatchSize = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name:    "broker_ledger_commit_batch_size",
		Help:    "Number of changes to one provider's ledger that were written together.",
		Buckets: prometheus.ExponentialBuckets(1, 2, 9),
	})
	commitLatency = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name:    "broker_ledger_commit_latency_seconds",
		Help:    "Time in seconds to write a provider's ledger, including retries.",
		Buckets: prometheus.ExponentialBuckets(0.001, 2, 14),
	})
)

func init() { metrics.Registry.MustRegister(LockConflicts, commitBatchSize, commitLatency) }
