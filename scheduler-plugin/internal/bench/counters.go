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
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/spillway-dev/spillway/e2e/playground/cluster"
)

// printFor prints counts for each of n pods.
func printFor(n int, counts cluster.Counts) {
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		fmt.Printf("%8.3f %s\n", counts[name]/float64(n), name)
	}
}

// schedulerWrites are the writes that the API server has counted, without those of the
// benchmark itself: it creates and deletes pods, and writes nodes and the status of
// Reservations.
func (h *home) schedulerWrites(ctx context.Context) (cluster.Counts, error) {
	counts, err := h.cluster.Writes(ctx, "pods", "events", "reservations")
	maps.DeleteFunc(counts, func(name string, _ float64) bool {
		return name == "POST pods" || strings.HasSuffix(name, " reservations/status")
	})
	return counts, err
}

// settledWrites waits until the scheduler writes no more: events follow later.
func (h *home) settledWrites(ctx context.Context) (cluster.Counts, error) {
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
		if err == nil && now.Sum() == before.Sum() {
			return now, nil
		}
		before = now
	}
	return before, err
}

// events counts those of a namespace by reason.
func (h *home) events(ctx context.Context, namespace string) (cluster.Counts, error) {
	list, err := h.pods.EventsV1().Events(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	counts := cluster.Counts{}
	for _, e := range list.Items {
		counts["event "+e.Reason+" of a "+e.Regarding.Kind]++
	}
	return counts, nil
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

// attempts are the scheduling attempts of the running scheduler by result.
func (h *home) attempts(ctx context.Context) (cluster.Counts, error) {
	body, err := h.get(ctx, "/metrics")
	if err != nil {
		return nil, err
	}
	defer body.Close()
	return cluster.Count(body, "scheduler_schedule_attempts_total", func(labels map[string]string) string { return labels["result"] })
}

// profileTo writes a CPU profile of the running scheduler to a file.
func (h *home) profileTo(ctx context.Context, file string) error {
	body, err := h.get(ctx, "/debug/pprof/profile?seconds=30")
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
