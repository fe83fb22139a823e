// Command bench measures the broker: go run ./broker/internal/bench -name=decide_1000.
// The line that counts reads "bench <name> <value> <unit> (aim <aim>)"; other lines
// have details.
package main

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
)

// benches by name.
var benches = map[string]func() error{}

func main() {
	name := flag.String("name", "", "the bench to run")
	flag.Parse()
	run, known := benches[*name]
	if !known {
		fmt.Fprintf(os.Stderr, "unknown bench %q: -name is one of %s\n", *name, strings.Join(slices.Sorted(maps.Keys(benches)), ", "))
		os.Exit(2)
	}
	if err := run(); err != nil {
		fmt.Fprintf(os.Stderr, "bench %s: %v\n", *name, err)
		os.Exit(1)
	}
}

// report prints the line that counts.
func report(name string, value float64, unit, aim string) {
	fmt.Printf("bench %s %.4g %s (aim %s)\n", name, value, unit, aim)
}
