package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spillway-dev/spillway/e2e/lab/binaries"
	"github.com/spillway-dev/spillway/e2e/playground/environment"
)

// Options of Run.
type Options struct {
	// Out receives the output: a live picture if it is a terminal of at least 80
	// columns, plain lines otherwise.
	Out io.Writer
	// Break kills a component before the third chapter, to show that the demo then
	// fails: "broker", "provider" or "scheduler". Empty kills nothing.
	Break string
	// Deadline replaces the deadline of each chapter from the third on, if not 0.
	Deadline time.Duration
	// Hold keeps everything running at the end, also after a failure, until ctx ends.
	Hold bool
	// Minors of Kubernetes in rome and in the other clusters. Default: those of the environment
	// variable KUBERNETES.
	Minors binaries.Minors
	// Playground is one that runs with Members and their nodes, which Run stops at the end.
	// Default: Run starts one.
	Playground *environment.Playground
}

// Members are the demo's clusters beside the hub, with their nodes.
func Members() []environment.Member { return cast.Members }

// Breaks lists the values of Options.Break and their effects.
var Breaks = map[string]string{
	"broker":    "the broker was killed",
	"provider":  "every provider (paris and berlin) was killed",
	"scheduler": "rome's Spillway scheduler was killed",
}

// pollInterval is the pause between two observations.
const pollInterval = 250 * time.Millisecond

// runner is one run of the demo.
type runner struct {
	Options
	p     *environment.Playground
	view  *view
	start time.Time
	// first is the time from the start to the first running overflowed pod.
	first  time.Duration
	last   snapshot
	rows   []row
	warned map[string]bool
}

// row is a line of the table at the end.
type row struct {
	title, what string
	took        time.Duration
	failed      bool
}

// Run starts a playground, runs all chapters on it and stops it. It returns nil
// only if the outcome of every chapter was observed.
func Run(ctx context.Context, o Options) error {
	_, err := run(ctx, o)
	return err
}

// run is Run, and returns what happened.
func run(ctx context.Context, o Options) (t *runner, err error) {
	t = &runner{Options: o, start: time.Now(), warned: map[string]bool{}}
	if _, ok := Breaks[o.Break]; !ok && o.Break != "" {
		return t, fmt.Errorf("DEMO_BREAK=%s is not supported: use broker, provider or scheduler", o.Break)
	}
	if o.Minors == (binaries.Minors{}) {
		if o.Minors, err = binaries.WantedMinors(); err != nil {
			return t, err
		}
	}
	t.view = newView(o.Out, t.start)
	defer t.view.close()
	t.view.print(banner)
	if !o.Minors.Newest() {
		t.view.print(fmt.Sprintf("Kubernetes %s in %s, %s in %s, %s and %s.\n\n", o.Minors.Consumers, home, o.Minors.Others, environment.Hub, first, second))
	}
	if t.p = o.Playground; t.p == nil {
		options := cast
		options.Log, options.Minors = t.view.say, o.Minors
		if t.p, err = environment.Start(ctx, options); err != nil {
			return t, fmt.Errorf("starting the playground: %w", err)
		}
	}
	up := time.Since(t.start)
	defer func() {
		t.view.close()
		if stopErr := t.p.Stop(); stopErr != nil {
			err = errors.Join(err, stopErr)
		}
	}()
	t.rows = append(t.rows, row{title: "Clusters started", what: "4 control planes, a broker, 3 agents", took: up})
	err = t.runChapters(ctx)
	t.view.close()
	t.table()
	if o.Hold && ctx.Err() == nil {
		if err != nil {
			t.view.print("\n" + err.Error() + "\n")
		}
		t.hold(ctx)
	}
	return t, err
}

// runChapters runs all chapters in order.
func (t *runner) runChapters(ctx context.Context) error {
	for i, c := range chapters {
		if i == sabotageBefore {
			t.sabotage()
		}
		began := time.Now()
		t.view.chapter(fmt.Sprintf("%d of %d  %s", i+1, len(chapters), c.title), c.text)
		if t.Deadline > 0 && i >= sabotageBefore {
			c.deadline = t.Deadline
		}
		what, err := t.runChapter(ctx, c)
		r := row{title: fmt.Sprintf("%d %s", i+1, c.title), what: what, took: time.Since(began), failed: err != nil}
		t.rows = append(t.rows, r)
		if ctx.Err() != nil {
			return fmt.Errorf("stopped in chapter %d: %w", i+1, context.Cause(ctx))
		}
		if err != nil {
			return t.explain(i+1, c, err)
		}
		t.view.done(what, r.took)
		t.view.say("  to see it: %s", c.ask)
	}
	return nil
}

