// Command bench measures the agent: go run ./agent/internal/bench -name=measure_1000_nodes.
// It prints details, and then the figures.
package main

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/spillway-dev/spillway/e2e/bench/figures"
)

// lines are the figures. None is counted.
var lines = figures.New(os.Stdout)

// benches by name.
var benches = map[string]func(){
	"measure_1000_nodes": measure,
	"hold_warm_ms":       func() { withProviders(holdWarm) },
	"soak":               func() { withProviders(soak) },
}

func main() {
	name := flag.String("name", "", "the bench to run")
	flag.Parse()
	run, known := benches[*name]
	if !known {
		fmt.Fprintf(os.Stderr, "unknown bench %q: -name is one of %s\n", *name, strings.Join(slices.Sorted(maps.Keys(benches)), ", "))
		os.Exit(2)
	}
	run()
}
