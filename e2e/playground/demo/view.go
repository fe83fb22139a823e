package demo

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/term"
)

// banner says what is real and what is simulated.
const banner = `
Spillway: pods that do not fit in their cluster run in another, without operator action.

Real here: four Kubernetes API servers with their etcd, controller managers,
schedulers and certificates; Spillway's broker, agents, scheduler and virtual
node, installed from its charts, with their RBAC and policies.
Simulated: nodes, containers and networks. Pods "run" without a process, so there
are no logs and no exec.
Shortened: an advertisement is stale after 15 s instead of 10 min, capacity is
released after 3 s, an idle peering after 10 s, and pods leave a lost node after 2 s.

`

// view displays the demo: a picture at the bottom of a terminal below scrolling
// lines, or the lines alone.
type view struct {
	out   io.Writer
	start time.Time
	live  bool
	width int

	mu      sync.Mutex
	height  int // of the picture that stands now
	heading string
	now     *snapshot
	closed  chan struct{}
	ticking sync.WaitGroup
	once    sync.Once
	// plainLast is the last line of capacities in plain mode.
	plainLast string
}

// leastWidth is that of a terminal on which the picture fits.
const leastWidth = 80

func newView(out io.Writer, start time.Time) *view {
	v := &view{out: out, start: start, closed: make(chan struct{})}
	if f, ok := out.(*os.File); ok && os.Getenv("TERM") != "dumb" && term.IsTerminal(int(f.Fd())) {
		width, height, err := term.GetSize(int(f.Fd()))
		v.live, v.width = err == nil && width >= leastWidth && height >= 20, width
	}
	if v.live {
		v.ticking.Go(v.tick)
	}
	return v
}

// tick keeps the clock going.
func (v *view) tick() {
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			v.mu.Lock()
			v.redraw("")
			v.mu.Unlock()
		case <-v.closed:
			return
		}
	}
}

// close removes the picture.
func (v *view) close() {
	v.once.Do(func() {
		close(v.closed)
		v.ticking.Wait()
		v.mu.Lock()
		defer v.mu.Unlock()
		v.now, v.heading = nil, ""
		v.redraw("")
	})
}

// print prints text as it is.
func (v *view) print(text string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.redraw(text)
}

// say prints a line with the time since the start.
func (v *view) say(format string, args ...any) {
	v.print(fmt.Sprintf("%s  %s\n", v.clock(), fmt.Sprintf(format, args...)))
}

// chapter starts a chapter.
func (v *view) chapter(title, text string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.heading = "Chapter " + title
	v.redraw(fmt.Sprintf("\n%s\n%s\n%s\n\n", v.bold(v.heading), strings.Repeat("─", len([]rune(v.heading))), text))
}

// done ends a chapter.
func (v *view) done(what string, took time.Duration) {
	v.say("%s %s (%.1fs)", v.bold("✓ Done:"), what, took.Seconds())
}

// snapshot displays one.
func (v *view) snapshot(s snapshot) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.now = &s
	if v.live {
		v.redraw("")
		return
	}
	// Plain lines: only what is different from the line before.
	var parts []string
	for _, m := range cast.Members {
		parts = append(parts, m.Name+" "+s.members[m.Name].figures())
	}
	if line := strings.Join(parts, "   "); line != v.plainLast {
		v.plainLast = line
		fmt.Fprintf(v.out, "%s  [%s]\n", v.clock(), line)
	}
}

// redraw prints text above the picture. The caller holds the lock.
func (v *view) redraw(text string) {
	if !v.live {
		io.WriteString(v.out, text)
		return
	}
	var b strings.Builder
	if v.height > 0 {
		fmt.Fprintf(&b, "\x1b[%dA", v.height)
	}
	b.WriteString("\r\x1b[J") // from here to the end of the screen
	b.WriteString(text)
	picture := v.picture()
	for _, line := range picture {
		b.WriteString(line + "\n")
	}
	v.height = len(picture)
	io.WriteString(v.out, b.String())
}

// picture is the clusters as bars, and the pods as dots.
func (v *view) picture() []string {
	if v.now == nil {
		return nil
	}
	lines := []string{"", fmt.Sprintf("  %s   %s", v.bold(v.heading), v.clock())}
	for _, m := range cast.Members {
		lines = append(lines, fmt.Sprintf("  %-7s %s  %-28s %s", m.Name, v.bar(v.now.members[m.Name]), v.now.members[m.Name].figures(), v.dots(m.Name)))
	}
	waiting := 0
	for _, p := range v.now.pods {
		if p.node == "" && !p.terminating {
			waiting++
		}
	}
	return append(lines, fmt.Sprintf("  %-7s %s", "waiting", strings.Repeat("○", waiting)))
}

// bar is a member's cores: its own pods', its guests', free ones.
func (v *view) bar(m member) string {
	const each = 1
	cores := max(0, m.cores-m.own-m.guests)
	bar := strings.Repeat("█", int(m.own*each)) + strings.Repeat("▒", int(m.guests*each)) + strings.Repeat("·", int(cores*each))
	if !m.reachable {
		bar = "†"
	}
	return bar + strings.Repeat(" ", max(0, 12-len([]rune(bar))))
}

// figures are a member's cores and GPUs in words.
func (m member) figures() string {
	if !m.reachable {
		return "unreachable"
	}
	text := fmt.Sprintf("%d/%d cores", m.own+m.guests, m.cores)
	if m.guests > 0 {
		text += fmt.Sprintf(" (%d for guests)", m.guests)
	}
	if m.gpus > 0 {
		text += fmt.Sprintf(" %d/%d GPUs", m.usedGPUs, m.gpus)
	}
	return text
}

// dots are the demo's pods in a cluster as home shows them: ● runs, ◌ starts, × is
// terminating.
func (v *view) dots(cluster string) string {
	var dots []string
	for _, p := range v.now.pods {
		where := p.away()
		if where == "" && p.node != "" {
			where = home
		}
		switch {
		case where != cluster || p.phase == "Succeeded":
		case p.terminating:
			dots = append(dots, "×")
		case p.runs:
			dots = append(dots, "●")
		default:
			dots = append(dots, "◌")
		}
	}
	slices.SortFunc(dots, func(a, b string) int { return strings.Compare("●◌×", "●◌×") })
	return strings.Join(dots, "")
}

func (v *view) bold(text string) string {
	if !v.live {
		return text
	}
	return "\x1b[1m" + text + "\x1b[0m"
}

func (v *view) clock() string { return fmt.Sprintf("%6.1fs", time.Since(v.start).Seconds()) }
