// Package architecture_test checks the shape of the project: which package may
// import which, which packages are pure, that ARCHITECTURE.md describes what is
// there, and the conventions that a compiler does not check.
package architecture_test

import (
	"encoding/json"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spillway-dev/spillway/e2e/lab/binaries"
)

const module = "github.com/spillway-dev/spillway/"

type pkg struct {
	ImportPath, Dir  string
	Imports, GoFiles []string
}

// packages lists the module's packages with their import paths below the module.
func packages(t *testing.T) (root string, all []pkg) {
	t.Helper()
	root = projectRoot(t)
	cmd := exec.CommandContext(t.Context(), "go", "list", "-json=ImportPath,Dir,Imports,GoFiles", "./...")
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	decoder := json.NewDecoder(strings.NewReader(string(out)))
	for {
		var p pkg
		if err := decoder.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		p.ImportPath = strings.TrimPrefix(p.ImportPath, module)
		all = append(all, p)
	}
	if len(all) < 10 {
		t.Fatalf("found only %d packages", len(all))
	}
	return root, all
}

func projectRoot(t *testing.T) string {
	t.Helper()
	root, err := binaries.Root()
	if err != nil {
		t.Fatal(err)
	}
	return root
}

// pure packages decide and account. They import no client, no HTTP and no wall
// clock, so that their invariants can be proven with properties.
var pure = []string{
	"agent/internal/explain", "agent/internal/health", "agent/internal/placeholder", "agent/internal/whatif",
	"broker/capacity", "broker/charge", "broker/guest", "broker/internal/answers", "broker/internal/decide", "broker/internal/history", "broker/internal/lease", "broker/internal/ledger", "broker/internal/pricing", "broker/internal/spread",
	"broker/internal/page/view", "broker/internal/plan", "broker/internal/queue", "broker/internal/settings", "broker/rehearsal", "broker/text",
	"scheduler-plugin/demand", "scheduler-plugin/returnhome", "virtual-node/internal/translate",
}

func TestPurePackages(t *testing.T) {
	root, all := packages(t)
	banned := []string{"net", "os", "math/rand", "k8s.io/client-go", "k8s.io/kubernetes", "k8s.io/utils/clock", "sigs.k8s.io/controller-runtime"}
	for _, name := range pure {
		i := slices.IndexFunc(all, func(p pkg) bool { return p.ImportPath == name })
		if i < 0 {
			t.Errorf("package %s does not exist: update the list of pure packages", name)
			continue
		}
		for _, dep := range all[i].Imports {
			own, ours := strings.CutPrefix(dep, module)
			if ours && own != "broker/api/v1alpha1" && !slices.Contains(pure, own) {
				t.Errorf("%s imports %s, which is not pure", name, dep)
			}
			for _, ban := range banned {
				// Addresses as values.
				if dep == "net/netip" {
					continue
				}
				if dep == ban || strings.HasPrefix(dep, ban+"/") {
					t.Errorf("%s imports %s: pure packages do no I/O", name, dep)
				}
			}
		}
		for _, file := range all[i].GoFiles {
			for _, use := range timeCalls(t, filepath.Join(root, name, file), wallClock) {
				t.Errorf("%s calls %s: take a clock or a time as an argument", use.position, use.name)
			}
		}
	}
}

