package kubelet

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	stats "k8s.io/kubelet/pkg/apis/stats/v1alpha1"
	metricsv1beta1 "k8s.io/metrics/pkg/apis/metrics/v1beta1"
	metricsclient "k8s.io/metrics/pkg/client/clientset/versioned"
	"k8s.io/utils/clock"
)

// usageWithin is how long the provider may take to say what its guests use. Those
// who scrape a kubelet wait about 10 seconds.
const usageWithin = 8 * time.Second

// usage tells what a node's pods use, by the provider's metrics API.
type usage struct {
	node   string
	guests Guests
	clock  clock.PassiveClock
	log    logr.Logger
	meter  *meter
	since  time.Time
}

func newUsage(o Options) *usage {
	return &usage{node: o.NodeName, guests: o.Guests, clock: o.Clock, log: o.Log, meter: newMeter(), since: o.Clock.Now()}
}

// summary answers /stats/summary.
func (u *usage) summary(w http.ResponseWriter, r *http.Request) {
	summary, _, err := u.measure(r.Context())
	if err != nil {
		answerProblem(w, err)
		return
	}
	writeJSON(w, u.log, summary)
}

// metrics answers /metrics/resource.
func (u *usage) metrics(w http.ResponseWriter, r *http.Request) {
	summary, whole, err := u.measure(r.Context())
	if err != nil {
		answerProblem(w, err)
		return
	}
	promhttp.HandlerFor(gatherer(summary, whole), promhttp.HandlerOpts{}).ServeHTTP(w, r)
}

// measure asks the provider what the guests use now. Where it has no metrics API
// the pods are there without their use; whole is false where it has one that the
// virtual node may not read.
func (u *usage) measure(ctx context.Context) (summary *stats.Summary, whole bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, usageWithin)
	defer cancel()
	pods := u.guests.Pods()
	located := make([]types.NamespacedName, len(pods))
	namespaces := map[string]bool{}
	for i, pod := range pods {
		if namespace, name, ok := u.guests.Locate(pod.Namespace, pod.Name); ok {
			located[i] = types.NamespacedName{Namespace: namespace, Name: name}
			namespaces[namespace] = true
		}
	}
	used, whole, err := u.fetch(ctx, namespaces)
	if err != nil {
		return nil, false, err
	}

	summary = &stats.Summary{Node: stats.NodeStats{NodeName: u.node, StartTime: metav1.NewTime(u.since)}, Pods: []stats.PodStats{}}
	present := map[container]bool{}
	var node tally
	for i, pod := range pods {
		one := u.pod(pod, used[located[i]], present)
		node.addPod(one)
		summary.Pods = append(summary.Pods, one)
	}
	if whole {
		u.meter.keep(present)
	}
	summary.Node.CPU, summary.Node.Memory = u.nodeStats(node)
	return summary, whole, nil
}

// nodeStats are the use of the node: that of its guests. Its counter also holds
// what those used who are gone.
func (u *usage) nodeStats(node tally) (*stats.CPUStats, *stats.MemoryStats) {
	total := u.meter.all()
	if node.at.IsZero() {
		// Nothing is used: that is so now.
		node.at = u.clock.Now()
	}
	return cpuStats(node.at, node.cores, total.coreSeconds), memoryStats(node.at, node.bytes)
}

