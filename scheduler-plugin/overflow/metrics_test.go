package overflow_test

import (
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"

	dto "github.com/prometheus/client_model/go"
	"k8s.io/component-base/metrics/legacyregistry"

	"github.com/spillway-dev/spillway/e2e/expect"
)

// documentedMetrics compares the metrics after the other rules with the table in
// ARCHITECTURE.md, both ways, and expects that each has counted something.
func documentedMetrics(c *testCluster, _ string) {
	text, err := os.ReadFile("../../ARCHITECTURE.md")
	expect.NoError(c.t, err)
	var documented []string
	for _, row := range regexp.MustCompile("(?m)^\\| `(overflow_[a-z_]+)").FindAllStringSubmatch(string(text), -1) {
		documented = append(documented, row[1])
	}
	families, err := legacyregistry.DefaultGatherer.Gather()
	expect.NoError(c.t, err)
	served := map[string]float64{}
	for _, family := range families {
		if strings.HasPrefix(family.GetName(), "overflow_") {
			for _, m := range family.Metric {
				served[family.GetName()] += counted(m)
			}
		}
	}
	slices.Sort(documented)
	if names := slices.Sorted(maps.Keys(served)); !slices.Equal(names, documented) {
		c.t.Errorf("the scheduler serves %v, and ARCHITECTURE.md describes %v", names, documented)
	}
	for name, n := range served {
		if n == 0 {
			c.t.Errorf("%s has counted nothing", name)
		}
	}
}

func counted(m *dto.Metric) float64 {
	if h := m.GetHistogram(); h != nil {
		return float64(h.GetSampleCount())
	}
	return m.GetCounter().GetValue()
}
