package demo

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spillway-dev/spillway/e2e/lab/binaries"
)

// pairs are the minors that Skew runs the demo with: the oldest overflows to the newest and the
// newest to the oldest, and each between them runs everywhere.
func pairs() []binaries.Minors {
	all := binaries.Supported()
	oldest, newest := all[0], all[len(all)-1]
	list := []binaries.Minors{{Consumers: oldest, Others: newest}, {Consumers: newest, Others: oldest}}
	for _, minor := range all[1 : len(all)-1] {
		list = append(list, binaries.Minors{Consumers: minor, Others: minor})
	}
	return list
}

// Skew runs the demo with clusters of different minors of Kubernetes, and prints a table of all
// runs. It returns nil only if the outcome of every chapter of each was observed.
func Skew(ctx context.Context, out io.Writer) error {
	var b strings.Builder
	b.WriteString("\nKubernetes of rome and of the other clusters, and what every chapter took:\n\n  rome  others  start ")
	for i := range chapters {
		fmt.Fprintf(&b, "%9d", i+1)
	}
	b.WriteString("    total\n")
	failed := 0
	for _, pair := range pairs() {
		start := time.Now()
		t, err := run(ctx, Options{Out: out, Minors: pair})
		if ctx.Err() != nil {
			return err
		}
		if err != nil {
			failed++
			fmt.Fprintf(out, "\nKubernetes %s in rome, %s in the other clusters: %v\n", pair.Consumers, pair.Others, err)
		}
		b.WriteString(skewLine(pair, t.rows, time.Since(start), err))
	}
	fmt.Fprint(out, b.String())
	if failed > 0 {
		return fmt.Errorf("%d of %d runs of the demo failed", failed, len(pairs()))
	}
	return nil
}

// skewLine is the line of a run in the table: what ran, and whether all of it has passed.
func skewLine(pair binaries.Minors, rows []row, took time.Duration, err error) string {
	var b strings.Builder
	fmt.Fprintf(&b, "  %-5s %-6s", pair.Consumers, pair.Others)
	for i := range len(chapters) + 1 {
		if i >= len(rows) {
			fmt.Fprintf(&b, "%9s", "-")
			continue
		}
		mark := "✓"
		if rows[i].failed {
			mark = "✗"
		}
		fmt.Fprintf(&b, " %s%6.1fs", mark, rows[i].took.Seconds())
	}
	outcome := "passed"
	if err != nil {
		outcome = "failed"
	}
	fmt.Fprintf(&b, " %7.1fs  %s\n", took.Seconds(), outcome)
	return b.String()
}
