package kubelet

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	stats "k8s.io/kubelet/pkg/apis/stats/v1alpha1"
	metricsv1beta1 "k8s.io/metrics/pkg/apis/metrics/v1beta1"
	metricsclient "k8s.io/metrics/pkg/client/clientset/versioned"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
)

// usageTimeout bounds the requests to the provider: clients of a kubelet time out
// after about 10 seconds.
const usageTimeout = 8 * time.Second

// usage serves the resource usage of the node's pods, from the provider's metrics
// API.
type usage struct {
	node    string
	guests  Guests
	clock   clock.PassiveClock
	log     logr.Logger
	cpu     *cpuCounters
	started time.Time
}

func newUsage(o Options) *usage {
	return &usage{node: o.NodeName, guests: o.Guests, clock: o.Clock, log: o.Log, cpu: newCPUCounters(), started: o.Clock.Now()}
}

// summary serves /stats/summary.
func (u *usage) summary(w http.ResponseWriter, r *http.Request) {
	summary, _, err := u.collect(r.Context())
	if err != nil {
		writeError(w, err)
		return
	}
	writeJSON(w, u.log, summary)
}

// metrics serves /metrics/resource.
func (u *usage) metrics(w http.ResponseWriter, r *http.Request) {
	summary, complete, err := u.collect(r.Context())
	if err != nil {
		writeError(w, err)
		return
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(summaryCollector{summary: summary, complete: complete})
	promhttp.HandlerFor(registry, promhttp.HandlerOpts{}).ServeHTTP(w, r)
}

// collect returns the current usage. Pods without metrics are listed without usage;
// complete is false if the provider denied access to its metrics API.
func (u *usage) collect(ctx context.Context) (summary *stats.Summary, complete bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, usageTimeout)
	defer cancel()
	var pods []measured
	namespaces := map[string]bool{}
	for pod := range u.guests.Pods() {
		m := measured{
			ref:   stats.PodReference{Namespace: pod.Namespace, Name: pod.Name, UID: string(pod.UID)},
			start: ptr.Deref(pod.Status.StartTime, metav1.Time{}), started: startTimes(pod), containers: map[string]bool{},
		}
		for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
			m.containers[c.Name] = true
		}
		if namespace, name, ok := u.guests.Locate(pod.Namespace, pod.Name); ok {
			m.guest = types.NamespacedName{Namespace: namespace, Name: name}
			namespaces[namespace] = true
		}
		pods = append(pods, m)
	}
	metrics, complete, err := u.podMetrics(ctx, namespaces)
	if err != nil {
		return nil, false, err
	}

	summary = &stats.Summary{Node: stats.NodeStats{NodeName: u.node, StartTime: metav1.NewTime(u.started)}, Pods: []stats.PodStats{}}
	present := map[container]bool{}
	var node usageSum
	for _, pod := range pods {
		summary.Pods = append(summary.Pods, u.podStats(pod, metrics[pod.guest], present, &node))
	}
	if complete {
		u.cpu.retain(present)
	}
	if node.at.IsZero() {
		// No usage was measured: the node uses nothing now.
		node.at = u.clock.Now()
	}
	// The node's counter includes pods that were deleted.
	summary.Node.CPU, summary.Node.Memory = cpuStats(node.at, node.cores, u.cpu.total().coreSeconds), memoryStats(node.at, node.bytes)
	return summary, complete, nil
}

// measured is what is needed of a pod.
type measured struct {
	ref   stats.PodReference
	guest types.NamespacedName
	// start is when the pod started, started when each container did.
	start   metav1.Time
	started map[string]time.Time
	// containers are the names of its containers.
	containers map[string]bool
}

