package explain

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"unicode/utf8"
)

// Style is how text is written.
type Style struct {
	// ASCII writes marks that every terminal shows.
	ASCII bool
	// Width at which lines are wrapped; 0 for none.
	Width int
	// Wide lists all details, not only the first.
	Wide bool
}

// detailsShown is how many details of a step are listed unless Style.Wide is set.
const detailsShown = 8

var marks = map[State][2]string{OK: {"✓", "[ok]"}, Failed: {"✗", "[no]"}, Waiting: {"…", "[..]"}, Unknown: {"?", "[?]"}, Skipped: {"-", "[-]"}}

// Mark is the mark of a state, of one width for all.
func (s Style) Mark(state State) string {
	if s.ASCII {
		return fmt.Sprintf("%-4s", marks[state][1])
	}
	return marks[state][0]
}

// Text returns the explanation as lines for people.
func (e *Explanation) Text(style Style) string {
	head := []string{e.Object.String()}
	if e.Workload != "" {
		head = append(head, e.Workload)
	}
	var fixes []Fix
	if e.Fix != nil {
		fixes = []Fix{*e.Fix}
	}
	return Page(style, head, e.Steps, e.Summary, fixes, e.Unreadable)
}

// Script returns the fix so that a shell can run it, with all else as comments.
func (e *Explanation) Script() string {
	if e.Fix == nil {
		return "# Nothing to do: " + e.Summary + "\n"
	}
	lines := []string{"# " + e.Summary, "# " + e.Fix.Message}
	for _, command := range e.Fix.Commands {
		if e.Fix.Manual {
			command = "# " + command
		}
		lines = append(lines, command)
	}
	return strings.Join(lines, "\n") + "\n"
}

// Page returns steps as lines for people, between a head and what they come to.
func Page(style Style, head []string, steps []Step, summary string, fixes []Fix, unreadable []Unreadable) string {
	var b strings.Builder
	for _, line := range head {
		b.WriteString(Wrap(line, "", style.Width))
	}
	b.WriteString("\n")
	for _, step := range steps {
		b.WriteString(hanging(fmt.Sprintf("%s %-13s ", style.Mark(step.State), step.Name), step.Message, style.Width))
		if step.See != "" && (style.Wide || step.State == Failed || step.State == Waiting) {
			b.WriteString("    see " + step.See + "\n")
		}
		shown := step.Details
		if !style.Wide && len(shown) > detailsShown {
			shown = shown[:detailsShown]
		}
		for _, d := range shown {
			words := d.Subject
			if d.Reason != "" {
				words += " " + d.Reason
			}
			if d.Message != "" {
				words += ": " + d.Message
			}
			b.WriteString(hanging("    "+style.Mark(d.State)+" ", words, style.Width))
		}
		if hidden := len(step.Details) - len(shown); hidden > 0 {
			fmt.Fprintf(&b, "      and %d more: -o wide\n", hidden)
		}
	}
	b.WriteString("\n" + Wrap(sentence(summary), "", style.Width))
	for _, fix := range fixes {
		b.WriteString(hanging("Fix: ", fix.Message, style.Width))
		for _, command := range fix.Commands {
			b.WriteString("  " + command + "\n") // whole, to be copied
		}
	}
	b.WriteString(Notes(style, unreadable))
	if style.ASCII {
		return ascii(b.String())
	}
	return b.String()
}

// Notes says what could not be read.
func Notes(style Style, unreadable []Unreadable) string {
	var b strings.Builder
	for _, u := range unreadable {
		if u.Permission != "" {
			b.WriteString(hanging("Note: ", "you may not "+u.Permission+".", style.Width))
		} else {
			b.WriteString(hanging("Note: ", fmt.Sprintf("%s could not be read: %s", u.What, sentence(u.Reason)), style.Width))
		}
	}
	return b.String()
}

// Forbidden says which permissions are missing, and by which commands an administrator gives them; "" if
// none is. Secrets are left out of the commands: they are for administrators.
func Forbidden(unreadable []Unreadable) string {
	resources := map[string][]string{} // by namespace
	first, n := "", 0
	for _, u := range unreadable {
		if u.Permission == "" {
			continue
		}
		if n++; n == 1 {
			first = u.Permission
		}
		if of := resources[u.Namespace]; u.What != "secrets" && !slices.Contains(of, u.What) {
			resources[u.Namespace] = append(of, u.What)
		}
	}
	if n == 0 {
		return ""
	}
	var commands []string
	for _, namespace := range slices.Sorted(maps.Keys(resources)) {
		kind, kubectl := "role", "kubectl -n "+namespace
		if namespace == "" {
			kind, kubectl = "clusterrole", "kubectl"
		}
		commands = append(commands, fmt.Sprintf("%s create %s spillway-reader --verb=get,list,watch --resource=%s", kubectl, kind, strings.Join(resources[namespace], ",")),
			fmt.Sprintf("%s create %sbinding spillway-reader --%s=spillway-reader --user=NAME", kubectl, kind, kind))
	}
	more := ""
	if n > 1 {
		more = fmt.Sprintf(", and %d more", n-1)
	}
	return fmt.Sprintf("you may not %s%s. An administrator permits it by: %s", first, more, strings.Join(commands, "; "))
}

// Columns aligns rows.
func Columns(rows [][]string) string {
	var b strings.Builder
	table := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	for _, row := range rows {
		fmt.Fprintln(table, strings.Join(row, "\t"))
	}
	_ = table.Flush() // a Builder takes all
	return b.String()
}

// sentence ends a message with a full stop.
func sentence(message string) string {
	if message == "" || strings.HasSuffix(message, ".") || strings.HasSuffix(message, "…") {
		return message
	}
	return message + "."
}

// ascii replaces what a terminal without UTF-8 does not show.
func ascii(text string) string {
	return strings.Map(func(r rune) rune {
		if r >= utf8.RuneSelf {
			return '?'
		}
		return r
	}, strings.ReplaceAll(text, "…", "..."))
}

// hanging returns words after a head, with later lines indented below the first word.
func hanging(head, words string, width int) string {
	if words == "" {
		return strings.TrimRight(head, " ") + "\n"
	}
	indent := strings.Repeat(" ", utf8.RuneCountInString(head))
	return head + strings.TrimPrefix(Wrap(words, indent, width), indent)
}

// Wrap returns words as lines of at most width characters where that is possible, each after an indent.
func Wrap(words, indent string, width int) string {
	if width <= 0 {
		return indent + words + "\n"
	}
	width = max(width, utf8.RuneCountInString(indent)+20)
	var b strings.Builder
	line, n := indent, utf8.RuneCountInString(indent)
	empty := true
	for _, word := range strings.Fields(words) {
		size := utf8.RuneCountInString(word)
		if !empty && n+1+size > width {
			b.WriteString(line + "\n")
			line, n, empty = indent, utf8.RuneCountInString(indent), true
		}
		if !empty {
			line, n = line+" ", n+1
		}
		line, n, empty = line+word, n+size, false
	}
	b.WriteString(line + "\n")
	return b.String()
}
