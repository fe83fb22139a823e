package architecture_test

import (
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
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
	var fields []string
	for kind, object := range map[string]any{
		"ClusterAdvertisement": broker.ClusterAdvertisement{}, "Reservation": broker.Reservation{},
		"ReservationInstruction": broker.ReservationInstruction{}, "ProviderInstruction": broker.ProviderInstruction{},
		"OverflowPolicy": broker.OverflowPolicy{}, "BrokerConfig": broker.BrokerConfig{}, "ClusterRegistration": broker.ClusterRegistration{},
	} {
		for _, part := range []string{"Spec", "Status"} {
			field, ok := reflect.TypeOf(object).FieldByName(part)
			if !ok {
				continue
			}
			for i := range field.Type.NumField() {
				name, _, _ := strings.Cut(field.Type.Field(i).Tag.Get("json"), ",")
				fields = append(fields, kind+"."+strings.ToLower(part)+"."+name)
			}
		}
	}
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
