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
)

const usage = `usage: go run ./e2e/playground demo
       go run ./e2e/playground bench [flags]

demo runs six chapters on four clusters, and exits with 0 only if the outcome of every
chapter was observed. Environment variables:
  DEMO_HOLD=1                               keep everything running at the end
  DEMO_BREAK=broker|provider|scheduler      kill a component, to see the demo fail

bench measures ` + scale.Name + ` and prints its figures; -help lists its flags.
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
	}
}

func run(ctx context.Context, arguments []string) error {
	switch {
	case len(arguments) == 1 && arguments[0] == "demo":
		return demo.Run(ctx, demo.Options{
			Out:   os.Stdout,
			Break: os.Getenv("DEMO_BREAK"),
			Hold:  os.Getenv("DEMO_HOLD") == "1",
		})
	case len(arguments) > 0 && arguments[0] == "bench":
		return bench(ctx, arguments[1:])
	}
	fmt.Fprint(os.Stderr, usage)
	return errors.New("no command given")
}

func bench(ctx context.Context, arguments []string) error {
	o := scale.Defaults()
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.StringVar(&o.Name, "name", o.Name, "Name of the bench: "+strings.Join(scale.Names, ", ")+".")
	flags.IntVar(&o.Providers, "providers", o.Providers, "Number of providers.")
	flags.IntVar(&o.Real, "real", o.Real, "Number of providers with a control plane of their own, about 1 GiB each; the others are simulated agents.")
	flags.IntVar(&o.Nodes, "nodes", o.Nodes, "Number of simulated nodes, in the consumer and the real providers together.")
	flags.IntVar(&o.Pods, "pods", o.Pods, "Number of pods, created in the consumer at once.")
	flags.DurationVar(&o.Deadline, "deadline", o.Deadline, "Deadline for all pods to run.")
	switch err := flags.Parse(arguments); {
	case errors.Is(err, flag.ErrHelp):
		return nil
	case err != nil:
		return err
	case !slices.Contains(scale.Names, o.Name):
		return fmt.Errorf("unknown bench %q: use one of %s", o.Name, strings.Join(scale.Names, ", "))
	}
	start := time.Now()
	o.Out = os.Stdout
	o.Log = func(format string, args ...any) {
		fmt.Fprintf(os.Stderr, "%7.1fs  %s\n", time.Since(start).Seconds(), fmt.Sprintf(format, args...))
	}
	return scale.Run(ctx, o)
}
