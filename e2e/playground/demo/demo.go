package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spillway-dev/spillway/e2e/playground/environment"
)

// Options of the story.
type Options struct {
	// Out is where it is told; live where Out is a terminal of at least 80
	// columns, and in plain lines otherwise.
	Out io.Writer
	// Break sabotages a part before the third chapter, so that it can be seen
	// that the story notices: "broker", "provider" or "scheduler". Nothing where
	// empty.
	Break string
	// Deadline replaces that of each chapter from the sabotage on; their own where
	// 0.
	Deadline time.Duration
	// Hold leaves everything running at the end, a bad one too, until ctx is done.
	Hold bool
	// Dir is where the playground keeps its state; the one for temporary files
	// where empty.
	Dir string
}

// Breaks are what Options.Break may be, and what it does.
var Breaks = map[string]string{
	"broker":    "the broker was killed",
	"provider":  "every provider (paris and berlin) was killed",
	"scheduler": "rome's Spillway scheduler was killed",
}

// lookEvery is how often the API servers are looked at.
const lookEvery = 250 * time.Millisecond

// teller tells one story.
type teller struct {
	Options
	p     *environment.Playground
	view  *view
	start time.Time
	// first is when the first pod ran away from home, since start.
	first  time.Duration
	last   scene
	rows   []row
	warned map[string]bool
}

// row is a line of the table at the end.
type row struct {
	title, what string
	took        time.Duration
	failed      bool
}

// Tell brings a playground up, tells the story on it and takes it down again. It
// returns nil only if every chapter was seen to come true.
func Tell(ctx context.Context, o Options) (err error) {
	if _, ok := Breaks[o.Break]; !ok && o.Break != "" {
		return fmt.Errorf("DEMO_BREAK=%s is not known: it is broker, provider or scheduler", o.Break)
	}
	t := &teller{Options: o, start: time.Now(), warned: map[string]bool{}}
	t.view = newView(o.Out, t.start)
	defer t.view.close()
	t.view.print(banner)
	options := cast
	options.Dir, options.Log = o.Dir, t.view.say
	if t.p, err = environment.Start(ctx, options); err != nil {
		return fmt.Errorf("the playground did not come up: %w", err)
	}
	up := time.Since(t.start)
	defer func() {
		t.view.close()
		if stopErr := t.p.Stop(); stopErr != nil {
			err = errors.Join(err, stopErr)
		}
	}()
	t.rows = append(t.rows, row{title: "Everything is started", what: "4 control planes, a broker, 3 agents", took: up})
	err = t.tell(ctx)
	t.view.close()
	t.table()
	if o.Hold && ctx.Err() == nil {
		if err != nil {
			t.view.print("\n" + err.Error() + "\n")
		}
		t.hold(ctx)
	}
	return err
}

// tell goes from chapter to chapter.
func (t *teller) tell(ctx context.Context) error {
	for i, c := range chapters {
		if i == breakBefore {
			t.sabotage()
		}
		began := time.Now()
		t.view.chapter(fmt.Sprintf("%d of %d  %s", i+1, len(chapters), c.title), c.text)
		if t.Deadline > 0 && i >= breakBefore {
			c.deadline = t.Deadline
		}
		what, err := t.live(ctx, c)
		r := row{title: fmt.Sprintf("%d %s", i+1, c.title), what: what, took: time.Since(began), failed: err != nil}
		t.rows = append(t.rows, r)
		if ctx.Err() != nil {
			return fmt.Errorf("stopped in chapter %d: %w", i+1, context.Cause(ctx))
		}
		if err != nil {
			return t.explain(i+1, c, err)
		}
		t.view.done(what, r.took)
	}
	return nil
}

// live does what a chapter does, and waits until its outcome is seen.
func (t *teller) live(ctx context.Context, c chapter) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, c.deadline)
	defer cancel()
	if c.do != nil {
		if err := c.do(ctx, t.p); err != nil {
			return "", err
		}
	}
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	missing := errors.New("nothing was seen yet")
	for {
		now, err := look(ctx, t.p, home, shop)
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
			return "", fmt.Errorf("not within %s: %w", c.deadline, missing)
		}
	}
}

// show shows a scene, and tells what is new in it.
func (t *teller) show(now scene) {
	if _, away := now.running(web); t.first == 0 && len(away) > 0 {
		t.first = time.Since(t.start)
	}
	for _, line := range news(t.last, now) {
		t.view.say("%s", line)
	}
	t.last = now
	t.view.scene(now)
}

// sabotage does what Options.Break says.
func (t *teller) sabotage() {
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

// explain is the error of a chapter that did not come true.
func (t *teller) explain(number int, c chapter, err error) error {
	text := fmt.Sprintf("chapter %d, %q, did not come true: %v", number, c.title, err)
	if t.Break != "" && number > breakBefore {
		text += fmt.Sprintf("\n(DEMO_BREAK=%s: %s, so this is what should happen)", t.Break, Breaks[t.Break])
	}
	return fmt.Errorf("%s\n\nThe last that the programs wrote:\n%s", text, t.p.Logs(8))
}

// table prints what happened, with times.
func (t *teller) table() {
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
			r.what = "did not come true"
		}
		fmt.Fprintf(&b, "  %s %-*s %7.1fs  %s\n", mark, width, r.title, r.took.Seconds(), r.what)
	}
	if t.first > 0 {
		fmt.Fprintf(&b, "\n  The first pod ran in another cluster %.1fs after the start; everything took %.1fs.\n", t.first.Seconds(), time.Since(t.start).Seconds())
	}
	t.view.print(b.String())
}

// hold leaves everything running and says how to get at it.
func (t *teller) hold(ctx context.Context) {
	var b strings.Builder
	b.WriteString("\nLeft running until Ctrl-C. To look around:\n\n")
	for _, c := range t.p.Clusters() {
		note := ""
		if !slices.Contains(t.last.answering(), c.Name) && c.Name != environment.Hub {
			note = "   (killed in the story)"
		}
		fmt.Fprintf(&b, "  export KUBECONFIG=%s   # %s%s\n", c.Kubeconfig, c.Name, note)
	}
	fmt.Fprintf(&b, `
With rome's, try:

  kubectl -n %[1]s scale deployment %[2]s --replicas=14     # it overflows again
  kubectl -n %[1]s get pods -o wide
  kubectl get nodes,reservations -A
  kubectl -n %[1]s get events | grep Overflow

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

// answering are the members whose API server answers.
func (s scene) answering() []string {
	var all []string
	for name, m := range s.members {
		if m.answers {
			all = append(all, name)
		}
	}
	return all
}
