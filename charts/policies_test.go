package charts_test

import (
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"

	"github.com/spillway-dev/spillway/e2e/expect"
)

//go:generate go test . -run TestPolicyTable -update

var update = flag.Bool("update", false, "write the table of policies in agent/README.md")

const (
	maxPolicies = 16
	maxCELLines = 25
	celLine     = 160 // characters

	// Annotations of each policy, for the table.
	bindsKey = "broker.fluidos.eu/binds"
	stopsKey = "broker.fluidos.eu/stops"

	policiesKind = "ValidatingAdmissionPolicy"
	hardening    = "hardening"
	// copiedRules is the match condition that spillway-agent.violates makes.
	copiedRules = "violates-a-rule"
)

// policyValues are those with which policies differ, by driver.
func policyValues() map[string][][]string {
	all := map[string][][]string{}
	for driver, most := range map[string][]string{"liqo": everything["agent"], "direct": withDirect} {
		for _, values := range [][]string{nil, {"scheduler.mode=none"}, {"guests.podSecurity=baseline"}, {"lend.enabled=false"}, most} {
			all[driver] = append(all[driver], slices.Concat(needed, []string{"driver=" + driver}, values))
		}
	}
	return all
}

// renderPolicies returns the policies that the agent's chart renders, and the folder of each.
func renderPolicies(t *testing.T, values ...string) (policies []admissionv1.ValidatingAdmissionPolicy, folders map[string]string) {
	t.Helper()
	text, err := template(t, "agent", values)
	expect.NoError(t, err)
	folders = map[string]string{}
	for document := range strings.SplitSeq("\n"+text, "\n---") {
		if !strings.Contains(document, "\nkind: "+policiesKind+"\n") {
			continue
		}
		object := decode(t, "agent", document)
		policies = append(policies, only[admissionv1.ValidatingAdmissionPolicy](t, object, policiesKind)...)
		folders[object[0].GetName()] = filepath.Base(filepath.Dir(sourceOf.FindStringSubmatch(document)[1]))
	}
	return policies, folders
}

var sourceOf = regexp.MustCompile(`(?m)^# Source: (\S+)$`)

// bindsOwnPrograms reports whether a policy applies only to accounts of Spillway's own programs.
func bindsOwnPrograms(policy admissionv1.ValidatingAdmissionPolicy) bool {
	const account = "'system:serviceaccount:" + namespace + ":spillway-"
	return slices.ContainsFunc(policy.Spec.MatchConditions, func(c admissionv1.MatchCondition) bool {
		who := strings.TrimLeft(c.Expression, "(")
		return strings.HasPrefix(who, "request.userInfo.username == "+account) || strings.HasPrefix(who, "request.userInfo.username in ["+account)
	})
}

// celLines is how many lines of CEL a reader of a policy reads: match conditions, variables and
// validations. The match condition that copies these is checked to be a copy.
func celLines(t *testing.T, policy admissionv1.ValidatingAdmissionPolicy) (lines int) {
	t.Helper()
	spaces := regexp.MustCompile(`\s+`)
	count := func(expression string) {
		lines += (len(spaces.ReplaceAllString(strings.TrimSpace(expression), " ")) + celLine - 1) / celLine
	}
	var rules []string
	for _, v := range policy.Spec.Validations {
		count(v.Expression)
		rules = append(rules, "("+v.Expression+")")
	}
	text := strings.Join(rules, " && ")
	for _, v := range slices.Backward(policy.Spec.Variables) {
		count(v.Expression)
		text = strings.ReplaceAll(text, "variables."+v.Name, "("+v.Expression+")")
	}
	for _, c := range policy.Spec.MatchConditions {
		if c.Name != copiedRules {
			count(c.Expression)
		} else if !strings.HasSuffix(c.Expression, "!("+text+")") {
			t.Errorf("policy %s: match condition %s is no copy of the validations", policy.Name, c.Name)
		}
	}
	return lines
}

// TestPoliciesCanBeReviewed: the policies are few and short, and those that bind only Spillway's own
// programs are in a folder of their own, and switched off by one value.
func TestPoliciesCanBeReviewed(t *testing.T) {
	for driver, variants := range policyValues() {
		for _, values := range variants {
			policies, folders := renderPolicies(t, values...)
			if len(policies) > maxPolicies {
				t.Errorf("driver %s renders %d policies with %v, at most %d are allowed", driver, len(policies), values, maxPolicies)
			}
			var others []string
			for _, policy := range policies {
				if lines := celLines(t, policy); lines > maxCELLines {
					t.Errorf("driver %s: policy %s has %d lines of CEL, at most %d are allowed", driver, policy.Name, lines, maxCELLines)
				}
				own := bindsOwnPrograms(policy)
				if own != (folders[policy.Name] == hardening) {
					t.Errorf("driver %s: policy %s is in folder %s, and binds only Spillway's own programs: %t", driver, policy.Name, folders[policy.Name], own)
				}
				if !own {
					others = append(others, policy.Name)
				}
			}
			var remaining []string
			without, _ := renderPolicies(t, append(values, "hardening.enabled=false")...)
			for _, policy := range without {
				remaining = append(remaining, policy.Name)
			}
			slices.Sort(others)
			slices.Sort(remaining)
			if !slices.Equal(others, remaining) {
				t.Errorf("driver %s: without hardening there are %v, want %v", driver, remaining, others)
			}
		}
	}
}

