// Command bench measures the scheduler plugin with a real API server and real schedulers:
// go run ./scheduler-plugin/internal/bench -name=scheduler_tax. The line that counts reads
// "bench <name> <value> <unit> (aim <aim>)"; other lines have details.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	ctrl "sigs.k8s.io/controller-runtime"
)

// options are the flags.
type options struct {
	nodes, pods, pairs int
	profile            string
	grantAfter         time.Duration
}

// benches by name.
var benches = map[string]func(context.Context, *home, options) error{
	"scheduler_tax":                tax,
	"scheduler_tax_under_overflow": taxUnderOverflow,
	"overflow_burst":               burst(func(f figures) { report("overflow_burst", f.overflow.rate(), "pods/s", "none") }),
	"overflow_burst_ratio":         burst(func(f figures) { report("overflow_burst_ratio", f.overflow.rate()/f.home.rate(), "ratio", ">= 0.5") }),
	"writes_per_overflow_pod":      burst(func(f figures) { report("writes_per_overflow_pod", f.overflow.writes, "writes", "<= 5") }),
	"overflow_reserved_seconds":    reserved,
	"attempts_per_overflow_pod":    burst(func(f figures) { report("attempts_per_overflow_pod", f.overflow.attempts, "attempts", "<= 2.2") }),
}

func main() {
	var o options
	name := flag.String("name", "", "Name of the benchmark.")
	flag.IntVar(&o.nodes, "nodes", 500, "Number of nodes.")
	flag.IntVar(&o.pods, "pods", 0, "Number of pods of each arm. 0 means the default of the benchmark.")
	flag.IntVar(&o.pairs, "pairs", 20, "Number of pairs, where arms are compared.")
	flag.StringVar(&o.profile, "profile", "", "File for a CPU profile of the scheduler while pods overflow.")
	flag.DurationVar(&o.grantAfter, "grant-after", 0, "Time that the played providers take for their first grant. If 0, most pods have a grant before they are tried.")
	flag.Parse()
	run, known := benches[*name]
	if !known {
		fmt.Fprintf(os.Stderr, "unknown bench %q: -name is one of %s\n", *name, strings.Join(slices.Sorted(maps.Keys(benches)), ", "))
		os.Exit(2)
	}
	if err := measure(run, o); err != nil {
		fmt.Fprintf(os.Stderr, "bench %s: %v\n", *name, err)
		os.Exit(1)
	}
}

// measure runs a benchmark in a cluster of its own.
func measure(run func(context.Context, *home, options) error, o options) (err error) {
	ctrl.SetLogger(logr.Discard())
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	h, err := startHome(ctx, o.nodes)
	defer func() { err = errors.Join(err, h.stop()) }()
	if err != nil {
		return err
	}
	return run(ctx, h, o)
}

// report prints the line that counts.
func report(name string, value float64, unit, aim string) {
	fmt.Printf("bench %s %.4g %s (aim %s)\n", name, value, unit, aim)
}
