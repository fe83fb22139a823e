package recorder

import (
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/history"
)

// maxNamespaces is how many namespaces of one requester have series of their own; others have
// namespace "other".
const maxNamespaces = 50

// others is the label of all namespaces and resources without series of their own.
const others = "other"

// named are the resources with series of their own: clusters name others as they like.
var named = []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, broker.ResourceGPU, corev1.ResourceEphemeralStorage}

var (
	capacityHours = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "broker_capacity_hours_total",
		Help: "Capacity-hours that providers have promised: core-hours, GiB-hours of memory and storage, and hours of other units.",
	}, []string{"requester", "provider", "namespace", "resource"})
	cost = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "broker_cost_total",
		Help: "Cost of the capacity-hours that have a known price.",
	}, []string{"requester", "provider", "namespace", "currency"})
	failures = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "broker_history_failures_total",
		Help: "Number of failed writes and reads of the history's database, each of which is retried.",
	})
	unwritten = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "broker_history_unwritten",
		Help: "Number of records that wait in memory for the history's database.",
	})
	late = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "broker_history_late_total",
		Help: "Number of Reservations that disappeared before the history's database had their record.",
	})
	lostTotal = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "broker_history_lost_total",
		Help: "Number of records that were dropped because too many waited for the history's database.",
	})
)

func init() {
	metrics.Registry.MustRegister(capacityHours, cost, failures, unwritten, late, lostTotal)
}

// counters bound the series of a requester.
type counters struct {
	// namespaces with series of their own, by requester.
	namespaces map[string]map[string]bool
}

// counted counts a sum of a record.
func (c *counters) counted(record *history.Record, provider, currency string, sum history.Sum) {
	namespace := c.namespace(record.Requester, record.Namespace)
	for name := range sum.Promised {
		hours, _ := sum.Promised.Hours(name).Float64()
		resource := string(name)
		if !slices.Contains(named, name) {
			resource = others
		}
		capacityHours.WithLabelValues(record.Requester, provider, namespace, resource).Add(hours)
	}
	if currency != "" && sum.Cost != nil {
		figure, _ := sum.Cost.Float64()
		cost.WithLabelValues(record.Requester, provider, namespace, currency).Add(figure)
	}
}

// namespace is the label of a namespace.
func (c *counters) namespace(requester, name string) string {
	known := c.namespaces[requester]
	switch {
	case known[name]:
	case known == nil:
		c.namespaces[requester] = map[string]bool{name: true}
	case len(known) >= maxNamespaces:
		return others
	default:
		known[name] = true
	}
	return name
}

// forget deletes the series of a cluster without an advertisement.
func (c *counters) forget(cluster string) {
	delete(c.namespaces, cluster)
	for _, label := range []string{"requester", "provider"} {
		capacityHours.DeletePartialMatch(prometheus.Labels{label: cluster})
		cost.DeletePartialMatch(prometheus.Labels{label: cluster})
	}
}