// pod is what one pod uses; used is nil where that is not known. It notes the
// containers that it counted.
func (u *usage) pod(pod *corev1.Pod, used *metricsv1beta1.PodMetrics, present map[container]bool) stats.PodStats {
	out := stats.PodStats{
		PodRef:     stats.PodReference{Namespace: pod.Namespace, Name: pod.Name, UID: string(pod.UID)},
		Containers: []stats.ContainerStats{},
	}
	if pod.Status.StartTime != nil {
		out.StartTime = *pod.Status.StartTime
	}
	started := startTimes(pod)
	if used == nil {
		for name, start := range started {
			present[container{pod: pod.UID, name: name}] = true
			out.Containers = append(out.Containers, stats.ContainerStats{Name: name, StartTime: metav1.NewTime(start)})
		}
		return out
	}
	var all tally
	for _, c := range used.Containers {
		key := container{pod: pod.UID, name: c.Name}
		present[key] = true
		cores := c.Usage.Cpu().AsApproximateFloat64()
		counted := u.meter.add(key, sample{
			cores: cores, at: used.Timestamp.Time, window: used.Window.Duration, started: started[c.Name],
		})
		bytes := c.Usage.Memory().Value()
		out.Containers = append(out.Containers, stats.ContainerStats{
			Name: c.Name, StartTime: metav1.NewTime(started[c.Name]),
			CPU: cpuStats(counted.at, cores, counted.coreSeconds), Memory: memoryStats(counted.at, bytes),
		})
		all.add(counted, cores, bytes)
	}
	if len(used.Containers) > 0 {
		out.CPU = cpuStats(all.at, all.cores, all.coreSeconds)
		out.Memory = memoryStats(all.at, all.bytes)
	}
	return out
}

// tally adds up uses.
type tally struct {
	reading
	cores float64
	bytes int64
}

func (t *tally) add(r reading, cores float64, bytes int64) {
	t.coreSeconds += r.coreSeconds
	t.cores += cores
	t.bytes += bytes
	if r.at.After(t.at) {
		t.at = r.at
	}
}

func (t *tally) addPod(pod stats.PodStats) {
	if pod.CPU == nil {
		return
	}
	t.add(reading{at: pod.CPU.Time.Time}, float64(*pod.CPU.UsageNanoCores)/1e9, int64(*pod.Memory.WorkingSetBytes))
}

func cpuStats(at time.Time, cores, coreSeconds float64) *stats.CPUStats {
	rate, counted := uint64(max(0, cores)*1e9), uint64(coreSeconds*1e9)
	return &stats.CPUStats{Time: metav1.NewTime(at), UsageNanoCores: &rate, UsageCoreNanoSeconds: &counted}
}

func memoryStats(at time.Time, bytes int64) *stats.MemoryStats {
	used := uint64(max(0, bytes))
	return &stats.MemoryStats{Time: metav1.NewTime(at), WorkingSetBytes: &used}
}

// startTimes are when the running containers of a pod began, by the provider's
// clock, which is also that of the samples.
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

// fetch reads the use of all guests, by their names.
func (u *usage) fetch(ctx context.Context, namespaces map[string]bool) (used map[types.NamespacedName]*metricsv1beta1.PodMetrics, whole bool, err error) {
	used, whole = map[types.NamespacedName]*metricsv1beta1.PodMetrics{}, true
	if len(namespaces) == 0 {
		return used, whole, nil
	}
	config, err := u.guests.Provider()
	if err != nil {
		return nil, false, fmt.Errorf("%w: %w", errNoConnection, err)
	}
	client, err := metricsclient.NewForConfig(rest.CopyConfig(config))
	if err != nil {
		return nil, false, fmt.Errorf("%w: %w", errNoConnection, err)
	}
	for namespace := range namespaces {
		list, err := client.MetricsV1beta1().PodMetricses(namespace).List(ctx, metav1.ListOptions{})
		switch {
		case apierrors.IsNotFound(err) || apierrors.IsServiceUnavailable(err):
			u.log.V(1).Info("The provider serves no metrics of its pods; ours are listed without", "Error", err.Error())
			continue
		case apierrors.IsForbidden(err):
			u.log.Info("The provider does not let us read the metrics of our guests; pods are listed without", "Error", err.Error())
			whole = false
			continue
		case err != nil:
			return nil, false, err
		}
		for i := range list.Items {
			item := &list.Items[i]
			used[types.NamespacedName{Namespace: item.Namespace, Name: item.Name}] = item
		}
	}
	return used, whole, nil
}
