package charts_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/e2e/lab/binaries"
	"github.com/spillway-dev/spillway/scheduler-plugin/compatibility"
)

// valuesOf returns the values of a chart's values.yaml.
func valuesOf(t *testing.T, chart string) (values map[string]any) {
	t.Helper()
	text, err := os.ReadFile(chart + "/values.yaml")
	expect.NoError(t, err)
	expect.NoError(t, yaml.UnmarshalStrict(text, &values))
	return values
}

// lookUp returns the value at a path such as a.b; the * of a.* stands for all values of a.
// The keys of objects that are empty by default are the user's.
func lookUp(values map[string]any, path string) (value any, ok bool) {
	value = values
	for name := range strings.SplitSeq(strings.TrimSuffix(path, ".*"), ".") {
		object, isObject := value.(map[string]any)
		if !isObject {
			return nil, false
		}
		if value, ok = object[name]; !ok {
			return nil, len(object) == 0
		}
	}
	return value, true
}

var (
	valuesTable = regexp.MustCompile(`(?ms)^\| (agent|broker) \| default \| \|$(.*?)^$`)
	quoted      = regexp.MustCompile("`([^`]+)`")
	valueSet    = regexp.MustCompile(`--set '?([A-Za-z]+(?:\.[A-Za-z]+)*)=`)
	valueName   = regexp.MustCompile(`^([A-Za-z]+(?:\.[A-Za-z]+)+)(?:=.*)?$`)
	programFlag = regexp.MustCompile("flag `--([a-z-]+)` of\\s+spillway-([a-z-]+)")
	makeTarget  = regexp.MustCompile("(?m)(?:^|`)(?:[A-Z]+=\\S+ )*make((?: [a-z][a-z0-9-]+)+)")
	benchName   = regexp.MustCompile(`NAME=([a-z0-9_]+)`)
)

// readmes are the documents for users.
var readmes = []string{"README.md", "charts/README.md", "scheduler-plugin/README.md", "agent/README.md", "broker/README.md", "virtual-node/README.md", "e2e/README.md"}

// TestReadme: the values, defaults, flags, targets and benches that these name exist.
func TestReadme(t *testing.T) {
	root, err := binaries.Root()
	expect.NoError(t, err)
	read := func(path string) string {
		text, err := os.ReadFile(filepath.Join(root, path))
		expect.NoError(t, err)
		return string(text)
	}
	var text string
	for _, path := range readmes {
		text += read(path) + "\n\n"
	}
	charts := map[string]map[string]any{"agent": valuesOf(t, "agent"), "broker": valuesOf(t, "broker")}
	exists := func(path string) bool {
		for _, values := range charts {
			if _, ok := lookUp(values, path); ok {
				return true
			}
		}
		return false
	}
	tables := valuesTable.FindAllStringSubmatch(text, -1)
	if len(tables) != len(charts) {
		t.Fatalf("there are %d tables of values", len(tables))
	}
	for _, table := range tables {
		for row := range strings.SplitSeq(strings.TrimSpace(table[2]), "\n") {
			if !strings.HasPrefix(row, "|---") {
				checkRow(t, charts[table[1]], row)
			}
		}
	}
	for _, match := range valueSet.FindAllStringSubmatch(text, -1) {
		if !exists(match[1]) {
			t.Errorf("--set %s: no chart has this value", match[1])
		}
	}
	for _, match := range quoted.FindAllStringSubmatch(text, -1) {
		name := valueName.FindStringSubmatch(match[1])
		if name == nil {
			continue
		}
		first, _, _ := strings.Cut(name[1], ".")
		if known := exists(first); known && !exists(name[1]) {
			t.Errorf("%s: no chart has this value", name[1])
		}
	}
	for _, match := range programFlag.FindAllStringSubmatch(text, -1) {
		if !slices.Contains(flagsIn(t, filepath.Join(root, source[match[2]])), match[1]) {
			t.Errorf("spillway-%s has no flag --%s", match[2], match[1])
		}
	}
	makefile, benches := read("Makefile"), read("e2e/bench/main.go")
	for _, match := range makeTarget.FindAllStringSubmatch(text, -1) {
		for target := range strings.FieldsSeq(match[1]) {
			if !strings.Contains(makefile, "\n"+target+":") {
				t.Errorf("the Makefile has no target %s", target)
			}
		}
	}
	for _, match := range benchName.FindAllStringSubmatch(text, -1) {
		if !strings.Contains(benches, `"`+match[1]+`"`) {
			t.Errorf("there is no bench %s", match[1])
		}
	}
}

// checkRow compares a row of values with the chart: those that it names exist, and have the
// defaults that it quotes, unless the chart leaves the default to the program.
func checkRow(t *testing.T, values map[string]any, row string) {
	t.Helper()
	cells := strings.Split(strings.Trim(row, "| "), " | ")
	defaults := strings.Split(cells[1], ", ")
	names := quoted.FindAllStringSubmatch(cells[0], -1)
	for i, name := range names {
		value, ok := lookUp(values, name[1])
		if !ok {
			t.Errorf("the chart has no value %s", name[1])
			continue
		}
		if len(defaults) != len(names) {
			continue
		}
		stated := quoted.FindStringSubmatch(defaults[i])
		if have := fmt.Sprint(value); stated != nil && value != nil && have != "" && have != stated[1] {
			t.Errorf("the default of %s is %s, not %s", name[1], have, stated[1])
		}
	}
}

// TestReadmeVersions: the table of versions is that of the programs and charts.
func TestReadmeVersions(t *testing.T) {
	root, err := binaries.Root()
	expect.NoError(t, err)
	text, err := os.ReadFile(filepath.Join(root, "charts/README.md"))
	expect.NoError(t, err)
	hub := []string{oldestHub(t)}
	lines := []string{"| cluster |", "|---|", "| consumer or provider (chart agent) |", "| only the hub (chart broker) |", "| tested by |"}
	add := func(cells ...string) {
		for i, cell := range cells {
			lines[i] += cell
		}
	}
	if last := (compatibility.Oldest - 1).String(); last != hub[0] {
		hub = append(hub, last)
	}
	add(" "+strings.Join(hub, " to ")+" |", "---|", " refused |", " supported |", " – |")
	for minor := compatibility.Oldest; minor <= compatibility.Newest; minor++ {
		tests := " `make skew` |"
		if minor == compatibility.Newest {
			tests = " `make skew`, `make test`, `make e2e` |"
		}
		add(" "+minor.String()+" |", "---|", " supported |", " supported |", tests)
	}
	if want := strings.Join(lines, "\n") + "\n"; !strings.Contains(string(text), "\n\n"+want) {
		t.Errorf("charts/README.md lacks this table of versions:\n%s", want)
	}
}
