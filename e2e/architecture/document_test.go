package architecture_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"
)

// section returns the lines of ARCHITECTURE.md below the heading that contains
// title, up to the next heading of the same level.
func section(t *testing.T, title string) []string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(projectRoot(t), "ARCHITECTURE.md"))
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	inside := false
	for line := range strings.Lines(string(content)) {
		if strings.HasPrefix(line, "## ") {
			inside = strings.Contains(line, title)
			continue
		}
		if inside {
			lines = append(lines, strings.TrimRight(line, "\n"))
		}
	}
	if len(lines) == 0 {
		t.Fatalf("ARCHITECTURE.md has no section %q", title)
	}
	return lines
}

var firstCode = regexp.MustCompile("^\\|\\s*`([^`]+)`")

// rows returns the first code span of each table row.
func rows(lines []string) []string {
	var found []string
	for _, line := range lines {
		if match := firstCode.FindStringSubmatch(line); match != nil {
			found = append(found, match[1])
		}
	}
	return found
}

// TestPackageMap: every package has a line in the map, and every line names a
// package or folder that exists.
func TestPackageMap(t *testing.T) {
	root, all := packages(t)
	mapped := rows(section(t, "Packages"))
	for _, p := range all {
		if !slices.Contains(mapped, p.ImportPath) {
			t.Errorf("package %s is missing from the map in ARCHITECTURE.md", p.ImportPath)
		}
	}
	for _, path := range mapped {
		if info, err := os.Stat(filepath.Join(root, path)); err != nil || !info.IsDir() {
			t.Errorf("ARCHITECTURE.md describes %s, which does not exist", path)
		}
	}
}

// TestFieldWriters: the table of writers has a row for each field of the spec and
// status of every kind, and no other.
func TestFieldWriters(t *testing.T) {
	written := rows(section(t, "Who writes which field"))
	fields := apiFields()
	for _, field := range fields {
		if !slices.Contains(written, field) {
			t.Errorf("ARCHITECTURE.md does not say who writes %s", field)
		}
	}
	for _, row := range written {
		if !slices.Contains(fields, row) {
			t.Errorf("ARCHITECTURE.md says who writes %s, which does not exist", row)
		}
	}
}

// documents are those for users, one for each reader.
var documents = []string{"README.md", "charts/README.md", "scheduler-plugin/README.md", "agent/README.md", "broker/README.md", "broker/ORIGINAL.md", "virtual-node/README.md", "e2e/README.md"}

var (
	link    = regexp.MustCompile(`\]\(([^)#\s]*)(#[^)\s]*)?\)`)
	heading = regexp.MustCompile(`(?m)^#+ (.*)$`)
	block   = regexp.MustCompile("(?ms)^```.*?^```$")
	item    = regexp.MustCompile(`(?m)^ *(?:-|[0-9]+\.) (?:.*\n)(?: +\S.*\n)*`)
)

// TestDocuments: links lead somewhere, an item of a list has at most 40 words, and the README, which
// is read first, at most 900.
func TestDocuments(t *testing.T) {
	root := projectRoot(t)
	read := func(path string) string {
		content, err := os.ReadFile(filepath.Join(root, path))
		if err != nil {
			t.Fatal(err)
		}
		return string(content)
	}
	anchors := func(path string) (all []string) {
		for _, match := range heading.FindAllStringSubmatch(block.ReplaceAllString(read(path), ""), -1) {
			kept := strings.Map(func(r rune) rune {
				if r == '-' || r == ' ' || r == '_' || unicode.IsLetter(r) || unicode.IsDigit(r) {
					return unicode.ToLower(r)
				}
				return -1
			}, match[1])
			all = append(all, "#"+strings.ReplaceAll(kept, " ", "-"))
		}
		return all
	}
	if n := len(strings.Fields(read("README.md"))); n > 900 {
		t.Errorf("README.md has %d words, at most 900 are allowed", n)
	}
	for _, path := range append([]string{"ARCHITECTURE.md"}, documents...) {
		text := block.ReplaceAllString(read(path), "")
		for _, match := range link.FindAllStringSubmatch(text, -1) {
			target := path
			if strings.Contains(match[1], "://") {
				continue
			}
			if match[1] != "" {
				target = filepath.Join(filepath.Dir(path), match[1])
			}
			if _, err := os.Stat(filepath.Join(root, target)); err != nil {
				t.Errorf("%s: the link %s leads nowhere", path, match[0])
			} else if match[2] != "" && !slices.Contains(anchors(target), match[2]) {
				t.Errorf("%s: %s has no heading %s", path, target, match[2])
			}
		}
		if path == "ARCHITECTURE.md" {
			continue
		}
		for _, match := range item.FindAllString(text, -1) {
			if n := len(strings.Fields(match)); n > 41 {
				t.Errorf("%s: an item of a list has %d words, at most 40 are allowed: %.60s…", path, n-1, match)
			}
		}
	}
}
