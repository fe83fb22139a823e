// Command bench measures the scheduler plugin with a real API server and real schedulers:
// go run ./scheduler-plugin/internal/bench -name=scheduler_tax. It prints details, and then the
// figures.
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

	"github.com/spillway-dev/spillway/e2e/bench/figures"
)

// options are the flags.
type options struct {
	nodes, pods, pairs int
	profile            string
	grantAfter, every  time.Duration
}

// benches by name.
var benches = map[string]func(context.Context, *home, options) error{
	"scheduler_tax":                tax,
	"scheduler_tax_under_overflow": taxUnderOverflow,
	"overflow_reserved_seconds":    reserved,
	// One run prints all of these.
	"overflow_burst":            burst,
	"overflow_burst_ratio":      burst,
	"writes_per_overflow_pod":   burst,
	"attempts_per_overflow_pod": burst,
	"writes_per_waiting_pod":    waiting,
	"attempts_per_waiting_pod":  waiting,
}

// lines are the figures.
var lines = figures.New(os.Stdout)

func main() {
	var o options
	name := flag.String("name", "", "Name of the benchmark.")
	flag.IntVar(&o.nodes, "nodes", 500, "Number of nodes.")
	flag.IntVar(&o.pods, "pods", 0, "Number of pods of each arm. 0 means the default of the benchmark.")
	flag.IntVar(&o.pairs, "pairs", 0, "Number of pairs, where arms are compared. 0 means the default of the benchmark.")
	flag.StringVar(&o.profile, "profile", "", "File for a CPU profile of the scheduler while pods overflow.")
	flag.DurationVar(&o.grantAfter, "grant-after", 0, "Time that the played providers take for their first grant. If 0, most pods have a grant before they are tried.")
	flag.DurationVar(&o.every, "every", 0, "Time between the pods that overflow in overflow_burst and the figures beside it, which are created while the scheduler runs. If 0, all of them exist before it starts; only then do the rates mean anything.")
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

// measure runs a benchmark in a cluster of its own. A counted figure above its aim is an error.
func measure(run func(context.Context, *home, options) error, o options) (err error) {
	ctrl.SetLogger(logr.Discard())
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	h, err := startHome(ctx, o.nodes)
	defer func() { err = errors.Join(err, h.stop()) }()
	if err != nil {
		return err
	}
	return errors.Join(run(ctx, h, o), lines.Err())
}