// attackTests are the tests that show what a policy stops, by policy: runAttacks fails if an attack
// is not refused, if it is without its guards, and for a guard that refuses none.
func attackTests(t *testing.T) map[string][]string {
	t.Helper()
	tests := map[string][]string{}
	paths, err := filepath.Glob("*_test.go")
	expect.NoError(t, err)
	for _, path := range paths {
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		expect.NoError(t, err)
		for _, declaration := range file.Decls {
			function, ok := declaration.(*ast.FuncDecl)
			if !ok || !strings.HasPrefix(function.Name.Name, "Test") {
				continue
			}
			runs, named := false, map[string]bool{}
			ast.Inspect(function, func(node ast.Node) bool {
				switch n := node.(type) {
				case *ast.Ident:
					runs = runs || n.Name == "runAttacks"
				case *ast.BasicLit:
					if name, err := strconv.Unquote(n.Value); n.Kind == token.STRING && err == nil {
						named[name] = true
					}
				}
				return true
			})
			for name := range named {
				if runs {
					tests[name] = append(tests[name], function.Name.Name)
				}
			}
		}
	}
	return tests
}

// policyTable is the table of policies in agent/README.md.
func policyTable(t *testing.T) string {
	t.Helper()
	type row struct {
		folders      []string
		binds, stops string
	}
	rows, tests := map[string]row{}, attackTests(t)
	for _, driver := range []string{"liqo", "direct"} {
		policies, folders := renderPolicies(t, slices.Concat(needed, []string{"driver=" + driver})...)
		for _, policy := range policies {
			before, known := rows[policy.Name]
			r := row{before.folders, policy.Annotations[bindsKey], policy.Annotations[stopsKey]}
			if folder := folders[policy.Name]; !slices.Contains(r.folders, folder) {
				r.folders = append(slices.Clone(r.folders), folder)
			}
			switch {
			case r.binds == "" || r.stops == "":
				t.Errorf("policy %s lacks annotation %s or %s", policy.Name, bindsKey, stopsKey)
			case known && (before.binds != r.binds || before.stops != r.stops):
				t.Errorf("policy %s has other annotations with driver %s", policy.Name, driver)
			case len(tests[policy.Name]) == 0:
				t.Errorf("no attack test has policy %s as a guard", policy.Name)
			}
			rows[policy.Name] = r
		}
	}
	order := []string{"consumer", "provider", "liqo", "direct", hardening}
	names := slices.SortedFunc(maps.Keys(rows), func(a, b string) int {
		if by := slices.Index(order, rows[a].folders[0]) - slices.Index(order, rows[b].folders[0]); by != 0 {
			return by
		}
		return strings.Compare(a, b)
	})
	var text strings.Builder
	text.WriteString("| policy | folder | binds | stops | shown by |\n|---|---|---|---|---|\n")
	for _, name := range names {
		r, shown := rows[name], slices.Sorted(slices.Values(tests[name]))
		fmt.Fprintf(&text, "| `%s` | %s | %s | %s | `%s` |\n", name, strings.Join(r.folders, ", "), r.binds, r.stops, strings.Join(shown, "`, `"))
	}
	return text.String()
}

var policyRows = regexp.MustCompile(`(?m)^\| policy \| folder .*\n(?:\|.*\n)+`)

// TestPolicyTable compares the table of policies in agent/README.md with the chart.
func TestPolicyTable(t *testing.T) {
	const path = "../agent/README.md"
	want := policyTable(t)
	text, err := os.ReadFile(path)
	expect.NoError(t, err)
	have := policyRows.FindString(string(text))
	if have == "" {
		t.Fatalf("%s has no table of policies", path)
	}
	if *update && !t.Failed() {
		expect.NoError(t, os.WriteFile(path, []byte(strings.Replace(string(text), have, want, 1)), 0o644))
		return
	}
	if have != want {
		t.Errorf("the table of policies in %s is outdated: run make generate", path)
	}
}
