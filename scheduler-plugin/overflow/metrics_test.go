package overflow_test

import (
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"k8s.io/component-base/metrics/legacyregistry"

	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// documentedMetrics compares the metrics after the other rules with the table in
// ARCHITECTURE.md, both ways, and expects that each has counted something.
func documentedMetrics(c *testCluster, ns string) {
	text, err := os.ReadFile("../../ARCHITECTURE.md")
	expect.NoError(c.t, err)
	var documented []string
	for _, row := range regexp.MustCompile("(?m)^\\| `(overflow_[a-z_]+)").FindAllStringSubmatch(string(text), -1) {
		documented = append(documented, row[1])
	}
	// A pod that is deleted while it waits.
	c.create(schedulerPod(ns, "waits", "1", inPool(ns)))
	c.expectReservation(ns, ns, 1)
	expect.NoError(c.t, c.Delete(c.t.Context(), schedulerPod(ns, "waits", "1")))
	// A policy for a label that no namespace can have, from before the CRD refused it.
	controlplane.InstallCRDsWithoutRules(c.t, c.config)
	defer controlplane.InstallCRDs(c.t, c.config)
	unusable := returnPolicy(ns, nil)
	unusable.Spec.NamespaceSelector.MatchLabels = map[string]string{"team": "a b"}
	expect.Eventually(c.t, "the CRD without rules to be served", func() (bool, string) {
		err := c.Create(c.t.Context(), unusable)
		return err == nil, fmt.Sprint(err)
	})
	defer func() { expect.NoError(c.t, c.Delete(c.t.Context(), unusable)) }()
	var served, labelled map[string]float64
	expect.Eventually(c.t, "both to be counted", func() (bool, string) {
		served, labelled = c.servedMetrics()
		ended, undecodable := labelled["overflow_unschedulable_duration_seconds/deleted"], labelled["overflow_undecodable_objects/OverflowPolicy"]
		return ended > 0 && undecodable > 0, fmt.Sprint(ended, undecodable)
	})
	slices.Sort(documented)
	if names := slices.Sorted(maps.Keys(served)); !slices.Equal(names, documented) {
		c.t.Errorf("the scheduler serves %v, and ARCHITECTURE.md describes %v", names, documented)
	}
	for name, n := range served {
		if n == 0 {
			c.t.Errorf("%s has counted nothing", name)
		}
	}
	for name, values := range map[string][]string{
		"overflow_requests_total":                 {"requested", "capped", "failed"},
		"overflow_unschedulable_duration_seconds": {"home", "overflowed", "deleted"},
		"overflow_writes_total":                   {"reservation", "event", "binding", "eviction", "condition"},
		"overflow_gate_openings_total":            {"room", "grant", "decision", "spec", "retry"},
		"overflow_returned_home_total":            {"returned", "overflowed", "blocked"},
	} {
		for _, value := range values {
			n, known := labelled[name+"/"+value]
			// Nothing waits for a minute in these tests.
			if !known || n == 0 && value != "retry" {
				c.t.Errorf("%s has counted no %s", name, value)
			}
		}
	}
}

// servedMetrics returns what the metrics of the plugin have counted, by name and by name and
// label, from what kube-scheduler serves at /metrics.
func (c *testCluster) servedMetrics() (served, labelled map[string]float64) {
	c.t.Helper()
	server := httptest.NewServer(legacyregistry.Handler())
	defer server.Close()
	response, err := http.Get(server.URL)
	expect.NoError(c.t, err)
	defer response.Body.Close()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(response.Body)
	expect.NoError(c.t, err)
	served, labelled = map[string]float64{}, map[string]float64{}
	for name, family := range families {
		if !strings.HasPrefix(name, "overflow_") {
			continue
		}
		for _, m := range family.Metric {
			served[name] += counted(m)
			for _, label := range m.Label {
				labelled[name+"/"+label.GetValue()] += counted(m)
			}
		}
	}
	return served, labelled
}

func counted(m *dto.Metric) float64 {
	if h := m.GetHistogram(); h != nil {
		return float64(h.GetSampleCount())
	}
	return m.GetCounter().GetValue() + m.GetGauge().GetValue()
}
