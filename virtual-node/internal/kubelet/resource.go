package kubelet

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	stats "k8s.io/kubelet/pkg/apis/stats/v1alpha1"
)

// The metrics of a kubelet's /metrics/resource, which metrics-server reads.
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

// summaryCollector has the metrics of a summary; complete sets resource_scrape_error.
type summaryCollector struct {
	summary  *stats.Summary
	complete bool
}

func (s summaryCollector) Describe(out chan<- *prometheus.Desc) {
	for _, desc := range []*prometheus.Desc{nodeCPU, nodeMemory, podCPU, podMemory, containerCPU, containerMemory, containerStart, scrapeError} {
		out <- desc
	}
}

func (s summaryCollector) Collect(out chan<- prometheus.Metric) {
	cpu := func(desc *prometheus.Desc, usage *stats.CPUStats, labels ...string) {
		if usage != nil && usage.UsageCoreNanoSeconds != nil {
			out <- at(usage.Time.Time, prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(*usage.UsageCoreNanoSeconds)/1e9, labels...))
		}
	}
	memory := func(desc *prometheus.Desc, usage *stats.MemoryStats, labels ...string) {
		if usage != nil && usage.WorkingSetBytes != nil {
			out <- at(usage.Time.Time, prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, float64(*usage.WorkingSetBytes), labels...))
		}
	}
	cpu(nodeCPU, s.summary.Node.CPU)
	memory(nodeMemory, s.summary.Node.Memory)
	for _, pod := range s.summary.Pods {
		name, namespace := pod.PodRef.Name, pod.PodRef.Namespace
		cpu(podCPU, pod.CPU, name, namespace)
		memory(podMemory, pod.Memory, name, namespace)
		for _, c := range pod.Containers {
			// metrics-server drops pods with a container that has a start time only.
			if c.CPU == nil {
				continue
			}
			cpu(containerCPU, c.CPU, c.Name, name, namespace)
			memory(containerMemory, c.Memory, c.Name, name, namespace)
			if c.StartTime.Unix() > 0 {
				out <- prometheus.MustNewConstMetric(containerStart, prometheus.GaugeValue, float64(c.StartTime.UnixNano())/1e9, c.Name, name, namespace)
			}
		}
	}
	failed := 0.0
	if !s.complete {
		failed = 1
	}
	out <- prometheus.MustNewConstMetric(scrapeError, prometheus.GaugeValue, failed)
}

// at sets the time of a metric.
func at(t time.Time, m prometheus.Metric) prometheus.Metric {
	return prometheus.NewMetricWithTimestamp(t, m)
}
