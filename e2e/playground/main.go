// The playground command runs clusters as processes of this machine, with Spillway
// installed, and demonstrates it:
//
//	go run ./e2e/playground demo
//
// It needs neither docker nor privileges. When it ends, for whatever reason, no
// process is left.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spillway-dev/spillway/e2e/playground/demo"
	"github.com/spillway-dev/spillway/e2e/playground/scale"
	"github.com/spillway-dev/spillway/e2e/playground/timings"
)

// benches are the names of all benches.
var benches = slices.Concat(scale.Names, timings.Names)

const usage = `usage: go run ./e2e/playground demo
       go run ./e2e/playground skew
       go run ./e2e/playground bench [flags]

demo runs six chapters on four clusters, and exits with 0 only if the outcome of every
chapter was observed. Environment variables:
  DEMO_HOLD=1                               keep everything running at the end
  DEMO_BREAK=broker|provider|scheduler      kill a component, to see the demo fail
  KUBERNETES=1.36, KUBERNETES=1.35,1.37     older versions: of all clusters; of rome, and of the others

skew runs the demo with clusters of different versions, and prints a table of all runs.
bench measures ` + scale.Name + `, or what -name says, and prints its figures; -help lists
the flags.
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// A second signal ends this process at once, and with it all the others.
	context.AfterFunc(ctx, stop)
	err := run(ctx, os.Args[1:])
	switch {
	case err != nil && ctx.Err() != nil:
		fmt.Fprintln(os.Stderr, "\nStopped; nothing is left running.")
		os.Exit(130)
	case err != nil:
		fmt.Fprintln(os.Stderr, "\nplayground:", err)
		os.Exit(1)
	case ctx.Err() != nil:
		fmt.Fprintln(os.Stderr, "\nStopped; nothing is left running.")
	}
}

func run(ctx context.Context, arguments []string) error {
	switch {
	case len(arguments) == 1 && arguments[0] == "demo":
		hold := os.Getenv("DEMO_HOLD")
		if hold != "" && hold != "1" {
			return fmt.Errorf("DEMO_HOLD=%s is not supported: use 1, or leave it empty", hold)
		}
		return demo.Run(ctx, demo.Options{
			Out:   os.Stdout,
			Break: os.Getenv("DEMO_BREAK"),
			Hold:  hold == "1",
		})
	case len(arguments) == 1 && arguments[0] == "skew":
		return demo.Skew(ctx, os.Stdout)
	case len(arguments) > 0 && arguments[0] == "bench":
		return bench(ctx, arguments[1:])
	}
	fmt.Fprint(os.Stderr, usage)
	if len(arguments) == 0 {
		return errors.New("no command given")
	}
	return fmt.Errorf("unknown command %q", strings.Join(arguments, " "))
}

func bench(ctx context.Context, arguments []string) error {
	crowd, timed := scale.Defaults(), timings.Defaults()
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	name := flags.String("name", scale.Name, "Name of the bench: "+strings.Join(benches, ", ")+". With "+scale.NameWithoutPlaceholders+", providers have hold none.")
	flags.IntVar(&crowd.Providers, "providers", crowd.Providers, "Number of providers of "+scale.Name+".")
	flags.IntVar(&crowd.Real, "real", crowd.Real, "Number of providers with a control plane of their own, about 1 GiB each; the others are simulated agents.")
	flags.IntVar(&crowd.Nodes, "nodes", crowd.Nodes, "Number of simulated nodes, in the consumer and the real providers together.")
	flags.IntVar(&crowd.Pods, "pods", crowd.Pods, "Number of pods, created in the consumer at once.")
	flags.DurationVar(&crowd.Deadline, "deadline", crowd.Deadline, "Deadline for all pods of "+scale.Name+" to run.")
	flags.IntVar(&timed.Cold, "cold", timed.Cold, "Number of overflows over a cold peering of "+timings.Cold+", to each provider.")
	flags.IntVar(&timed.Warm, "warm", timed.Warm, "Number of overflows over a warm peering of "+timings.Warm+", to each provider.")
	switch err := flags.Parse(arguments); {
	case errors.Is(err, flag.ErrHelp):
		return nil
	case err != nil:
		return err
	case !slices.Contains(benches, *name):
		return fmt.Errorf("unknown bench %q: use one of %s", *name, strings.Join(benches, ", "))
	}
	start := time.Now()
	log := func(format string, args ...any) {
		fmt.Fprintf(os.Stderr, "%7.1fs  %s\n", time.Since(start).Seconds(), fmt.Sprintf(format, args...))
	}
	if slices.Contains(timings.Names, *name) {
		timed.Out, timed.Log = os.Stdout, log
		return timings.Run(ctx, timed)
	}
	crowd.Name, crowd.Out, crowd.Log = *name, os.Stdout, log
	return scale.Run(ctx, crowd)
}