func TestImports(t *testing.T) {
	_, all := packages(t)
	const peering = module + "agent/internal/peering/"
	drivers := []string{peering + "liqo/", peering + "direct/"}
	// Controllers of the agent that no other of its rooms needs.
	ofAgent := []string{"agent/internal/hold", "agent/internal/pods", "agent/internal/reachability", "agent/internal/reservation"}
	for _, p := range all {
		for _, dep := range p.Imports {
			switch {
			case strings.HasPrefix(dep, "k8s.io/kubernetes") && !strings.HasPrefix(p.ImportPath, "scheduler-plugin"):
				t.Errorf("%s imports %s: only the scheduler plugin builds on k8s.io/kubernetes", p.ImportPath, dep)
			case dep == module+"broker/internal/server" && p.ImportPath != "broker/program":
				t.Errorf("%s imports %s: the broker that main runs is built in broker/program, for all", p.ImportPath, dep)
			case slices.Contains(ofAgent, strings.TrimPrefix(dep, module)) && p.ImportPath != "agent/program":
				t.Errorf("%s imports %s: the agent that main runs is built in agent/program, for all", p.ImportPath, dep)
			case slices.ContainsFunc(drivers, func(driver string) bool {
				return strings.HasPrefix(dep+"/", driver) && !strings.HasPrefix(module+p.ImportPath+"/", driver)
			}) && p.ImportPath != "agent":
				t.Errorf("%s imports %s: drivers are reached through the port agent/internal/peering", p.ImportPath, dep)
			case strings.HasPrefix(dep, "github.com/liqotech/liqo") && !mayKnowLiqo(p.ImportPath+"/"):
				t.Errorf("%s imports %s: only the liqo driver knows Liqo", p.ImportPath, dep)
			}
		}
		for _, word := range []string{"util", "utils", "common", "helpers", "misc", "http", "build"} {
			if filepath.Base(p.ImportPath) == word {
				t.Errorf("package %s: name the package after what it does", p.ImportPath)
			}
		}
	}
}

// mayKnowLiqo reports whether a file or package below path may name Liqo: the
// driver, the agent's wiring, the charts and the end-to-end environments.
func mayKnowLiqo(path string) bool {
	if wiring, ok := strings.CutPrefix(path, "agent/"); ok && !strings.Contains(strings.TrimSuffix(wiring, "/"), "/") {
		return true
	}
	return slices.ContainsFunc([]string{"agent/internal/peering/liqo/", "charts/", "e2e/"}, func(allowed string) bool {
		return strings.HasPrefix(path, allowed)
	})
}

// TestLiqoOnlyInItsDriver finds Liqo's names in strings, identifiers and comments,
// where the compiler sees no dependency.
func TestLiqoOnlyInItsDriver(t *testing.T) {
	eachGoFile(t, func(path string, content []byte) {
		if mayKnowLiqo(path) {
			return
		}
		for number, line := range strings.Split(string(content), "\n") {
			if strings.Contains(strings.ToLower(line), "liqo") {
				t.Errorf("%s:%d names Liqo: only the liqo driver knows it\n\t%s", path, number+1, strings.TrimSpace(line))
			}
		}
	})
}

// TestTopLevel keeps the visible top level of the project.
func TestTopLevel(t *testing.T) {
	// bin is what make build writes, and is not committed.
	allowed := []string{"scheduler-plugin", "virtual-node", "broker", "agent", "charts", "e2e", "bin"}
	root := projectRoot(t)
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == root || !d.IsDir() {
			return err
		}
		if name := d.Name(); !strings.HasPrefix(name, ".") && !slices.Contains(allowed, name) {
			t.Errorf("folder %s does not belong at the top level", name)
		}
		return fs.SkipDir
	})
	if err != nil {
		t.Fatal(err)
	}
}

var (
	wallClock = []string{"Now", "Since", "Until", "After", "AfterFunc", "Sleep", "Tick", "NewTimer", "NewTicker"}
	sleep     = []string{"Sleep"}
)

type call struct {
	position token.Position
	name     string
}

// timeCalls lists the calls of the named functions of package time in a file.
func timeCalls(t *testing.T, path string, functions []string) []call {
	t.Helper()
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, path, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	var calls []call
	ast.Inspect(file, func(n ast.Node) bool {
		if selector, ok := n.(*ast.SelectorExpr); ok {
			if x, ok := selector.X.(*ast.Ident); ok && x.Name == "time" && slices.Contains(functions, selector.Sel.Name) {
				calls = append(calls, call{files.Position(selector.Pos()), "time." + selector.Sel.Name})
			}
		}
		return true
	})
	return calls
}