// runChapter performs a chapter's action and waits for its outcome.
func (t *runner) runChapter(ctx context.Context, c chapter) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, c.deadline)
	defer cancel()
	if c.do != nil {
		if err := c.do(ctx, t.p); err != nil {
			return "", err
		}
	}
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	missing := errors.New("no observation yet")
	for {
		now, err := observe(ctx, t.p, home, shop)
		switch {
		case err != nil && ctx.Err() == nil:
			missing = err
		case err == nil:
			t.show(now)
			what, notYet := c.check(now)
			if notYet == nil {
				return what, nil
			}
			missing = notYet
		}
		if err := t.p.Err(); err != nil {
			return "", err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return "", fmt.Errorf("timed out after %s: %w", c.deadline, missing)
		}
	}
}

// show displays a snapshot and logs what changed.
func (t *runner) show(now snapshot) {
	if _, away := now.running(web); t.first == 0 && len(away) > 0 {
		t.first = time.Since(t.start)
	}
	for _, line := range changes(t.last, now) {
		t.view.say("%s", line)
	}
	t.last = now
	t.view.snapshot(now)
}

// sabotage kills what Options.Break names.
func (t *runner) sabotage() {
	switch t.Break {
	case "broker":
		t.p.Process(environment.Hub, "spillway-broker").Kill()
	case "provider":
		t.p.Kill(first)
		t.p.Kill(second)
	case "scheduler":
		t.p.Process(home, "spillway-scheduler").Kill()
	default:
		return
	}
	t.view.say("DEMO_BREAK=%s: %s.", t.Break, Breaks[t.Break])
}

// explain builds the error of a failed chapter.
func (t *runner) explain(number int, c chapter, err error) error {
	text := fmt.Sprintf("chapter %d, %q, failed: %v", number, c.title, err)
	if t.Break != "" && number > sabotageBefore {
		text += fmt.Sprintf("\n(DEMO_BREAK=%s: %s, so this failure is expected)", t.Break, Breaks[t.Break])
	}
	return fmt.Errorf("%s\n\nLast log lines (DEMO_HOLD=1 keeps the files):\n%s", text, t.p.Logs(8))
}

// table prints the chapters with their outcomes and durations.
func (t *runner) table() {
	var b strings.Builder
	width := 0
	for _, r := range t.rows {
		width = max(width, len([]rune(r.title)))
	}
	b.WriteString("\n")
	for _, r := range t.rows {
		mark := "✓"
		if r.failed {
			mark = "✗"
			r.what = "failed"
		}
		fmt.Fprintf(&b, "  %s %-*s %7.1fs  %s\n", mark, width, r.title, r.took.Seconds(), r.what)
	}
	if t.first > 0 {
		fmt.Fprintf(&b, "\n  The first pod ran in another cluster %.1fs after the start; the demo took %.1fs.\n", t.first.Seconds(), time.Since(t.start).Seconds())
	}
	t.view.print(b.String())
}

// hold keeps everything running and prints how to access it.
func (t *runner) hold(ctx context.Context) {
	var b strings.Builder
	b.WriteString("\nRunning until Ctrl-C. To explore:\n\n")
	for _, c := range t.p.Clusters() {
		note := ""
		if !slices.Contains(t.last.reachableMembers(), c.Name) && c.Name != environment.Hub {
			note = "   (killed in chapter 5)"
		}
		fmt.Fprintf(&b, "  export KUBECONFIG=%s   # %s%s\n", c.Kubeconfig, c.Name, note)
	}
	fmt.Fprintf(&b, `
With rome's kubeconfig, try:

  kubectl -n %[1]s scale deployment %[2]s --replicas=14     # it overflows again
  kubectl -n %[1]s get pods -o wide
  kubectl get nodes,reservations -A
  kubectl -n %[1]s events | grep Overflow

With bin of "make build" on your PATH, and KUBECONFIG=ROME:HUB of these files:

  kubectl spillway explain -n %[1]s deployment/%[2]s            # why pods are where they are
  kubectl spillway top --context=hub                          # live: who uses whom, and what it costs
  kubectl -n %[1]s get deployment %[2]s -o yaml | kubectl spillway what-if -f - --hub-context=hub
  kubectl spillway reserve warm -n %[1]s --cpu=500m --memory=64Mi   # capacity in advance; release warm ends it
  kubectl spillway drain paris                                # pods leave, and others do not come
  kubectl spillway check                                      # what could stop an overflow here

go run ./e2e/lab program kubectl builds kubectl and prints its path, if you have none.
Logs are beside the kubeconfigs. There are no containers, so there are no
"kubectl logs" and no "kubectl exec".
`, shop, web)
	t.view.print(b.String())
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Second):
			if err := t.p.Err(); err != nil {
				t.view.print(err.Error() + "\n")
				return
			}
		}
	}
}

// reachableMembers lists the members whose API server answers.
func (s snapshot) reachableMembers() []string {
	var all []string
	for name, m := range s.members {
		if m.reachable {
			all = append(all, name)
		}
	}
	return all
}
