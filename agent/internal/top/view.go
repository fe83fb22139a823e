package top

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/spillway-dev/spillway/agent/internal/explain"
	"github.com/spillway-dev/spillway/agent/internal/health"
)

// View returns the board as lines within a size, of which 0 is unlimited. The sections share the
// lines: what has no room is counted.
func (b *Board) View(width, height int, style explain.Style) string {
	head := cmp.Or(b.Cluster, "this cluster") + "  " + b.At.UTC().Format("15:04:05 UTC")
	if b.PricePerHour != "" {
		head += "  " + b.PricePerHour
	}
	lines := []string{head}
	if b.Problem != "" {
		lines = append(lines, "not up to date: "+b.Problem)
	}
	for _, u := range b.Unreadable {
		if u.Permission != "" {
			lines = append(lines, "you may not "+u.Permission)
		}
	}
	clusters := [][]string{{"CLUSTER", "STATE", "CAPACITY", "LENT", "USED", "FREE", "PRICE"}}
	for _, c := range b.Clusters {
		clusters = append(clusters, []string{c.Name, c.State, health.Amount(c.Capacity, false), health.Amount(c.Lent, false), health.Amount(c.Used, false), health.Amount(c.Free, false), cmp.Or(c.Price, "-")})
	}
	flows := [][]string{{"FROM", "TO", "PODS", "GRANTED", "RESERVATIONS", "PRICE"}}
	for i := range b.Flows {
		f := &b.Flows[i]
		flows = append(flows, []string{f.From, f.To, fmt.Sprint(f.Pods), health.Amount(&f.Resources, false), fmt.Sprint(f.Reservations), cmp.Or(f.PricePerHour, "-")})
	}
	queue := [][]string{{"QUEUE", "WANTED", "RESERVATION", "FOR"}}
	for _, q := range b.Queue {
		queue = append(queue, []string{fmt.Sprint(q.Position), cmp.Or(q.Wanted, "-"), q.Name, age(b.At, q.Since)})
	}
	sum := fmt.Sprintf("%d Reservations placed, %d waiting, %d failed", b.Placed, b.Waiting, b.Failed)
	sections := [][][]string{clusters, flows, queue}
	rooms := share(height-len(lines)-len(sections)-1, len(clusters)-1, len(flows)-1, b.Waiting)
	for i, table := range sections {
		hidden := []int{len(clusters) - 1, len(flows) - 1, b.Waiting}[i]
		if hidden == 0 {
			continue
		}
		if height > 0 && hidden > rooms[i] {
			table = table[:min(len(table), 1+max(0, rooms[i]-1))]
		}
		lines = append(lines, fit(table, width, i)...)
		if hidden -= len(table) - 1; hidden > 0 {
			lines = append(lines, fmt.Sprintf("and %d more", hidden))
		}
	}
	lines = append(lines, sum)
	if height > 0 && len(lines) > height {
		lines = lines[:height]
	}
	for i, line := range lines {
		lines[i] = cut(line, width, style)
	}
	return strings.Join(lines, "\n")
}

// share divides lines among sections: each gets what it needs, or an equal part of what others leave.
func share(lines int, needs ...int) []int {
	rooms, order := make([]int, len(needs)), []int{0, 1, 2}
	slices.SortStableFunc(order, func(x, y int) int { return needs[x] - needs[y] })
	for at, i := range order {
		rooms[i] = max(0, min(needs[i], lines/(len(order)-at)))
		lines -= rooms[i]
	}
	return rooms
}

// spare are the columns of each section that are left out first where the terminal is narrow.
var spare = [][]string{{"FREE", "CAPACITY", "STATE"}, {"RESERVATIONS", "GRANTED"}, {"WANTED"}}

// fit aligns a table within a width.
func fit(table [][]string, width, section int) []string {
	out := strings.Split(strings.TrimRight(explain.Columns(table), "\n"), "\n")
	for _, name := range spare[section] {
		if width <= 0 || !slices.ContainsFunc(out, func(line string) bool { return utf8.RuneCountInString(line) > width }) {
			break
		}
		at := slices.Index(table[0], name)
		narrow := make([][]string, len(table))
		for i, row := range table {
			narrow[i] = slices.Delete(slices.Clone(row), at, at+1)
		}
		table, out = narrow, strings.Split(strings.TrimRight(explain.Columns(narrow), "\n"), "\n")
	}
	for i := range out {
		out[i] = strings.TrimRight(out[i], " ")
	}
	return out
}

// cut shortens a line to a width.
func cut(line string, width int, style explain.Style) string {
	mark := "…"
	if style.ASCII {
		mark = "~"
		line = strings.Map(func(r rune) rune {
			if r >= utf8.RuneSelf {
				return '?'
			}
			return r
		}, line)
	}
	if width <= 0 || utf8.RuneCountInString(line) <= width {
		return line
	}
	return string([]rune(line)[:width-1]) + mark
}

func age(now, since time.Time) string { return duration.HumanDuration(max(now.Sub(since), 0)) }
