// Command bench measures the broker: go run ./broker/internal/bench -name=decide_1000.
// It prints details, and then the figures.
package main

import (
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/spillway-dev/spillway/e2e/bench/figures"
)

// benches by name.
var benches = map[string]func() error{}

// lines are the figures.
var lines = figures.New(os.Stdout)

func main() {
	name := flag.String("name", "", "the bench to run")
	flag.Parse()
	run, known := benches[*name]
	if !known {
		fmt.Fprintf(os.Stderr, "unknown bench %q: -name is one of %s\n", *name, strings.Join(slices.Sorted(maps.Keys(benches)), ", "))
		os.Exit(2)
	}
	// A counted figure above its aim is an error.
	if err := errors.Join(run(), lines.Err()); err != nil {
		fmt.Fprintf(os.Stderr, "bench %s: %v\n", *name, err)
		os.Exit(1)
	}
}
