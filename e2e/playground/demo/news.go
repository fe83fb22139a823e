package demo

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spillway-dev/spillway/e2e/playground/environment"
)

// news says in words what is different between two scenes.
func news(before, now scene) []string {
	var lines []string
	say := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }

	for _, name := range slices.Sorted(maps.Keys(now.members)) {
		was, seen := before.members[name]
		switch is := now.members[name]; {
		case seen && was.answers && !is.answers:
			say("%s does not answer any more", name)
		case seen && !was.answers && is.answers:
			say("%s answers again", name)
		}
		if slices.Contains(before.counted, name) && !slices.Contains(now.counted, name) {
			say("the broker has not heard from %s for a while, and does not count on it any more", name)
		}
	}
	for _, provider := range slices.Sorted(maps.Keys(now.virtual)) {
		was, seen := before.virtual[provider]
		is := now.virtual[provider]
		name := "virtual node spillway-" + provider
		switch {
		case !seen:
			say("%s appears%s", name, is.carrying(", with "))
		case is.parked && !was.parked:
			say("%s is parked: nothing is needed from %s", name, provider)
		case !is.parked && (is.cores != was.cores || is.gpus != was.gpus || was.parked):
			say("%s now carries %s", name, is.carrying(""))
		}
		if seen && was.ready && !is.ready {
			say("%s is lost: its provider does not answer", name)
		}
	}
	for _, provider := range slices.Sorted(maps.Keys(before.virtual)) {
		if _, still := now.virtual[provider]; !still {
			say("virtual node spillway-%s is gone", provider)
		}
	}
	told := map[string]bool{}
	for _, e := range before.news {
		told[e.text] = true
	}
	for _, e := range now.news {
		if !told[e.text] {
			told[e.text] = true
			say("%s", e.text)
		}
	}
	lines = append(lines, moves(before, now)...)
	if gone := left(before, now); len(gone) > 0 {
		say("removed: %s", strings.Join(gone, ", "))
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

// moves says which pods have begun to run where, and which are to end where.
func moves(before, now scene) []string {
	was := map[string]pod{}
	for _, p := range before.pods {
		was[string(p.uid)] = p
	}
	type place struct{ what, app, where string }
	count := map[place]int64{}
	for _, p := range now.pods {
		where := "at home"
		if p.away() != "" {
			where = "in " + p.away()
		}
		old := was[string(p.uid)]
		switch {
		case p.runs && !old.runs:
			count[place{"began to run", p.app, where}]++
		case p.phase == "Succeeded" && old.phase != "Succeeded":
			count[place{"finished", p.app, where}]++
		case p.leaving && !old.leaving && p.node != "":
			count[place{"told to end", p.app, where}]++
		}
	}
	var lines []string
	for p, n := range count {
		lines = append(lines, fmt.Sprintf("%s of %s %s %s", plural(n, "pod"), p.app, p.what, p.where))
	}
	slices.Sort(lines)
	return lines
}

// left are the things of before that are not there now, as far as the cluster
// they were in can be asked.
func left(before, now scene) []string {
	var gone []string
	for _, t := range before.setUp {
		dead := t.in != environment.Hub && !now.members[t.in].answers
		if slices.Contains(now.setUp, t) || dead || t.what == virtualThing || slices.Contains(slices.Collect(maps.Keys(now.over)), t.name) {
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
