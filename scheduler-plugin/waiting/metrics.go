package waiting

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

// Values of the labels of the metrics.
const (
	outcomeHome, outcomeOverflowed, outcomeDeleted   = "home", "overflowed", "deleted"
	openedForRoom, openedForGrant, openedForDecision = "room", "grant", "decision"
	openedForRetry, OpenedForSpec                    = "retry", "spec"
)

var (
	unschedulableDuration = metrics.NewHistogramVec(&metrics.HistogramOpts{
		Name:    "overflow_unschedulable_duration_seconds",
		Help:    "Time from when a pod did not fit, or was held because another one of its owner and shape did not, to its end, by outcome: bound at home, overflowed, or deleted.",
		Buckets: metrics.ExponentialBuckets(0.25, 2, 14),
	}, []string{"outcome"})
	PodAttempts = metrics.NewHistogram(&metrics.HistogramOpts{
		Name:    "overflow_pod_attempts",
		Help:    "Number of attempts to schedule a pod that overflowed.",
		Buckets: []float64{1, 2, 3, 4, 6, 8, 12, 16, 32},
	})
	GateOpenings = metrics.NewCounterVec(&metrics.CounterOpts{
		Name: "overflow_gate_openings_total",
		Help: "Number of waiting pods that were tried again, by reason: room at home, grant, decision, retry or changed spec.",
	}, []string{"reason"})
)

func init() {
	legacyregistry.MustRegister(unschedulableDuration, PodAttempts, GateOpenings)
	// So that they are there before the first pod waits.
	for _, outcome := range []string{outcomeHome, outcomeOverflowed, outcomeDeleted} {
		unschedulableDuration.WithLabelValues(outcome)
	}
	for _, reason := range []string{openedForRoom, openedForGrant, openedForDecision, openedForRetry, OpenedForSpec} {
		GateOpenings.WithLabelValues(reason)
	}
}

// cycles is the number of attempts to schedule a pod that closed the gate.
func (w *waitingPod) cycles() int {
	if w.untried {
		return 0
	}
	return w.retries + 1
}

// ObserveEnd records how a pod that waited ended: pod is it as the cache shows it, or nil.
func (w *waitingPod) ObserveEnd(pod *corev1.Pod, isVirtual func(node string) bool, now time.Time) {
	outcome := outcomeDeleted
	switch {
	case pod == nil || pod.UID != w.Pod.UID || pod.Spec.NodeName == "":
	case isVirtual(pod.Spec.NodeName):
		outcome = outcomeOverflowed
		PodAttempts.Observe(float64(w.cycles() + 1))
	default:
		outcome = outcomeHome
	}
	unschedulableDuration.WithLabelValues(outcome).Observe(now.Sub(w.since).Seconds())
}
