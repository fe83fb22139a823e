package figures_test

import (
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/spillway-dev/spillway/e2e/bench/figures"
)

func TestPrinter(t *testing.T) {
	for name, test := range map[string]struct {
		print func(*figures.Printer)
		want  string
		err   string
	}{
		"a timing above its aim is no error": {
			print: func(p *figures.Printer) { p.Time("push_latency", 250.04, "ms", "<= 100") },
			want:  "bench push_latency 250 ms (aim <= 100)\n",
		},
		"a counted figure at its aim": {
			print: func(p *figures.Printer) { p.Count("attempts", 2.2, "attempts", 2.2) },
			want:  "bench attempts 2.2 attempts (aim <= 2.2)\n",
		},
		"the lines after a counted figure above its aim are printed": {
			print: func(p *figures.Printer) {
				p.Count("writes", 5.25, "writes", 5)
				p.Time("burst", 12345.6, "pods/s", "none")
				p.Count("bytes", 61.5, "kB", 60)
			},
			want: "bench writes 5.25 writes (aim <= 5)\nbench burst 12346 pods/s (aim none)\nbench bytes 61.5 kB (aim <= 60)\n",
			err:  "writes is 5.25 writes, above its aim of 5\nbytes is 61.5 kB, above its aim of 60",
		},
		"nothing was counted": {
			print: func(p *figures.Printer) { p.Count("writes", math.NaN(), "writes", 5) },
			want:  "bench writes NaN writes (aim <= 5)\n",
			err:   "writes is NaN writes: not all was counted",
		},
		"a counter is missing": {
			print: func(p *figures.Printer) {
				p.Count("writes", 0, "writes", 5)
				p.Count("kilobytes", 0.01, "kB", 5)
				p.Count("difference", -4, "writes", 5)
			},
			want: "bench writes 0 writes (aim <= 5)\nbench kilobytes 0.01 kB (aim <= 5)\nbench difference -4 writes (aim <= 5)\n",
			err:  "writes is 0 writes: not all was counted\ndifference is -4 writes: not all was counted",
		},
		"each counts as one at least": {
			print: func(p *figures.Printer) {
				p.CountEach("attempts", 1, "attempts", 2.2)
				p.CountEach("attempts", 2.3, "attempts", 2.2)
				p.CountEach("attempts", 0.99, "attempts", 2.2)
				p.CountEach("attempts", math.NaN(), "attempts", 2.2)
			},
			want: "bench attempts 1 attempts (aim <= 2.2)\nbench attempts 2.3 attempts (aim <= 2.2)\nbench attempts 0.99 attempts (aim <= 2.2)\nbench attempts NaN attempts (aim <= 2.2)\n",
			err:  "attempts is 2.3 attempts, above its aim of 2.2\nattempts is 0.99 attempts: not all was counted\nattempts is NaN attempts: not all was counted",
		},
	} {
		t.Run(name, func(t *testing.T) {
			var out strings.Builder
			p := figures.New(&out)
			test.print(p)
			got := ""
			if err := p.Err(); err != nil {
				got = err.Error()
			}
			if diff := cmp.Diff([]string{test.want, test.err}, []string{out.String(), got}); diff != "" {
				t.Error(diff)
			}
		})
	}
}
