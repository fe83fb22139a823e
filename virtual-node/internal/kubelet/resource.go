package kubelet

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	stats "k8s.io/kubelet/pkg/apis/stats/v1alpha1"
)

// The names, labels and times are those of a kubelet's /metrics/resource, which
// metrics-server reads.
var (
	nodeCPU         = prometheus.NewDesc("node_cpu_usage_seconds_total", "Cumulative cpu time consumed by the node in core-seconds", nil, nil)
	nodeMemory      = prometheus.NewDesc("node_memory_working_set_bytes", "Current working set of the node in bytes", nil, nil)
	podCPU          = prometheus.NewDesc("pod_cpu_usage_seconds_total", "Cumulative cpu time consumed by the pod in core-seconds", []string{"pod", "namespace"}, nil)
	podMemory       = prometheus.NewDesc("pod_memory_working_set_bytes", "Current working set of the pod in bytes", []string{"pod", "namespace"}, nil)
	containerLabels = []string{"container", "pod", "namespace"}
	containerCPU    = prometheus.NewDesc("container_cpu_usage_seconds_total", "Cumulative cpu time consumed by the container in core-seconds", containerLabels, nil)
	containerMemory = prometheus.NewDesc("container_memory_working_set_bytes", "Current working set of the container in bytes", containerLabels, nil)
	containerStart  = prometheus.NewDesc("container_start_time_seconds", "Start time of the container since unix epoch in seconds", containerLabels, nil)
	scrapeError     = prometheus.NewDesc("resource_scrape_error", "1 if there was an error while getting container metrics, 0 otherwise", nil, nil)
)

// gatherer makes the metrics of one summary.
func gatherer(summary *stats.Summary, whole bool) prometheus.Gatherer {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collected{summary: summary, whole: whole})
	return registry
}

// collected is a summary as a collector of the moment.
type collected struct {
	summary *stats.Summary
	whole   bool
}

func (c collected) Describe(out chan<- *prometheus.Desc) {
	for _, desc := range []*prometheus.Desc{nodeCPU, nodeMemory, podCPU, podMemory, containerCPU, containerMemory, containerStart, scrapeError} {
		out <- desc
	}
}

func (c collected) Collect(out chan<- prometheus.Metric) {
	cpu := func(desc *prometheus.Desc, s *stats.CPUStats, labels ...string) {
		if s != nil && s.UsageCoreNanoSeconds != nil {
			out <- at(s.Time.Time, prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(*s.UsageCoreNanoSeconds)/1e9, labels...))
		}
	}
	memory := func(desc *prometheus.Desc, s *stats.MemoryStats, labels ...string) {
		if s != nil && s.WorkingSetBytes != nil {
			out <- at(s.Time.Time, prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, float64(*s.WorkingSetBytes), labels...))
		}
	}
	cpu(nodeCPU, c.summary.Node.CPU)
	memory(nodeMemory, c.summary.Node.Memory)
	for _, pod := range c.summary.Pods {
		name, namespace := pod.PodRef.Name, pod.PodRef.Namespace
		cpu(podCPU, pod.CPU, name, namespace)
		memory(podMemory, pod.Memory, name, namespace)
		for _, one := range pod.Containers {
			// A container that is known only by its start would be taken for one that
			// was measured badly, and its pod dropped.
			if one.CPU == nil {
				continue
			}
			cpu(containerCPU, one.CPU, one.Name, name, namespace)
			memory(containerMemory, one.Memory, one.Name, name, namespace)
			if one.StartTime.Unix() > 0 {
				out <- prometheus.MustNewConstMetric(containerStart, prometheus.GaugeValue, float64(one.StartTime.UnixNano())/1e9, one.Name, name, namespace)
			}
		}
	}
	failed := 0.0
	if !c.whole {
		failed = 1
	}
	out <- prometheus.MustNewConstMetric(scrapeError, prometheus.GaugeValue, failed)
}

// at gives a metric the time at which it was measured.
func at(t time.Time, m prometheus.Metric) prometheus.Metric {
	return prometheus.NewMetricWithTimestamp(t, m)
}
