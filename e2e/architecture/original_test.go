package architecture_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// kinds are all kinds of the API.
var kinds = map[string]any{
	"ClusterAdvertisement": broker.ClusterAdvertisement{}, "Reservation": broker.Reservation{},
	"ReservationInstruction": broker.ReservationInstruction{}, "ProviderInstruction": broker.ProviderInstruction{},
	"OverflowPolicy": broker.OverflowPolicy{}, "BrokerConfig": broker.BrokerConfig{}, "ClusterRegistration": broker.ClusterRegistration{},
}

// apiFields returns the fields of the spec and status of every kind, as Reservation.spec.duration.
func apiFields() (fields []string) {
	for kind, object := range kinds {
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
	return fields
}

// stated are the kinds of names that broker/ORIGINAL.md has in code spans, by what they look like.
var stated = map[string]*regexp.Regexp{
	"test":     regexp.MustCompile(`^(Test[A-Z]\w*)$`),
	"flag":     regexp.MustCompile(`^--([a-z-]+)(?:=\S*)?$`),
	"endpoint": regexp.MustCompile(`^((?:GET|POST|DELETE) /\S+)$`),
	"field":    regexp.MustCompile(`^([A-Z][A-Za-z]+\.(?:spec|status)\.[A-Za-z]+)$`),
	"metric":   regexp.MustCompile(`^((?:broker|overflow|virtual_node)_[a-z_]+)(?:\{.*\})?$`),
	"target":   regexp.MustCompile(`^make ([a-z0-9-]+)`),
	"value":    regexp.MustCompile(`^((?:tls|config|join|lend|cost|scheduler|metrics|networkPolicy|peering|guests)\.[A-Za-z.]*[A-Za-z]{4,})$`),
}

var (
	codeSpan     = regexp.MustCompile("`([^`]+)`")
	testFunction = regexp.MustCompile(`(?m)^func (Test[A-Z]\w*)\(`)
	makeTarget   = regexp.MustCompile(`(?m)^([a-z0-9-]+):`)
	definedFlag  = regexp.MustCompile(`flags\.\w+\((?:[\w.&*]+, )?"([a-z-]+)"`)
)

func read(t *testing.T, path string) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(projectRoot(t), path))
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}

// paths returns the path of each value, and of each object of values.
func paths(values map[string]any, prefix string) (all []string) {
	for name, value := range values {
		all = append(all, prefix+name)
		if object, ok := value.(map[string]any); ok {
			all = append(all, paths(object, prefix+name+".")...)
		}
	}
	return all
}

// existing returns all names of each kind.
func existing(t *testing.T) map[string][]string {
	all := map[string][]string{"field": apiFields()}
	eachGoFile(t, func(path string, content []byte) {
		from, kind := testFunction, "test"
		if !strings.HasSuffix(path, "_test.go") {
			from, kind = definedFlag, "flag"
			if dir := filepath.Dir(path); dir != "broker" && dir != "agent" {
				return
			}
		}
		for _, match := range from.FindAllStringSubmatch(string(content), -1) {
			all[kind] = append(all[kind], match[1])
		}
	})
	all["flag"] = append(all["flag"], "kubeconfig") // of controller-runtime
	for _, match := range makeTarget.FindAllStringSubmatch(read(t, "Makefile"), -1) {
		all["target"] = append(all["target"], match[1])
	}
	for _, chart := range []string{"agent", "broker"} {
		var values map[string]any
		if err := yaml.Unmarshal([]byte(read(t, "charts/"+chart+"/values.yaml")), &values); err != nil {
			t.Fatal(err)
		}
		all["value"] = append(all["value"], paths(values, "")...)
	}
	var document struct {
		Paths map[string]map[string]json.RawMessage `json:"paths"`
	}
	if err := json.Unmarshal([]byte(read(t, "broker/protocol/openapi.json")), &document); err != nil {
		t.Fatal(err)
	}
	for path, methods := range document.Paths {
		for method := range methods {
			all["endpoint"] = append(all["endpoint"], strings.ToUpper(method)+" "+path)
		}
	}
	for _, title := range []string{"Metrics of the broker", "Metrics of virtual-node", "Metrics of the scheduler plugin"} {
		for _, name := range rows(section(t, title)) {
			name, _, _ = strings.Cut(name, "{")
			all["metric"] = append(all["metric"], name)
		}
	}
	return all
}

// TestOriginal: each row of broker/ORIGINAL.md has a state, what is there has a test, and what a row
// names exists.
func TestOriginal(t *testing.T) {
	all, checked := existing(t), map[string]int{}
	check := func(row, cell string) {
		for _, span := range codeSpan.FindAllStringSubmatch(cell, -1) {
			for kind, looks := range stated {
				match := looks.FindStringSubmatch(span[1])
				if match == nil {
					continue
				}
				if checked[kind]++; !slices.Contains(all[kind], match[1]) {
					t.Errorf("there is no %s %s:\n%s", kind, span[1], row)
				}
			}
		}
	}
	for row := range strings.Lines(read(t, "broker/ORIGINAL.md")) {
		row = strings.TrimSpace(row)
		cells := strings.Split(strings.Trim(row, "|"), "|")
		if !strings.HasPrefix(row, "| ") || cells[0] == " original " {
			continue
		}
		if len(cells) != 3 {
			t.Errorf("not what, here, shown by:\n%s", row)
			continue
		}
		here, shown := strings.TrimSpace(cells[1]), cells[2]
		same, differs, missing := strings.HasPrefix(here, "same"), strings.HasPrefix(here, "differs: "), strings.HasPrefix(here, "missing")
		switch {
		case !same && !differs && !missing:
			t.Errorf("neither same, differs with a reason, nor missing:\n%s", row)
		case !missing && !strings.Contains(shown, "`Test"):
			t.Errorf("no test shows it:\n%s", row)
		}
		if same {
			check(row, cells[0])
		}
		check(row, here)
		check(row, shown)
	}
	for kind, atLeast := range map[string]int{"test": 100, "flag": 15, "endpoint": 5, "field": 20, "metric": 4, "target": 8, "value": 8} {
		if checked[kind] < atLeast {
			t.Errorf("only %d names of a %s were checked", checked[kind], kind)
		}
	}
}