// podStats returns the usage of a pod; metrics is nil if unknown. It adds the pod's
// containers to present, and their usage to node.
func (u *usage) podStats(pod measured, metrics *metricsv1beta1.PodMetrics, present map[container]bool, node *usageSum) stats.PodStats {
	out := stats.PodStats{PodRef: pod.ref, StartTime: pod.start, Containers: []stats.ContainerStats{}}
	uid := types.UID(pod.ref.UID)
	if metrics == nil {
		for name, start := range pod.started {
			present[container{pod: uid, name: name}] = true
			out.Containers = append(out.Containers, stats.ContainerStats{Name: name, StartTime: metav1.NewTime(start)})
		}
		return out
	}
	var sum usageSum
	reported := map[string]bool{}
	for _, c := range metrics.Containers {
		// A provider does not name containers that the pod does not have.
		if reported[c.Name] || !pod.containers[c.Name] {
			continue
		}
		reported[c.Name] = true
		id := container{pod: uid, name: c.Name}
		present[id] = true
		cores := c.Usage.Cpu().AsApproximateFloat64()
		total := u.cpu.add(id, sample{
			cores: cores, at: metrics.Timestamp.Time, window: metrics.Window.Duration, started: pod.started[c.Name],
		})
		bytes := c.Usage.Memory().Value()
		out.Containers = append(out.Containers, stats.ContainerStats{
			Name: c.Name, StartTime: metav1.NewTime(pod.started[c.Name]),
			CPU: cpuStats(total.at, cores, total.coreSeconds), Memory: memoryStats(total.at, bytes),
		})
		sum.add(total, cores, bytes)
		node.add(total, cores, bytes)
	}
	if len(reported) > 0 {
		out.CPU = cpuStats(sum.at, sum.cores, sum.coreSeconds)
		out.Memory = memoryStats(sum.at, sum.bytes)
	}
	return out
}

// usageSum is the usage of several containers; at is the latest time.
type usageSum struct {
	reading
	cores float64
	bytes int64
}

func (s *usageSum) add(r reading, cores float64, bytes int64) {
	s.coreSeconds += r.coreSeconds
	s.cores += cores
	s.bytes += bytes
	if r.at.After(s.at) {
		s.at = r.at
	}
}

func cpuStats(at time.Time, cores, coreSeconds float64) *stats.CPUStats {
	rate, total := uint64(max(0, cores)*1e9), uint64(coreSeconds*1e9)
	return &stats.CPUStats{Time: metav1.NewTime(at), UsageNanoCores: &rate, UsageCoreNanoSeconds: &total}
}

func memoryStats(at time.Time, bytes int64) *stats.MemoryStats {
	used := uint64(max(0, bytes))
	return &stats.MemoryStats{Time: metav1.NewTime(at), WorkingSetBytes: &used}
}

// startTimes returns when the running containers of a pod started, by the provider's
// clock, as the times of samples.
func startTimes(pod *corev1.Pod) map[string]time.Time {
	out := map[string]time.Time{}
	for _, statuses := range [][]corev1.ContainerStatus{pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses} {
		for _, status := range statuses {
			if status.State.Running != nil {
				out[status.Name] = status.State.Running.StartedAt.Time
			}
		}
	}
	return out
}

// podMetrics returns the metrics of the pods in the given namespaces of the
// provider. There are none if the provider has no metrics API; complete is false if
// it denied access.
func (u *usage) podMetrics(ctx context.Context, namespaces map[string]bool) (metrics map[types.NamespacedName]*metricsv1beta1.PodMetrics, complete bool, err error) {
	metrics, complete = map[types.NamespacedName]*metricsv1beta1.PodMetrics{}, true
	if len(namespaces) == 0 {
		return metrics, complete, nil
	}
	client, err := metricsclient.NewForConfig(u.guests.ProviderConfig())
	if err != nil {
		return nil, false, fmt.Errorf("%w: %w", errInvalidConfig, err)
	}
	for namespace := range namespaces {
		list, err := client.MetricsV1beta1().PodMetricses(namespace).List(ctx, metav1.ListOptions{})
		switch {
		case apierrors.IsNotFound(err) || apierrors.IsServiceUnavailable(err):
			u.log.V(1).Info("Provider serves no pod metrics; listing pods without usage", "reason", err.Error())
			continue
		case apierrors.IsForbidden(err):
			u.log.Info("Provider denied access to pod metrics; listing pods without usage", "reason", err.Error())
			complete = false
			continue
		case err != nil:
			return nil, false, err
		}
		for i := range list.Items {
			item := &list.Items[i]
			metrics[types.NamespacedName{Namespace: item.Namespace, Name: item.Name}] = item
		}
	}
	return metrics, complete, nil
}
