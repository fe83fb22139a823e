// Command bench measures the broker on a real API server: etcd and kube-apiserver as
// processes, the broker in this process, and agents that only speak its protocol.
//
//	go run ./broker/internal/bench -name=concurrent_reservations_100
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/signal"
	"runtime/pprof"
	"slices"
	"strings"
	"syscall"
	"time"
)

// bench measures one figure and prints its lines.
type bench func(ctx context.Context, h *hub, out io.Writer) error

var benches = map[string]bench{
	"concurrent_reservations_10":   concurrent(10, "none"),
	"concurrent_reservations_100":  concurrent(100, "1.5"),
	"concurrent_reservations_1000": concurrent(1000, "15"),
	"reservation_ms":               alone,
	"durable_reservations_ratio":   durable,
}

func main() {
	names := strings.Join(slices.Sorted(maps.Keys(benches)), ", ")
	name := flag.String("name", "", "Name of the benchmark: "+names+".")
	profile := flag.String("cpuprofile", "", "File for a CPU profile of the broker and the agents.")
	verbose := flag.Bool("v", false, "Print the log of the API server's processes if the benchmark fails.")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *name, *profile, *verbose, names); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, name, profile string, verbose bool, names string) (err error) {
	measure, known := benches[name]
	if !known {
		return fmt.Errorf("no benchmark is named %q: use one of %s", name, names)
	}
	h, err := startHub(ctx)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil && verbose {
			fmt.Fprintln(os.Stderr, h.logs())
		}
		err = errors.Join(err, h.stop())
	}()
	if profile != "" {
		file, err := os.Create(profile)
		if err != nil {
			return err
		}
		defer file.Close()
		if err := pprof.StartCPUProfile(file); err != nil {
			return err
		}
		defer pprof.StopCPUProfile()
	}
	ctx, cancel := context.WithTimeout(ctx, 15*time.Minute)
	defer cancel()
	return measure(ctx, h, os.Stdout)
}

// line prints a benchmark's figure.
func line(out io.Writer, name string, value float64, decimals int, unit, aim string) {
	fmt.Fprintf(out, "bench %s %.*f %s (aim %s)\n", name, decimals, value, unit, aim)
}
