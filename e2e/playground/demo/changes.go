package demo

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spillway-dev/spillway/e2e/playground/environment"
)

// changes describes the differences between two snapshots.
func changes(before, now snapshot) []string {
	var lines []string
	log := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }

	for _, name := range slices.Sorted(maps.Keys(now.members)) {
		was, seen := before.members[name]
		switch is := now.members[name]; {
		case seen && was.reachable && !is.reachable:
			log("%s is unreachable", name)
		case seen && !was.reachable && is.reachable:
			log("%s is reachable again", name)
		}
		if slices.Contains(before.active, name) && !slices.Contains(now.active, name) {
			log("the advertisement of %s is stale; the broker places nothing there", name)
		}
	}
	for _, provider := range slices.Sorted(maps.Keys(now.virtual)) {
		was, seen := before.virtual[provider]
		is := now.virtual[provider]
		name := "virtual node spillway-" + provider
		switch {
		case !seen:
			log("%s appears%s", name, is.carrying(", with "))
		case is.parked && !was.parked:
			log("%s is parked: no capacity of %s is in use", name, provider)
		case !is.parked && (is.cores != was.cores || is.gpus != was.gpus || was.parked):
			log("%s now provides %s", name, is.carrying(""))
		}
		if seen && was.ready && !is.ready {
			log("%s is NotReady: its provider is unreachable", name)
		}
	}
	for _, provider := range slices.Sorted(maps.Keys(before.virtual)) {
		if _, still := now.virtual[provider]; !still {
			log("virtual node spillway-%s is deleted", provider)
		}
	}
	logged := map[string]bool{}
	for _, e := range before.events {
		logged[e.text] = true
	}
	for _, e := range now.events {
		if !logged[e.text] {
			logged[e.text] = true
			log("%s", e.text)
		}
	}
	lines = append(lines, moves(before, now)...)
	if gone := left(before, now); len(gone) > 0 {
		log("removed: %s", strings.Join(gone, ", "))
	}
	return lines
}

// carrying is what a virtual node has, after a word, or nothing.
func (v virtualNode) carrying(after string) string {
	switch {
	case v.parked || v.cores == 0:
		return ""
	case v.gpus > 0:
		return after + plural(v.cores, "core") + " and " + plural(v.gpus, "GPU")
	}
	return after + plural(v.cores, "core")
}

// plural is "1 pod", "2 pods".
func plural(n int64, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// moves describes which pods started, finished or are terminating, and where.
func moves(before, now snapshot) []string {
	was := map[string]pod{}
	for _, p := range before.pods {
		was[string(p.uid)] = p
	}
	type move struct{ what, app, where string }
	count := map[move]int64{}
	for _, p := range now.pods {
		where := "at home"
		if p.away() != "" {
			where = "in " + p.away()
		}
		old := was[string(p.uid)]
		switch {
		case p.runs && !old.runs:
			count[move{"started", p.app, where}]++
		case p.phase == "Succeeded" && old.phase != "Succeeded":
			count[move{"finished", p.app, where}]++
		case p.terminating && !old.terminating && p.node != "":
			count[move{"terminating", p.app, where}]++
		}
	}
	var lines []string
	for p, n := range count {
		lines = append(lines, fmt.Sprintf("%s of %s %s %s", plural(n, "pod"), p.app, p.what, p.where))
	}
	slices.Sort(lines)
	return lines
}

// left lists the objects of before that are gone now, in clusters that are reachable.
func left(before, now snapshot) []string {
	var gone []string
	for _, t := range before.objects {
		unreachable := t.in != environment.Hub && !now.members[t.in].reachable
		if slices.Contains(now.objects, t) || unreachable || t.what == virtualNodeKind || slices.Contains(slices.Collect(maps.Keys(now.ended)), t.name) {
			continue
		}
		line := t.what + " in " + t.in
		if t.in == environment.Hub || t.in == home {
			line = t.what
		}
		if !slices.Contains(gone, line) {
			gone = append(gone, line)
		}
	}
	return gone
}
