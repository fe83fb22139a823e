package kubelet

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	stats "k8s.io/kubelet/pkg/apis/stats/v1alpha1"
	metricsv1beta1 "k8s.io/metrics/pkg/apis/metrics/v1beta1"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"
)

var sampleTime = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)

// runningPod returns the pod, whose container started an hour before sampleTime.
func runningPod() *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: podNamespace, Name: podName, UID: "pod-uid"},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c"}}},
		Status: corev1.PodStatus{ContainerStatuses: []corev1.ContainerStatus{{
			Name:  "c",
			State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: metav1.NewTime(sampleTime.Add(-time.Hour))}},
		}}},
	}
}

// metricsAPI fakes a provider whose metrics API serves the sample that next returns.
func metricsAPI(t *testing.T, next func() (at time.Time, cpu string)) *rest.Config {
	return fakeProvider(t, func(w http.ResponseWriter, r *http.Request) {
		if want := "/apis/metrics.k8s.io/v1beta1/namespaces/" + guestNamespace + "/pods"; r.URL.Path != want || r.Header.Get("Authorization") != "Bearer secret-token" {
			t.Errorf("unexpected request for %s", r.URL.Path)
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		at, cpu := next()
		list := metricsv1beta1.PodMetricsList{
			TypeMeta: metav1.TypeMeta{APIVersion: "metrics.k8s.io/v1beta1", Kind: "PodMetricsList"},
			Items: []metricsv1beta1.PodMetrics{{
				ObjectMeta: metav1.ObjectMeta{Namespace: guestNamespace, Name: guestName},
				Timestamp:  metav1.NewTime(at), Window: metav1.Duration{Duration: 10 * time.Second},
				Containers: []metricsv1beta1.ContainerMetrics{{Name: "c", Usage: corev1.ResourceList{
					corev1.ResourceCPU: resource.MustParse(cpu), corev1.ResourceMemory: resource.MustParse("64Mi"),
				}},
					// What a hostile provider may add: the container again, and one that the pod does not have.
					{Name: "c", Usage: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("99"), corev1.ResourceMemory: resource.MustParse("99Gi")}},
					{Name: "invented", Usage: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("99"), corev1.ResourceMemory: resource.MustParse("99Gi")}},
				},
			}, {
				ObjectMeta: metav1.ObjectMeta{Namespace: guestNamespace, Name: "other"},
				Timestamp:  metav1.NewTime(at), Window: metav1.Duration{Duration: 10 * time.Second},
				Containers: []metricsv1beta1.ContainerMetrics{{Name: "c", Usage: corev1.ResourceList{
					corev1.ResourceCPU: resource.MustParse("99"), corev1.ResourceMemory: resource.MustParse("99Gi"),
				}}},
			}},
		}
		w.Header().Set("Content-Type", "application/json")
		if err := json.NewEncoder(w).Encode(list); err != nil {
			t.Error(err)
		}
	})
}

func TestMetricsResource(t *testing.T) {
	t.Parallel()
	at, cpu := sampleTime, "500m"
	guests := &fakeGuests{pods: []*corev1.Pod{runningPod()}}
	guests.config = metricsAPI(t, func() (time.Time, string) { return at, cpu })
	server := serve(t, guests, nil, clock.RealClock{})

	first := scrape(t, server.URL)
	repeated := scrape(t, server.URL)
	at, cpu = at.Add(20*time.Second), "2"
	second := scrape(t, server.URL)

	// 10 s of 0.5 cores, then 20 s of 2 cores.
	expectValue(t, first, "container_cpu_usage_seconds_total", 5+initialCPU, sampleTime)
	expectValue(t, repeated, "container_cpu_usage_seconds_total", 5+initialCPU, sampleTime)
	expectValue(t, second, "container_cpu_usage_seconds_total", 45+initialCPU, at)
	expectValue(t, second, "pod_cpu_usage_seconds_total", 45+initialCPU, at)
	expectValue(t, second, "node_cpu_usage_seconds_total", 45+initialCPU, at)
	for _, name := range []string{"container_memory_working_set_bytes", "pod_memory_working_set_bytes", "node_memory_working_set_bytes"} {
		expectValue(t, second, name, 64<<20, at)
	}
	expectValue(t, second, "container_start_time_seconds", float64(sampleTime.Add(-time.Hour).Unix()), time.Time{})
	expectValue(t, second, "resource_scrape_error", 0, time.Time{})

	labels := map[string]string{}
	for _, pair := range second["container_cpu_usage_seconds_total"].GetMetric()[0].GetLabel() {
		labels[pair.GetName()] = pair.GetValue()
	}
	if labels["namespace"] != podNamespace || labels["pod"] != podName || labels["container"] != "c" || len(labels) != 3 {
		t.Errorf("got labels %v, want those of the overflowed pod", labels)
	}
	if got := second["container_cpu_usage_seconds_total"].GetType(); got != dto.MetricType_COUNTER {
		t.Errorf("CPU is a %s, want a counter", got)
	}
}

