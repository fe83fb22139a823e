package cluster

import (
	"context"
	"fmt"
	"io"
	"slices"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"k8s.io/client-go/rest"
)

// Counts are values of a counter by name.
type Counts map[string]float64

// Sum adds up all counts.
func (c Counts) Sum() (sum float64) {
	for _, n := range c {
		sum += n
	}
	return sum
}

// Minus returns what has been added since before.
func (c Counts) Minus(before Counts) Counts {
	added := Counts{}
	for name, n := range c {
		if n -= before[name]; n > 0 {
			added[name] = n
		}
	}
	return added
}

// Count reads a counter in a program's metrics, summed up by what nameOf returns of its
// labels; "" is left out.
func Count(metrics io.Reader, counter string, nameOf func(labels map[string]string) string) (Counts, error) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(metrics)
	if err != nil {
		return nil, err
	}
	counts := Counts{}
	for _, m := range families[counter].GetMetric() {
		if name := nameOf(labelsOf(m)); name != "" {
			counts[name] += m.GetCounter().GetValue()
		}
	}
	return counts, nil
}

func labelsOf(m *dto.Metric) map[string]string {
	labels := map[string]string{}
	for _, pair := range m.GetLabel() {
		labels[pair.GetName()] = pair.GetValue()
	}
	return labels
}

// Writes are the writes of some resources that the API server has counted, named as
// "POST pods/binding".
func (c *Cluster) Writes(ctx context.Context, resources ...string) (Counts, error) {
	return Writes(ctx, c.Set.Discovery().RESTClient(), resources...)
}

// Writes are the writes that the API server of a client has counted.
func Writes(ctx context.Context, client rest.Interface, resources ...string) (Counts, error) {
	metrics, err := client.Get().AbsPath("/metrics").Stream(ctx)
	if err != nil {
		return nil, fmt.Errorf("reading the metrics of the API server: %w", err)
	}
	defer metrics.Close()
	return Count(metrics, "apiserver_request_total", func(labels map[string]string) string {
		if !slices.Contains([]string{"POST", "PUT", "PATCH", "APPLY", "DELETE"}, labels["verb"]) || !slices.Contains(resources, labels["resource"]) {
			return ""
		}
		name := labels["verb"] + " " + labels["resource"]
		if sub := labels["subresource"]; sub != "" {
			name += "/" + sub
		}
		return name
	})
}
