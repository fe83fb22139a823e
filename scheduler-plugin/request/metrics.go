package request

import (
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

// Values of the label of Writes: what is written.
const (
	WriteReservation, WriteEvent, WriteBinding, WriteEviction, WriteCondition = "reservation", "event", "binding", "eviction", "condition"
)

const resultRequested, resultCapped, resultFailed = "requested", "capped", "failed"

// Writes counts the writes of the plugin.
var Writes = metrics.NewCounterVec(&metrics.CounterOpts{
	Name: "overflow_writes_total",
	Help: "Number of writes of this plugin to the API server for pods that may overflow, by kind: reservation, event, binding, eviction or condition. Those of kube-scheduler itself, such as its own conditions of pods, its own events and bindings to nodes of this cluster, are not counted.",
}, []string{"kind"})

var (
	requestsTotal = metrics.NewCounterVec(&metrics.CounterOpts{
		Name: "overflow_requests_total",
		Help: "Number of requests for capacity in other clusters, by result: requested, capped by an OverflowPolicy, or failed.",
	}, []string{"result"})
	requestPods = metrics.NewHistogram(&metrics.HistogramOpts{
		Name:    "overflow_request_pods",
		Help:    "Number of pending pods of a request for capacity in other clusters.",
		Buckets: metrics.ExponentialBuckets(1, 4, 8),
	})
)

func init() {
	legacyregistry.MustRegister(Writes, requestsTotal, requestPods)
	// So that they are there before the first pod waits.
	for _, result := range []string{resultRequested, resultCapped, resultFailed} {
		requestsTotal.WithLabelValues(result)
	}
	for _, kind := range []string{WriteReservation, WriteEvent, WriteBinding, WriteEviction, WriteCondition} {
		Writes.WithLabelValues(kind)
	}
}
