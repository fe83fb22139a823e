package overflow

import (
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"

	"github.com/spillway-dev/spillway/broker/undecoded"
	"github.com/spillway-dev/spillway/scheduler-plugin/returnhome"
)

// Values of the labels of the metrics.
const (
	resultRequested, resultCapped, resultFailed       = "requested", "capped", "failed"
	writesOfReservations, writesOfEvents, writesOfPod = "reservation", "event", "binding"
	writesOfEvictions                                 = "eviction"
)

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
	writesTotal = metrics.NewCounterVec(&metrics.CounterOpts{
		Name: "overflow_writes_total",
		Help: "Number of writes of this plugin to the API server for pods that may overflow, by kind: reservation, event, binding or eviction. Those of kube-scheduler itself, such as pod conditions, its own events and bindings to nodes of this cluster, are not counted.",
	}, []string{"kind"})
	returnedHome = metrics.NewCounterVec(&metrics.CounterOpts{
		Name: "overflow_returned_home_total",
		Help: "Number of overflowed pods that were to move back, by outcome: returned, overflowed again, not_bound, not_ready, or blocked.",
	}, []string{"outcome"})
)

// undecodable is the metric of the objects that the plugin cannot decode.
var undecodable = undecoded.NewGauge("overflow")

func init() {
	legacyregistry.RawMustRegister(undecodable)
	legacyregistry.MustRegister(requestsTotal, requestPods, writesTotal, returnedHome)
	// So that they are there before the first pod waits.
	for _, result := range []string{resultRequested, resultCapped, resultFailed} {
		requestsTotal.WithLabelValues(result)
	}
	for _, kind := range []string{writesOfReservations, writesOfEvents, writesOfPod, writesOfEvictions} {
		writesTotal.WithLabelValues(kind)
	}
	for _, outcome := range returnhome.Outcomes {
		returnedHome.WithLabelValues(string(outcome))
	}
}