func TestStatsSummary(t *testing.T) {
	t.Parallel()
	guests := &fakeGuests{pods: []*corev1.Pod{runningPod()}}
	guests.config = metricsAPI(t, func() (time.Time, string) { return sampleTime, "500m" })
	server := serve(t, guests, nil, clock.RealClock{})
	code, body := get(t, server.URL+"/stats/summary")
	var summary stats.Summary
	if err := json.Unmarshal([]byte(body), &summary); err != nil || code != http.StatusOK {
		t.Fatalf("got %d, %v: %s", code, err, body)
	}
	if summary.Node.NodeName != nodeName || len(summary.Pods) != 1 || len(summary.Pods[0].Containers) != 1 {
		t.Fatalf("got %s", body)
	}
	pod := summary.Pods[0]
	if pod.PodRef != (stats.PodReference{Namespace: podNamespace, Name: podName, UID: "pod-uid"}) {
		t.Errorf("got pod %+v", pod.PodRef)
	}
	for who, cpu := range map[string]*stats.CPUStats{"node": summary.Node.CPU, "pod": pod.CPU, "container": pod.Containers[0].CPU} {
		if cpu == nil || *cpu.UsageNanoCores != 500_000_000 || *cpu.UsageCoreNanoSeconds != 5_001_000_000 {
			t.Errorf("%s: got %+v", who, cpu)
		}
	}
}

// Without metrics of the provider, pods are listed without usage.
func TestProviderWithoutMetrics(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		code   int
		failed float64
	}{
		"NotServed":  {http.StatusNotFound, 0},
		"NoBackend":  {http.StatusServiceUnavailable, 0},
		"NotAllowed": {http.StatusForbidden, 1},
	} {
		t.Run(name, func(t *testing.T) {
			guests := &fakeGuests{pods: []*corev1.Pod{runningPod()}}
			guests.config = fakeProvider(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(c.code) })
			server := serve(t, guests, nil, clocktesting.NewFakePassiveClock(sampleTime))
			families := scrape(t, server.URL)
			for family := range families {
				if strings.HasPrefix(family, "container_") || strings.HasPrefix(family, "pod_") {
					t.Errorf("got %s, which was not measured", family)
				}
			}
			expectValue(t, families, "node_cpu_usage_seconds_total", 0, sampleTime)
			expectValue(t, families, "resource_scrape_error", c.failed, time.Time{})
			code, body := get(t, server.URL+"/stats/summary")
			if code != http.StatusOK || !strings.Contains(body, `"name":"job"`) || strings.Contains(body, "usageCoreNanoSeconds\":5") {
				t.Errorf("got %d %s, want the pod without usage", code, body)
			}
		})
	}
}

func TestMetricsOfUnreachableProvider(t *testing.T) {
	t.Parallel()
	guests := &fakeGuests{pods: []*corev1.Pod{runningPod()}, config: &rest.Config{Host: "https://127.0.0.1:1"}}
	server := serve(t, guests, nil, clock.RealClock{})
	for _, path := range []string{"/metrics/resource", "/stats/summary"} {
		if code, body := get(t, server.URL+path); code != http.StatusServiceUnavailable || !strings.Contains(body, "unreachable") {
			t.Errorf("%s: got %d %q", path, code, body)
		}
	}
}

// scrape parses /metrics/resource.
func scrape(t *testing.T, address string) map[string]*dto.MetricFamily {
	t.Helper()
	code, body := get(t, address+"/metrics/resource")
	if code != http.StatusOK {
		t.Fatalf("got %d: %s", code, body)
	}
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(body))
	if err != nil {
		t.Fatalf("%v in\n%s", err, body)
	}
	return families
}

// expectValue expects one sample; a zero at means a sample without time.
func expectValue(t *testing.T, families map[string]*dto.MetricFamily, name string, want float64, at time.Time) {
	t.Helper()
	metrics := families[name].GetMetric()
	if len(metrics) != 1 {
		t.Errorf("%s: %d samples, want 1", name, len(metrics))
		return
	}
	m := metrics[0]
	got := m.GetGauge().GetValue() + m.GetCounter().GetValue()
	if diff := got - want; diff > 1e-6 || diff < -1e-6 {
		t.Errorf("%s is %v, want %v", name, got, want)
	}
	var wantAt int64
	if !at.IsZero() {
		wantAt = at.UnixMilli()
	}
	if m.GetTimestampMs() != wantAt {
		t.Errorf("%s has time %d ms, want %d", name, m.GetTimestampMs(), wantAt)
	}
}
