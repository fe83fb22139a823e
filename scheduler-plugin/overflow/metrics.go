package overflow

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"

	"github.com/spillway-dev/spillway/broker/undecoded"
	"github.com/spillway-dev/spillway/scheduler-plugin/returnhome"
)

// Values of the labels of the metrics.
const (
	resultRequested, resultCapped, resultFailed       = "requested", "capped", "failed"
	outcomeHome, outcomeOverflowed, outcomeDeleted    = "home", "overflowed", "deleted"
	openedForRoom, openedForGrant, openedForDecision  = "room", "grant", "decision"
	openedForRetry, openedForSpec                     = "retry", "spec"
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
	unschedulableDuration = metrics.NewHistogramVec(&metrics.HistogramOpts{
		Name:    "overflow_unschedulable_duration_seconds",
		Help:    "Time from when a pod did not fit, or was held because another one of its owner and shape did not, to its end, by outcome: bound at home, overflowed, or deleted.",
		Buckets: metrics.ExponentialBuckets(0.25, 2, 14),
	}, []string{"outcome"})
	podAttempts = metrics.NewHistogram(&metrics.HistogramOpts{
		Name:    "overflow_pod_attempts",
		Help:    "Number of attempts to schedule a pod that overflowed.",
		Buckets: []float64{1, 2, 3, 4, 6, 8, 12, 16, 32},
	})
	writesTotal = metrics.NewCounterVec(&metrics.CounterOpts{
		Name: "overflow_writes_total",
		Help: "Number of writes of this plugin to the API server for pods that may overflow, by kind: reservation, event, binding or eviction. Those of kube-scheduler itself, such as pod conditions, its own events and bindings to nodes of this cluster, are not counted.",
	}, []string{"kind"})
	gateOpenings = metrics.NewCounterVec(&metrics.CounterOpts{
		Name: "overflow_gate_openings_total",
		Help: "Number of waiting pods that were tried again, by reason: room at home, grant, decision, retry or changed spec.",
	}, []string{"reason"})
	returnedHome = metrics.NewCounterVec(&metrics.CounterOpts{
		Name: "overflow_returned_home_total",
		Help: "Number of overflowed pods that were to move back, by outcome: returned, overflowed again, not_bound, not_ready, or blocked.",
	}, []string{"outcome"})
)

// undecodable is the metric of the objects that the plugin cannot decode.
var undecodable = undecoded.NewGauge("overflow")

func init() {
	legacyregistry.RawMustRegister(undecodable)
	legacyregistry.MustRegister(requestsTotal, requestPods, unschedulableDuration, podAttempts, writesTotal, gateOpenings, returnedHome)
	// So that they are there before the first pod waits.
	for _, result := range []string{resultRequested, resultCapped, resultFailed} {
		requestsTotal.WithLabelValues(result)
	}
	for _, outcome := range []string{outcomeHome, outcomeOverflowed, outcomeDeleted} {
		unschedulableDuration.WithLabelValues(outcome)
	}
	for _, kind := range []string{writesOfReservations, writesOfEvents, writesOfPod, writesOfEvictions} {
		writesTotal.WithLabelValues(kind)
	}
	for _, reason := range []string{openedForRoom, openedForGrant, openedForDecision, openedForRetry, openedForSpec} {
		gateOpenings.WithLabelValues(reason)
	}
	for _, outcome := range returnhome.Outcomes {
		returnedHome.WithLabelValues(string(outcome))
	}
}

// cycles is the number of attempts to schedule a pod that closed the gate.
func (w *waitingPod) cycles() int {
	if w.untried {
		return 0
	}
	return w.retries + 1
}

// observeEnd records how a pod that waited ended: pod is it as the cache shows it, or nil.
func (w *waitingPod) observeEnd(pod *corev1.Pod, isVirtual func(node string) bool, now time.Time) {
	outcome := outcomeDeleted
	switch {
	case pod == nil || pod.UID != w.pod.UID || pod.Spec.NodeName == "":
	case isVirtual(pod.Spec.NodeName):
		outcome = outcomeOverflowed
		podAttempts.Observe(float64(w.cycles() + 1))
	default:
		outcome = outcomeHome
	}
	unschedulableDuration.WithLabelValues(outcome).Observe(now.Sub(w.since).Seconds())
}
