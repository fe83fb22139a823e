// The bench command runs benchmarks, each in the package that it measures:
//
//	go run ./e2e/bench -name=decide_1000
//
// Each benchmark prints details, and then a line "bench <name> <value> <unit> (aim <aim>)" for
// each of its figures. A figure that is counted (writes, attempts, bytes) fails its benchmark if
// it is above its aim or nothing was counted; a timing never does.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"
)

// bench is a benchmark and the go run arguments that run it, without -name. One that is with
// another is measured in a run of that, which prints the figures of both.
type bench struct {
	name string
	run  []string
	with string
}

// benches in the order in which they run.
var benches = slices.Concat(
	in("./broker/internal/bench",
		"decide_100", "decide_1000", "decide_10000", "split_400",
		"reservation_ms", "concurrent_reservations_10", "concurrent_reservations_100", "concurrent_reservations_1000",
		"asks_1000_clusters", "durable_reservations_ratio", "push_latency", "advertise_ingest", "failover_seconds"),
	in("./agent/internal/bench", "measure_1000_nodes", "hold_warm_ms"),
	in("./virtual-node/internal/bench", "virtual_node_memory"),
	in("./scheduler-plugin/internal/bench", "scheduler_tax", "scheduler_tax_under_overflow", "overflow_reserved_seconds"),
	together("./scheduler-plugin/internal/bench", "overflow_burst", "overflow_burst_ratio", "writes_per_overflow_pod", "attempts_per_overflow_pod"),
	together("./scheduler-plugin/internal/bench", "writes_per_waiting_pod", "attempts_per_waiting_pod"),
	together("./e2e/playground bench", "overflow_warm_seconds", "overflow_cold_seconds", "hold_cost_ratio"),
	in("./e2e/playground bench", "playground_scale", "playground_scale_without_placeholders", "playground_scale_without_overflow"),
)

// in are benchmarks of a program.
func in(program string, names ...string) (list []bench) {
	for _, name := range names {
		list = append(list, bench{name: name, run: strings.Fields(program)})
	}
	return list
}

// together are benchmarks of a program that one run measures.
func together(program string, names ...string) []bench {
	list := in(program, names...)
	for i := range list[1:] {
		list[1+i].with = names[0]
	}
	return list
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, arguments []string, out io.Writer) error {
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	name := flags.String("name", "", "Name of the benchmark. All of them if empty.")
	list := flags.Bool("list", false, "List the names and exit.")
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	if *list {
		for _, b := range benches {
			fmt.Fprintln(out, b.name)
		}
		return nil
	}
	selected, err := choose(*name)
	if err != nil {
		return err
	}
	var failed []string
	for _, b := range selected {
		command := exec.CommandContext(ctx, "go", slices.Concat([]string{"run"}, b.run, []string{"-name=" + b.name})...)
		command.Stdout, command.Stderr = out, os.Stderr
		// The benchmark stops its servers before it exits.
		command.Cancel = func() error { return command.Process.Signal(os.Interrupt) }
		command.WaitDelay = time.Minute
		if err := command.Run(); err != nil {
			failed = append(failed, b.name)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	if len(failed) > 0 {
		return fmt.Errorf("failed: %s (see the messages above)", strings.Join(failed, ", "))
	}
	return nil
}

// choose returns the benchmark of a name, or those that measure all.
func choose(name string) ([]bench, error) {
	if name == "" {
		return slices.DeleteFunc(slices.Clone(benches), func(b bench) bool { return b.with != "" }), nil
	}
	at := slices.IndexFunc(benches, func(b bench) bool { return b.name == name })
	if at < 0 {
		var names []string
		for _, b := range benches {
			names = append(names, b.name)
		}
		return nil, fmt.Errorf("unknown benchmark %q: use one of %s", name, strings.Join(names, ", "))
	}
	return benches[at : at+1], nil
}
