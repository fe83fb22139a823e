package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"slices"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/prometheus/procfs"

	"github.com/spillway-dev/spillway/e2e/playground/cluster"
)

// counters are values of counters by labels.
type counters map[string]float64

func (c counters) sum() (sum float64) {
	for _, n := range c {
		sum += n
	}
	return sum
}

// minus returns what has been added since before.
func (c counters) minus(before counters) counters {
	added := counters{}
	for name, n := range c {
		if n -= before[name]; n > 0 {
			added[name] = n
		}
	}
	return added
}

// print prints the counts for each of n pods.
func (c counters) print(n int) {
	for _, name := range slices.Sorted(maps.Keys(c)) {
		fmt.Printf("%8.3f %s\n", c[name]/float64(n), name)
	}
}

// read sums up a counter in a program's metrics by what nameOf returns; "" is left out.
func read(text io.Reader, counter string, nameOf func(map[string]string) string) (counters, error) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(text)
	if err != nil {
		return nil, err
	}
	sums := counters{}
	for _, m := range families[counter].GetMetric() {
		if name := nameOf(labelsOf(m)); name != "" {
			sums[name] += m.GetCounter().GetValue()
		}
	}
	return sums, nil
}

func labelsOf(m *dto.Metric) map[string]string {
	labels := map[string]string{}
	for _, pair := range m.GetLabel() {
		labels[pair.GetName()] = pair.GetValue()
	}
	return labels
}

// schedulerWrites are the writes that the API server has counted, without those of the
// benchmark itself: it creates and deletes pods, and writes nodes and the status of
// Reservations.
func (h *home) schedulerWrites(ctx context.Context) (counters, error) {
	body, err := h.cluster.Set.Discovery().RESTClient().Get().AbsPath("/metrics").Stream(ctx)
	if err != nil {
		return nil, fmt.Errorf("reading the API server's metrics: %w", err)
	}
	defer body.Close()
	return read(body, "apiserver_request_total", func(labels map[string]string) string {
		verb, resource, sub := labels["verb"], labels["resource"], labels["subresource"]
		switch {
		case !slices.Contains([]string{"POST", "PUT", "PATCH", "APPLY", "DELETE"}, verb),
			!slices.Contains([]string{"pods", "events", "reservations"}, resource),
			resource == "pods" && sub == "" && verb == "POST",
			resource == "reservations" && sub == "status":
			return ""
		case sub != "":
			return verb + " " + resource + "/" + sub
		}
		return verb + " " + resource
	})
}

// settledWrites waits until the scheduler writes no more: events follow later.
func (h *home) settledWrites(ctx context.Context) (counters, error) {
	before, err := h.schedulerWrites(ctx)
	for range 30 {
		if err != nil {
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(time.Second):
		}
		now, err := h.schedulerWrites(ctx)
		if err == nil && now.sum() == before.sum() {
			return now, nil
		}
		before = now
	}
	return before, err
}

// get requests a page of the scheduler, which may just have been started.
func (h *home) get(ctx context.Context, path string) (io.ReadCloser, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+cluster.Address(h.port)+path, nil)
	if err != nil {
		return nil, err
	}
	// Its certificate is one that it has made itself.
	insecure := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	response, err := insecure.Do(request)
	for tries := 0; err != nil && tries < 100 && ctx.Err() == nil; tries++ {
		time.Sleep(100 * time.Millisecond)
		response, err = insecure.Do(request)
	}
	if err != nil {
		return nil, err
	}
	if response.StatusCode != http.StatusOK {
		defer response.Body.Close()
		return nil, fmt.Errorf("getting %s of the scheduler: %s", path, response.Status)
	}
	return response.Body, nil
}

// schedulerCPU is the CPU time of the running scheduler in seconds.
func (h *home) schedulerCPU() (float64, error) {
	running, err := procfs.NewProc(h.scheduler.Pid())
	if err != nil {
		return 0, err
	}
	stat, err := running.Stat()
	return stat.CPUTime(), err
}

// attempts are the scheduling attempts of the running scheduler by result.
func (h *home) attempts(ctx context.Context) (counters, error) {
	body, err := h.get(ctx, "/metrics")
	if err != nil {
		return nil, err
	}
	defer body.Close()
	return read(body, "scheduler_schedule_attempts_total", func(labels map[string]string) string { return labels["result"] })
}

// profileTo writes a CPU profile of the running scheduler to a file.
func (h *home) profileTo(ctx context.Context, file string) error {
	body, err := h.get(ctx, "/debug/pprof/profile?seconds=10")
	if err != nil {
		return err
	}
	defer body.Close()
	out, err := os.Create(file)
	if err != nil {
		return err
	}
	defer out.Close()
	_, err = io.Copy(out, body)
	return err
}
