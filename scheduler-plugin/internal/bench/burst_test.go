package main

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/spillway-dev/spillway/e2e/bench/figures"
)

// TestReportBurst: what is counted fails the benchmark above its aim, once all lines are
// printed, and what is timed does not.
func TestReportBurst(t *testing.T) {
	with := func(writes, attempts float64, seconds int) round {
		return round{
			home:     result{bound: 1000, took: 4 * time.Second},
			overflow: result{bound: 1000, took: time.Duration(seconds) * time.Second, writes: writes, attempts: attempts},
		}
	}
	for name, test := range map[string]struct {
		rounds []round
		lines  string
		err    string
	}{
		"slow": {
			rounds: []round{with(3, 1, 5), with(4, 1.5, 20), with(5, 2, 16)},
			lines:  "bench overflow_burst 62.5 pods/s (aim none)\nbench overflow_burst_ratio 0.25 ratio (aim >= 0.5)\nbench writes_per_overflow_pod 4 writes (aim <= 5)\nbench attempts_per_overflow_pod 1.5 attempts (aim <= 2.2)\n",
		},
		"too many writes and attempts": {
			rounds: []round{with(5, 2, 5), with(6, 4, 5)},
			lines:  "bench overflow_burst 200 pods/s (aim none)\nbench overflow_burst_ratio 0.8 ratio (aim >= 0.5)\nbench writes_per_overflow_pod 5.5 writes (aim <= 5)\nbench attempts_per_overflow_pod 3 attempts (aim <= 2.2)\n",
			err:    "writes_per_overflow_pod is 5.5 writes, above its aim of 5\nattempts_per_overflow_pod is 3 attempts, above its aim of 2.2",
		},
		"the metrics of the API server or of the scheduler are missing": {
			rounds: []round{with(0, 0.5, 5), with(0, 0, 5)},
			lines:  "bench overflow_burst 200 pods/s (aim none)\nbench overflow_burst_ratio 0.8 ratio (aim >= 0.5)\nbench writes_per_overflow_pod 0 writes (aim <= 5)\nbench attempts_per_overflow_pod 0.25 attempts (aim <= 2.2)\n",
			err:    "writes_per_overflow_pod is 0 writes: not all was counted\nattempts_per_overflow_pod is 0.25 attempts: not all was counted",
		},
	} {
		t.Run(name, func(t *testing.T) {
			var out strings.Builder
			lines := figures.New(&out)
			reportBurst(lines, test.rounds)
			got := ""
			if err := lines.Err(); err != nil {
				got = err.Error()
			}
			if diff := cmp.Diff([]string{test.lines, test.err}, []string{out.String(), got}); diff != "" {
				t.Error(diff)
			}
		})
	}
}
